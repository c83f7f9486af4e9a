"""GGUF files: their numbers bit by bit, models of every family, what is amiss."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from foresay.server.catalog.hub import resolve
from foresay.server.engine.parameters import packed_bytes
from foresay.verifier.model.checkpoint import SINGLE, _names
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import ConfigError, ModelError, UnsupportedArchitecture, WeightsError
from foresay.verifier.model.gguf.config import config_of, theirs
from foresay.verifier.model.gguf.directory import _texts
from foresay.verifier.model.gguf.file import TYPES, GgufFile
from foresay.verifier.model.gguf.weights import matrix_of
from foresay.verifier.model.weights import load
from tests.verifier.families import FAMILIES, MSCALE, make
from tests.verifier.gguf_files import (
    all_of,
    blocks_of,
    cache_of_its_own,
    convert,
    gguf,
    letters,
    q4_k_m,
    write,
    writer_of,
)
from tests.verifier.reading import Reader

TOKENS = [7, 3, 250, 41, 99, 12, 180, 5, 77, 291, 14]
WIDTHS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch) -> None:
    cache_of_its_own(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("kind", [one.name for one in TYPES.values()])
def test_numbers_are_those_of_the_package(kind) -> None:
    """Bit by bit, pieces of many rows among them."""
    weight = torch.randn(1100, 512, generator=torch.Generator().manual_seed(4))
    raw, expected = blocks_of(weight, kind, 5)
    found = next(one for one in TYPES.values() if one.name == kind)
    matrix = matrix_of(torch.from_numpy(raw.view("uint8").copy()).flatten(), (1100, 512), found)
    assert torch.equal(matrix.float() if isinstance(matrix, Tensor) else matrix.plain(), expected)


def reader(directory: Path, dtype: torch.dtype = torch.float32) -> Reader:
    config = ModelConfig.from_directory(directory)
    return Reader(Decoder(config, load(directory, config, dtype), 256))


def assert_close(directory: Path, family: str, kind: Any, **shape: Any) -> None:
    """In fp32 the logits are those of the floats that the package makes of the file."""
    make(family, directory / "plain", **{**WIDTHS, **shape})
    convert(directory / "plain", directory / "x.gguf", kind)
    made, exact = resolve(directory / "x.gguf"), reader(directory / "plain").alone(TOKENS)
    assert (reader(made).alone(TOKENS) - exact).abs().max() <= 1e-3 * (exact.max() - exact.min())
    assert ModelConfig.from_directory(made).eos_token_ids == (2,)


def assert_close_in_bf16(directory: Path) -> None:
    """The same no further off than our bf16 pass of these floats, in most rows (in a mixture another last bit may
    choose the other one of two experts that are about as good), and the plan's bytes are those of the products."""
    exact, made = reader(directory / "plain").alone(TOKENS), resolve(directory / "x.gguf")
    plain, narrow = reader(directory / "plain", torch.bfloat16), reader(made, torch.bfloat16)
    half, off = ((each.alone(TOKENS) - exact).abs().mean(1) for each in (plain, narrow))
    config = ModelConfig.from_directory(made)
    if config.stack.experts is None:
        assert off.mean() <= 1.25 * half.mean()
    assert off.median() <= 4.0 * half.median()
    embedding = 2 * config.vocab_size * config.hidden_size
    if (table := narrow.model.decoder.table) is not None:  # it became floats
        embedding += table.nbytes
    assert packed_bytes(config, "bfloat16") - embedding == sum(one.nbytes for one in narrow.model.decoder.linears)


ALTERNATE = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EACH_FOURTH = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
GRANITE_HYBRID = {"shared_intermediate_size": 512, "mamba_d_head": 128}
LATENT = {"kv_lora_rank": 256, "qk_nope_head_dim": 256, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT["moe_intermediate_size"] = 256
#: What files of these families do not say, since llama.cpp knows.
AS_FILES_HAVE_IT = {
    "gemma3": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": WIDTHS["head_dim"],
    },
    "gemma4": {"global_head_dim": 128},
    "gemma4_embedded": {"global_head_dim": 128, "hidden_size_per_layer_input": 256},
    "gemma4_moe": {"global_head_dim": 128, "moe_intermediate_size": 256},
    "gpt_oss": ALTERNATE,
    "gemma2": {"query_pre_attn_scalar": WIDTHS["head_dim"], **ALTERNATE},
    "olmo3": EACH_FOURTH,
    "exaone4": EACH_FOURTH,
    "cohere2": EACH_FOURTH,
    "muse_glimmer": {**EACH_FOURTH, "layer_rope_theta": [1e4, 1e4, 1e4, 0]},
    "qwen3_5": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "qwen3_5_moe": {
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "glm4_moe": {"moe_intermediate_size": 256},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "q_lora_rank": 256, "rope_parameters": {**MSCALE, "mscale": 0.8}},
    "glm4_moe_lite": {**LATENT, "q_lora_rank": 256},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"moe_intermediate_size": 256, "routed_scaling_factor": 1.0},
    "granite_hybrid": GRANITE_HYBRID,
    "granite_hybrid_moe": GRANITE_HYBRID,
    "nemotron_h": {"mamba_head_dim": 128},
    "nemotron_h_moe": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_head_dim": 128,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "num_experts_per_tok": 8,
        "topk_group": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 512},
    "falcon_h1_norm": {"mamba_d_ssm": 512},
    "qwen3_next": {
        "linear_value_head_dim": 64,
        "mlp_only_layers": [],
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "qwen3_moe": {"mlp_only_layers": [], "moe_intermediate_size": 512},
}


WITHOUT_FILES = {"qwen2_window", "qwen2_moe", "granite_swa", "gemma4_unified"}


@pytest.mark.parametrize(("number", "family"), [*enumerate(sorted(set(FAMILIES) - WITHOUT_FILES))])
def test_every_family(tmp_path, number, family) -> None:
    """Every third in bf16 too."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4 if family == "llama2" else 2}
    assert_close(tmp_path, family, q4_k_m, **heads, **AS_FILES_HAVE_IT.get(family, {}))
    if number % 3 == 0:
        assert_close_in_bf16(tmp_path)


@pytest.mark.parametrize("older", [False, True])
def test_a_file_of_qwen3_next_has_the_bits_of_its_checkpoint(tmp_path, monkeypatch, older) -> None:
    """Its rates are grouped by key as there; its other inputs only in older files."""
    if older:
        monkeypatch.setattr("tests.verifier.gguf_files._by_kind", lambda directory, config, tensors: tensors)
    make("qwen3_next", tmp_path / "plain", mlp_only_layers=[])
    wanted = reader(tmp_path / "plain").alone(TOKENS)
    convert(tmp_path / "plain", tmp_path / "x.gguf", all_of("F32"))
    assert torch.equal(reader(resolve(tmp_path / "x.gguf")).alone(TOKENS), wanted)


@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_embedded", "gemma4_moe"])
def test_a_file_of_gemma_4_has_the_bits_of_its_checkpoint(tmp_path, family, kind) -> None:
    make(family, tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "x.gguf", all_of(kind))
    wanted = reader(tmp_path / "plain").alone(TOKENS)
    assert torch.equal(reader(resolve(tmp_path / "x.gguf")).alone(TOKENS), wanted)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("falcon_h1_norm", "FALCON_H1"), ("nemotron_h", "NEMOTRON_H"), ("lfm2", "LFM2"), ("lfm2_moe", "LFM2MOE")],
)
def test_names_are_those_that_the_converter_gives(tmp_path, family, architecture) -> None:
    make(family, tmp_path)
    kind = gguf.MODEL_ARCH[architecture]
    file = GgufFile(tmp_path, {"general.architecture": gguf.MODEL_ARCH_NAMES[kind]}, {})
    known = gguf.get_tensor_name_map(kind, 5)
    with safe_open(tmp_path / SINGLE, "pt") as tensors:
        names = [name for name in tensors.keys() if ".experts." not in name]  # noqa: SIM118 (it is no mapping)
        for ours, name in _names(names).items():
            theirs_there = name.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias")
            if family == "nemotron_h":
                theirs_there = theirs_there.replace("model.layers", "backbone.layers")
            assert theirs(ours, file) == known.get_name(theirs_there, (".weight", ".bias"))


def test_a_norm_s_name_is_the_converter_s_where_two_of_theirs_would_be_ours(tmp_path) -> None:
    file = GgufFile(tmp_path, {"general.architecture": "deepseek2"}, {})
    assert theirs("model.layers.0.post_attention_layernorm.weight", file) == "blk.0.ffn_norm.weight"


@pytest.mark.parametrize("kind", [one.name for one in TYPES.values()])
def test_every_type(tmp_path, kind) -> None:
    assert_close(tmp_path, "smollm", all_of(kind), num_attention_heads=4, num_key_value_heads=2)
    assert_close_in_bf16(tmp_path)


MIXES = {
    "eight bits and K": lambda name: "Q8_0" if "attn_v" in name else "Q4_K",
    "both of four bits": lambda name: "Q4_0" if "ffn_up" in name else "Q4_K",
    "floats among them": lambda name: "F16" if "attn_k" in name or "ffn_up" in name else "Q5_K",
    "a head of floats": lambda name: "F32" if name.startswith("output") else "Q8_0",
}


@pytest.mark.parametrize("mix", MIXES)
def test_types_of_one_product_may_differ(tmp_path, mix) -> None:
    assert_close(tmp_path, "qwen3", MIXES[mix])
    assert_close_in_bf16(tmp_path)


def test_a_directory_of_one_file(tmp_path) -> None:
    make("qwen2", tmp_path / "plain", **WIDTHS)
    (tmp_path / "model").mkdir()
    convert(tmp_path / "plain", tmp_path / "model" / "x.gguf", all_of("Q8_0"))
    made = resolve(tmp_path / "model")
    assert made == resolve(tmp_path / "model" / "x.gguf") == resolve(made)
    (tmp_path / "model" / "y.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF files \(x\.gguf, y\.gguf\)"):
        resolve(tmp_path / "model")


def in_parts(directory: Path, monkeypatch) -> list[Path]:
    """A file cut up by the package, each part a link as in the hub's cache."""
    make("llama_bias", directory / "plain")
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=9))
        convert(directory / "plain", directory / "x.gguf", all_of("Q8_0"))
    (directory / "blobs").mkdir()
    parts = sorted(directory.glob("x-*.gguf"))
    for number, part in enumerate(parts):
        part.symlink_to(part.rename(directory / "blobs" / f"blob{number}"))
    return parts


def test_a_file_in_parts(tmp_path, monkeypatch) -> None:
    """By any part, by its directory; the numbers of the whole."""
    parts = in_parts(tmp_path, monkeypatch)
    assert len(parts) > 2
    made = resolve(parts[0])
    assert made == resolve(parts[1]) == resolve(tmp_path)
    exact = reader(tmp_path / "plain").alone(TOKENS)
    assert (reader(made).alone(TOKENS) - exact).abs().max() <= 1e-3 * (exact.max() - exact.min())


def test_parts_that_are_amiss_are_named(tmp_path, monkeypatch) -> None:
    parts = in_parts(tmp_path, monkeypatch)
    blobs = sorted((tmp_path / "blobs").iterdir())
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(blobs[0])
    with pytest.raises(WeightsError, match=rf"alone.gguf: says that it is part 1 of {len(parts)}: .*gguf-split"):
        resolve(alone)
    parts[1].unlink()
    with pytest.raises(WeightsError, match=rf"{parts[1].name}: cannot be read"):
        resolve(parts[0])
    parts[1].symlink_to(blobs[2])
    with pytest.raises(WeightsError, match=r"two tensors of one name|says that it is part 3"):
        resolve(parts[0])


def test_what_was_made_of_a_file_that_is_gone_goes_too(tmp_path) -> None:
    made = []
    for name in ("x", "y"):
        make("qwen2", tmp_path / name, **WIDTHS)
        convert(tmp_path / name, tmp_path / f"{name}.gguf", all_of("Q8_0"))
        made.append(resolve(tmp_path / f"{name}.gguf"))
        (tmp_path / f"{name}.gguf").rename(tmp_path / "moved")
    assert not made[0].exists() and made[1].exists()


def whole(directory: Path) -> bytes:
    make("qwen2", directory / "plain", **WIDTHS)
    convert(directory / "plain", directory / "x.gguf", all_of("F32"))
    return (directory / "x.gguf").read_bytes()


BROKEN: dict[str, tuple[Any, str]] = {
    "no such file": (lambda data: b"GGML" + data[4:], "is not a GGUF file"),
    "empty": (lambda data: b"", "is not a GGUF file|incomplete"),
    "four bytes": (lambda data: data[:4], "incomplete"),
    "cut in the metadata": (lambda data: data[:300], "incomplete"),
    "cut in the tensors": (lambda data: data[:-100], "ends past the end.*incomplete"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
    "of another version": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
    "absurd depths": (lambda data: data[:24] + bytes(8) + b"\t\0\0\0" + struct.pack("<IQ", 9, 1) * 3000, "incomplete"),
    "absurd counts": (lambda data: data[:8] + b"\xff" * 16 + data[24:], "incomplete"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(tmp_path, case) -> None:
    change, words = BROKEN[case]
    data = whole(tmp_path)
    (tmp_path / "x.gguf").write_bytes(change(data))
    with pytest.raises(WeightsError, match=words):
        resolve(tmp_path / "x.gguf")


def test_no_cut_does_more_than_be_refused(tmp_path) -> None:
    """From the end on, so that nothing is written again: often in what says what there is, seldom among the numbers."""
    whole(tmp_path)
    starts = [tensor.start for tensor in GgufFile.read(tmp_path / "x.gguf").tensors.values()]
    for cut in [*range(max(starts), min(starts), -99_991), *range(min(starts), 8, -97)]:
        os.truncate(tmp_path / "x.gguf", cut)
        with pytest.raises(ModelError):
            resolve(tmp_path / "x.gguf")


def test_metadata_of_another_type_is_refused_or_not_used(tmp_path) -> None:
    make("qwen3_5_moe", tmp_path / "plain", **WIDTHS, **AS_FILES_HAVE_IT["qwen3_5_moe"])
    convert(tmp_path / "plain", tmp_path / "x.gguf", all_of("F32"))
    file = GgufFile.read(tmp_path / "x.gguf")
    for key, wrong in product(file.metadata, (-1, 1, float("nan"), "x", [1])):
        with suppress(ModelError):
            assert dict(_texts(replace(file, metadata={**file.metadata, key: wrong}), tmp_path))


def changed(directory: Path, change: Any, family: str = "qwen2", **tokens: Any) -> Path:
    """A file of a random model whose tensors were changed. change: takes and gives (name, tensor), or gives None."""
    make(family, directory / "plain", **WIDTHS)
    config = ModelConfig.from_directory(directory / "plain")
    writer = writer_of(directory / "x.gguf", config, {**letters(config.vocab_size), **tokens})
    add = writer.add_tensor

    def adding(name: str, *given: Any, **more: Any) -> None:
        found = change(name, *given, **more)
        if found is not None:
            add(found[0], *found[1:], **more)

    from tests.verifier import gguf_files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "add_tensor", adding)
        patch.setattr(gguf_files, "writer_of", lambda *_: writer)
        convert(directory / "plain", directory / "x.gguf", all_of("F32"))
    return directory / "x.gguf"


UP = "blk.1.ffn_up.weight"


def in_blocks(name: str, tensor: Any) -> Any:
    kind = gguf.GGMLQuantizationType.Q8_0
    return name, gguf.quants.quantize(tensor, kind), None, kind


#: A tensor, what is written in its place, and what is said of that.
AMISS: dict[str, tuple[str, Callable[[str, Any], Any], str]] = {
    "missing": (UP, lambda name, tensor: None, f"{UP} is missing from .*x.gguf"),
    "unexpected": (
        UP, lambda name, tensor: ("blk.1.ffn_other.weight", tensor), r"blk\.1\.ffn_other\.weight in .* is unexpected",
    ),
    "another shape": (
        UP, lambda name, tensor: (name, tensor[:-1]), rf"{UP} in .* has shape \[511, 256\], expected \[512, 256\]",
    ),
    **{
        vector: (vector, in_blocks, rf"{vector} in .*x.gguf has type Q8_0; supported: BF16, F16, F32")
        for vector in ("output_norm.weight", "blk.1.attn_norm.weight", "blk.0.attn_k.bias")
    },
}  # fmt: skip


@pytest.mark.parametrize(("tensor", "change", "words"), AMISS.values(), ids=AMISS)
def test_a_tensor_that_is_amiss_is_named(tmp_path, tensor, change, words) -> None:
    def written(name: str, given: Any, **more: Any) -> Any:
        return change(name, given) if name == tensor else (name, given)

    with pytest.raises(WeightsError, match=words):
        reader(resolve(changed(tmp_path, written)))


def test_another_type_is_named(tmp_path) -> None:
    make("qwen2", tmp_path / "plain", **WIDTHS)
    writer = writer_of(tmp_path / "x.gguf", ModelConfig.from_directory(tmp_path / "plain"))
    raw = torch.zeros(512, 256 // 256 * 110, dtype=torch.uint8).numpy()
    writer.add_tensor(UP, raw, raw_dtype=gguf.GGMLQuantizationType.Q3_K)
    write(writer)
    with pytest.raises(WeightsError, match=rf"{UP} has type Q3_K.*supported: F32, F16, Q4_0"):
        resolve(tmp_path / "x.gguf")


def test_another_architecture_is_named(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "starcoder2")
    write(writer)
    with pytest.raises(UnsupportedArchitecture, match=r"starcoder2 is not supported; supported: .*llama.*qwen2"):
        resolve(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qwen2.expert_count", 8),
        ("qwen2.rope.scaling.type", "longrope"),
        ("qwen2.attention.sliding_window", 16),
        ("qwen2.rope.freq_base_swa", 5.0),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(tmp_path, key, value) -> None:
    more = {"qwen2.rope.scaling.factor": 4} if "scaling" in key else {}
    file = changed(tmp_path, lambda *given, **more: given, **{key: value, **more})
    with pytest.raises(ConfigError, match=key.removeprefix("qwen2.")):
        resolve(file)


def test_nowhere_to_write_is_reported(tmp_path, monkeypatch) -> None:
    whole(tmp_path)
    (tmp_path / "no folder").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        resolve(tmp_path / "x.gguf")


def test_which_layers_slide_may_stand_in_the_file(tmp_path) -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    make("olmo3", tmp_path / "plain", layer_types=types, **WIDTHS)
    config = ModelConfig.from_directory(tmp_path / "plain")
    writer = writer_of(tmp_path / "x.gguf", config)
    writer.add_array("olmo2.attention.sliding_window_pattern", [kind == types[1] for kind in types])
    writer.add_tensor("token_embd.weight", np.zeros((300, 256), dtype=np.float32))
    write(writer)
    found = config_of(GgufFile.read(tmp_path / "x.gguf"))
    assert (found["architectures"], found["layer_types"]) == (["Olmo3ForCausalLM"], types)
