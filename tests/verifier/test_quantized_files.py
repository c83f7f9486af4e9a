"""Quantised checkpoints as published: read, refused by name where something is amiss, and written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foresay.server.engine.parameters import packed_bytes, quantized
from foresay.verifier.model.checkpoint import SINGLE, Checkpoint
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.errors import ConfigError, WeightsError
from foresay.verifier.model.quantization import Format, Quantization, Scheme
from foresay.verifier.model.quantization_config import MODELOPT_FILE
from foresay.verifier.model.save_quantized import write
from foresay.verifier.model.weights import check, load
from tests.combinations import alternating
from tests.verifier.families import FAMILIES, make
from tests.verifier.reading import Reader

GROUP = 32


def in_words(numbers: Tensor, bits: int = 4) -> Tensor:
    """int32 words of unsigned numbers along the last dimension, by the formula of the formats."""
    parts = numbers.long().unflatten(-1, (-1, 32 // bits))
    words = sum(part << bits * at for at, part in enumerate(parts.unbind(-1)))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()


def rounded(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned numbers, zeros and scales of four bits, and what they stand for: ours is none of this code."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2, True).clamp_max(0), grouped.amax(2, True).clamp_min(0)
    scale = (torch.maximum(high, -low) / 7 if symmetric else (high - low) / 15).half().float()
    zero = torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(0, 15)
    numbers = (grouped / scale + zero).round().clamp(0, 15)
    meant = ((numbers - zero) * scale).flatten(1)
    return numbers.flatten(1), zero.squeeze(2), scale.squeeze(2), meant


def any_order(inner: int) -> Tensor:
    """An order as of a quantiser that begins with the largest activations: all that read the same have the same."""
    return torch.randperm(inner, generator=torch.Generator().manual_seed(inner))


def gptq_of(weight: Tensor, symmetric: bool, version: int, ordered: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """GPTQ's formula: ``scales[g_idx] * (numbers - zeros[g_idx])``, groups filled in the order of ``first``."""
    inner = weight.shape[1]
    first = any_order(inner) if ordered else torch.arange(inner)
    numbers, zeros, scales, _ = rounded(weight[:, first], GROUP, symmetric)
    numbers, order = numbers[:, first.argsort()], (torch.arange(inner) // GROUP)[first.argsort()]
    meant = scales[:, order] * (numbers - zeros[:, order])
    stored = (zeros - int(version == 1)) % 16
    tensors = {
        "qweight": in_words(numbers).T.contiguous(),
        "qzeros": in_words(stored.T.contiguous()),
        "scales": scales.T.half().contiguous(),
        "g_idx": order.int(),
    }
    return tensors, meant


def awq_of(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    numbers, zeros, scales, meant = rounded(weight, GROUP, False)

    def words(rows: Tensor) -> Tensor:
        return in_words(rows.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    return {"qweight": words(numbers.T), "qzeros": words(zeros.T), "scales": scales.T.half().contiguous()}, meant


def blocks_of(weight: Tensor, rows: int = 48) -> tuple[dict[str, Tensor], Tensor]:
    """e4m3 with a scale for each block: the last has fewer rows."""
    outer = len(weight)
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -outer % rows))
    blocks = filled.unflatten(1, (-1, GROUP)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(rows, 0)[:outer].repeat_interleave(GROUP, 1)
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * spread


def whole_of(weight: Tensor, scale: str, unused: str) -> tuple[dict[str, Tensor], Tensor]:
    """e4m3 with one scale, a number by itself, and one for the activations."""
    step = weight.abs().max() / 448
    numbers = (weight / step).to(torch.float8_e4m3fn)
    return {"weight": numbers, scale: step, unused: torch.tensor(0.1)}, numbers.float() * step


def in_order_of(weight: Tensor, symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Groups of numbers in another order (actorder), which the package wrote once and does no more."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import helpers

    first = any_order(weight.shape[1])
    order = first.argsort()
    tensors, meant = compressed_of(weight[:, first], 4, symmetric, "pack-quantized")
    numbers = helpers.unpack_from_int32(tensors["weight_packed"], 4, weight.shape)[:, order]
    packed = helpers.pack_to_int32(numbers.contiguous(), 4)
    return {**tensors, "weight_packed": packed, "weight_g_idx": order.int() // GROUP}, meant[:, order]


def by_package(layout: str, given: dict[str, Tensor], args: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """What the package that writes such files makes of a weight and its scales, and what it reads of that."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(given, scheme)
    return tensors, compressor.decompress(tensors, scheme)["weight"].float()


def integers(bits: int, symmetric: bool) -> dict[str, Any]:
    strategy: dict[str, Any] = {"strategy": "group", "group_size": GROUP} if bits == 4 else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}


def compressed_of(weight: Tensor, bits: int, symmetric: bool, layout: str) -> tuple[dict[str, Tensor], Tensor]:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    args = integers(bits, symmetric)
    grouped = weight.unflatten(1, (-1, args.get("group_size", weight.shape[1])))
    scales, zeros = calculate_qparams(grouped.amin(2), grouped.amax(2), QuantizationArgs(**args))
    given = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return by_package(layout, given, args)


def floats_of(weight: Tensor, strategy: str) -> tuple[dict[str, Tensor], Tensor]:
    """The same of e4m3."""
    whole = weight.shape[1]
    sizes = {"channel": (1, whole), "group": (1, GROUP), "block": (32, GROUP), "tensor": (len(weight), whole)}
    rows, group = sizes[strategy]
    scales = weight.unflatten(1, (-1, group)).unflatten(0, (-1, rows)).abs().amax((1, 3)) / 448
    scales = scales.flatten() if strategy == "tensor" else scales
    given = {"weight": weight, "weight_scale": scales}
    tensors, meant = by_package("float-quantized", given, FLOATS8[strategy])
    return {**tensors, "input_scale": torch.ones(1)} if strategy == "tensor" else tensors, meant


FLOATS8: dict[str, dict[str, Any]] = {
    strategy: {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    for strategy, more in (
        ("channel", {}), ("group", {"group_size": GROUP}), ("block", {"block_structure": [32, GROUP]}), ("tensor", {}),
    )
}  # fmt: skip


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a configuration says of such a format."""
    about = {"targets": ["Linear"], "weights": weights} | ({"input_activations": inputs} if inputs else {})
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"a": about}, "ignore": ["lm_head"],
    }  # fmt: skip


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}, lambda w: gptq_of(w, False, 1)),
    "gptq sym": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, lambda w: gptq_of(w, True, 1)),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda w: gptq_of(w, False, 2),
    ),
    "gptq order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True},
        lambda w: gptq_of(w, False, 1, ordered=True),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, GROUP]},
        blocks_of,
    ),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda w: whole_of(w, "weight_scale", "input_scale"),
    ),
    "fp8 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_quant_algo": "FP8"},
        lambda w: whole_of(w, "weight_scale", "input_scale"),
    ),
    "fp8 tensor, other names": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda w: whole_of(w, "weight_scale_inv", "activation_scale"),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq_of),
}
for bits_, symmetric_, layout_ in (
    (4, True, "pack-quantized"), (4, False, "pack-quantized"), (8, True, "pack-quantized"),
    (8, True, "int-quantized"), (8, False, "int-quantized"),
):  # fmt: skip
    FORMATS[f"{layout_} {bits_}{'' if symmetric_ else ' zeros'}"] = (
        compressed(layout_, integers(bits_, symmetric_)),
        lambda w, of=(bits_, symmetric_, layout_): compressed_of(w, *of),
    )
WHOLE8 = {"num_bits": 8, "type": "int", "strategy": "tensor"}
FORMATS["int-quantized tensor"] = (  # W8A8
    compressed("int-quantized", WHOLE8, WHOLE8 | {"dynamic": False})
    | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    lambda w: int8_of(w),
)
FORMATS["pack-quantized 4 order"] = (
    compressed("pack-quantized", integers(4, True) | {"actorder": "group"}),
    lambda w: in_order_of(w, True),
)
for kind_, weights_ in FLOATS8.items():
    FORMATS[f"float-quantized {kind_}"] = (
        compressed("float-quantized", weights_, {"num_bits": 8, "type": "float", "dynamic": kind_ != "tensor"}),
        lambda w, of=kind_: floats_of(w, of),
    )


def floats4_of(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """4-bit floats by the package, under ModelOpt's names too; their meaning by the formats' words, in bf16."""
    layout = "nvfp4-pack-quantized" if kind == "modelopt" else kind
    most = weight.unflatten(1, (-1, FLOATS4[layout]["group_size"])).abs().amax(2)
    scales, step = (most / 6).log2().ceil().exp2(), torch.ones(1)
    given = {"weight": weight, "weight_scale": scales}
    if layout.startswith("nvfp4"):
        step = 448 * 6 / weight.abs().max()[None]
        scales = (most / 6 * step).clamp_min(2.0**-6).to(torch.float8_e4m3fn).float()
        given = {"weight": weight, "weight_scale": scales, "weight_global_scale": step}
    tensors, theirs = by_package(layout, given, FLOATS4[layout])
    codes = torch.stack((tensors["weight_packed"] & 15, tensors["weight_packed"] >> 4), -1).flatten(1).int()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
    spread = (scales * (1 / step)).repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    meant = (values * spread).bfloat16().float()
    assert torch.allclose(meant, theirs, rtol=2.0**-6), "it rounds scales to bf16 first"
    if kind == "modelopt":
        tensors = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
        tensors |= {"weight_scale_2": 1 / step[0], "input_scale": torch.tensor(0.1)}
    return tensors, meant


FLOATS4: dict[str, dict[str, Any]] = {
    layout: {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    for layout, strategy, group in (("mxfp4-pack-quantized", "group", 32), ("nvfp4-pack-quantized", "tensor_group", 16))
}
for kind_, weights_ in FLOATS4.items():
    FORMATS[kind_] = compressed(kind_, weights_), lambda w, of=kind_: floats4_of(w, of)
FORMATS["modelopt"] = (
    {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"},
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        "ignore": ["lm_head", "model.layers.*.mlp.gate", "model.visual*"],
    },
    lambda w: floats4_of(w, "modelopt"),
)  # fmt: skip


def int8_of(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """By the package: one scale for all numbers."""
    given = {"weight": weight, "weight_scale": weight.abs().max()[None] / 127}
    tensors, meant = by_package("int-quantized", given, {"num_bits": 8, "strategy": "tensor"})
    return {**tensors, "input_scale": torch.ones(1)}, meant


#: Whole groups of numbers in all rows; one of these matrices is of several heads, and in few bits as a whole.
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 32, "v_head_dim": 32}


def published(directory: Path, kind: str, family: str = "qwen3") -> None:
    """A checkpoint of this format in ``quantized`` and, in ``plain``, the floats that it stands for."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **({"linear_num_value_heads": 8} if family.startswith(("qwen3_5", "qwen3_next")) else {}),
        **({"mamba_n_heads": 8} if family.startswith(("granite_hybrid", "falcon_h1")) else {}),
        **({"mamba_num_heads": 8} if family.startswith("nemotron_h") else {}),
        **(LATENT if family.startswith(("deepseek", "glm4_moe_lite")) else {}),
    }
    make(family, directory / "plain", **sizes, head_dim=32)
    about, convert = FORMATS[kind]
    tensors, floats = load_file(directory / "plain" / SINGLE), {}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        floats[name] = tensor
        if not re.search(r"(_proj(_\w+)?|layer_projection|_input_gate|mlp\.\w+_linear|\.w[123])\.weight$", name):
            stored[name] = tensor
            continue
        made, floats[name] = convert(tensor)
        stored.update({f"{name.removesuffix('.weight')}.{part}": each for part, each in made.items()})
    save_file(floats, directory / "plain" / SINGLE, metadata={"format": "pt"})
    save(directory / "quantized", stored, {**config_of(directory / "plain"), "quantization_config": about})


def save(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / SINGLE)
    (directory / "config.json").write_text(json.dumps(config))


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def reader(directory: Path, dtype: torch.dtype = torch.float32, how: str | None = None) -> Reader:
    config = quantized(ModelConfig.from_directory(directory), how, "--quantize")
    return Reader(Decoder(config, load(directory, config, dtype), 256))


TOKENS = [7, 3, 250, 41, 99, 12, 180, 5, 77, 291, 14]


#: Others have tensors of all experts, of which there are none of few bits in safetensors files.
MIXTURES = (
    "qwen3_moe", "olmoe", "mixtral", "glm4_moe", "qwen3_5_moe", "qwen3_next", "nemotron_h_moe", "deepseek_v2",
    "deepseek_v3", "glm4_moe_lite", "lfm2_moe", "minimax_m2",
)  # fmt: skip
ONE_BY_ONE = [
    family for family in FAMILIES if family not in ("granite_moe", "granite_hybrid_moe", "gpt_oss", "gemma4_moe")
]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *((("gptq", "gptq order", "awq", "fp8 blocks")[at % 4], family) for at, family in enumerate(ONE_BY_ONE)),
        *((kind, "glm4_moe_lite") for kind in ("fp8 blocks", "pack-quantized 4", "float-quantized channel")),
    ],
)
def test_every_family(tmp_path, kind, family) -> None:
    assert_close_to_floats(tmp_path, kind, family)


def test_floats_of_all_experts_are_no_quantised_ones(tmp_path) -> None:
    published(tmp_path, "gptq", "granite_moe")
    with pytest.raises(WeightsError, match=r"experts\.0\.gate_proj\.qweight is missing"):
        reader(tmp_path / "quantized")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(tmp_path, kind) -> None:
    assert_close_to_floats(tmp_path, kind, "qwen3")


def assert_close_to_floats(directory: Path, kind: str, family: str) -> None:
    """In fp32 the logits are those of the floats; in bf16 no further off than our bf16 pass of these."""
    published(directory, kind, family)
    exact = reader(directory / "plain").alone(TOKENS)
    room = exact.max() - exact.min()
    found = reader(directory / "quantized").alone(TOKENS)
    assert (found - exact).abs().max() <= 1e-3 * room
    if family in MIXTURES:  # where two experts are about as good, another last bit may choose the other one
        return
    half = (reader(directory / "plain", torch.bfloat16).alone(TOKENS) - exact).abs().mean()
    assert (reader(directory / "quantized", torch.bfloat16).alone(TOKENS) - exact).abs().mean() <= 1.25 * half


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "family"), alternating([*FLOATS4, "modelopt"], ["qwen3", "qwen3_moe", "glm4_moe"]))
def test_floats_of_four_bits_have_the_bits_of_the_copy_in_bf16(tmp_path, kind, family, dtype) -> None:
    published(tmp_path, kind, family)
    found, plain = (reader(tmp_path / name, dtype) for name in ("quantized", "plain"))
    assert torch.equal(found.alone(TOKENS), plain.alone(TOKENS))
    held = sum(one.nbytes for one in found.model.decoder.linears) + found.model.decoder.embedding.nbytes
    assert dtype is torch.float32 or packed_bytes(found.model.decoder.config, "bfloat16") == held


def test_modelopts_own_file_says_the_same(tmp_path) -> None:
    published(tmp_path, "modelopt")
    config, own = config_of(tmp_path / "quantized"), {"quant_algo": "NVFP4", "group_size": 16}
    expected = ModelConfig.from_directory(tmp_path / "quantized").quantization
    own["exclude_modules"] = config.pop("quantization_config")["ignore"]
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantized" / MODELOPT_FILE).write_text(json.dumps({"quantization": own}))
    assert ModelConfig.from_directory(tmp_path / "quantized").quantization == expected is not None
    assert expected.scheme("model.layers.0.mlp.gate", 32) is None is not expected.scheme("mlp.gate_proj", 32)


@pytest.mark.parametrize("family", ["glm4_moe", "nemotron_h_moe"])
def test_each_module_of_modelopts_may_have_its_own_kind(tmp_path, family) -> None:
    """Attention in fp8, experts in NVFP4, routers in neither, as its own file lists them by the outer model's names, or
    by the family's own."""
    files, algorithms = dict[tuple[str, str], dict[str, Tensor]](), {"modelopt": "NVFP4", "fp8 of modelopt": "FP8"}
    for kind in algorithms:
        published(tmp_path / kind, kind, family)
        attends = kind != "modelopt"
        for copy in ("plain", "quantized"):
            found = load_file(tmp_path / kind / copy / SINGLE)
            files[kind, copy] = {
                name: each for name, each in found.items() if bool(re.search(r"\.[qkvo]_proj", name)) == attends
            }
    layers = {
        name.removesuffix(".weight_scale").replace("model.", "model.language_model."): {"quant_algo": algorithm}
        for kind, algorithm in algorithms.items()
        for name in files[kind, "quantized"]
        if name.endswith(".weight_scale")
    }
    for copy in ("plain", "quantized"):
        both = files["modelopt", copy] | files["fp8 of modelopt", copy]
        save(tmp_path / copy, both, config_of(tmp_path / "modelopt" / "plain"))
    own = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (tmp_path / "quantized" / MODELOPT_FILE).write_text(json.dumps(own))
    quantization = ModelConfig.from_directory(tmp_path / "quantized").quantization
    assert str(quantization) == "fp4 in groups of 16, fp8 by tensor"
    exact, logits = (reader(tmp_path / copy).alone(TOKENS) for copy in ("plain", "quantized"))
    assert (logits - exact).abs().max() <= 1e-3 * (exact.max() - exact.min())


def ending_in(byte: int) -> Callable[[Tensor], Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        tensor.flatten().view(torch.uint8)[-4:] = byte
        return tensor

    return changed


#: The format, a tensor of the second layer, what becomes of it, and what is said of that besides its name.
BROKEN: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "scales are missing": ("gptq", "mlp.down_proj.scales", lambda t: None, ""),
    "scales are of another shape": ("gptq", "mlp.down_proj.scales", lambda t: t[:, :-1], ""),
    "numbers are of another type": ("gptq", "mlp.down_proj.qweight", lambda t: t.float(), ""),
    "groups are in another order": ("gptq", "mlp.down_proj.g_idx", lambda t: t.flip(0), ""),
    "the order is missing": ("gptq order", "mlp.down_proj.g_idx", lambda t: None, ""),
    "the order fills no groups": (
        "gptq order", "mlp.down_proj.g_idx", torch.zeros_like, " .*does not give each of 5 groups 32 numbers",
    ),
    "what is multiplied alike has two orders": (
        "gptq order", "mlp.up_proj.g_idx", lambda t: t.flip(0), " .*a different order of groups",
    ),
    "the scale of all is missing": ("float-quantized tensor", "mlp.up_proj.weight_scale", lambda t: None, ""),
    "there is one scale too many": ("float-quantized tensor", "mlp.up_proj.weight_scale", lambda t: t.repeat(2), ""),
    "scales of blocks are missing": ("fp8 blocks", "mlp.gate_proj.weight_scale_inv", lambda t: None, ""),
    "words are missing": ("pack-quantized 4", "mlp.down_proj.weight_packed", lambda t: t[:, 1:], ""),
    "numbers are NaN": ("fp8 blocks", "self_attn.k_proj.weight", ending_in(0x7F), " has numbers that are NaN"),
    "scales are NaN": ("modelopt", "self_attn.k_proj.weight_scale", ending_in(0x7F), " has scales that are NaN"),
    "scales are huge": (
        "modelopt", "self_attn.k_proj.weight_scale_2", ending_in(0x7E), " is 8.4.*, with which weights may be infinite",
    ),
    "the scale of all is NaN": (
        "nvfp4-pack-quantized", "self_attn.k_proj.weight_global_scale", ending_in(0xFF),
        " is nan, which is not a positive number",
    ),
    "the scale of all is tiny": (
        "nvfp4-pack-quantized", "self_attn.k_proj.weight_global_scale", ending_in(0x01),
        " is 2.3.*, with which weights may be infinite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_amiss_is_named(tmp_path, case) -> None:
    kind, part, change, words = BROKEN[case]
    published(tmp_path, kind)
    name = f"model.layers.1.{part}"
    tensors = load_file(tmp_path / "quantized" / SINGLE)
    changed = change(tensors.pop(name))
    tensors |= {} if changed is None else {name: changed}
    save(tmp_path / "quantized", tensors, config_of(tmp_path / "quantized"))
    with pytest.raises(WeightsError, match=name + words):
        reader(tmp_path / "quantized")


@pytest.mark.parametrize("how", ["the weights alone", "a whole layer"])
def test_what_fp8_leaves_as_it_is(tmp_path, how) -> None:
    """modules_to_not_convert: modules, and what stands above them; qkv and gate_up as wholes."""
    published(tmp_path, "fp8 blocks")
    about = {"the weights alone": ["self_attn.o_proj", "lm_head"], "a whole layer": ["model.layers.1"]}[how]
    config, plain = config_of(tmp_path / "quantized"), load_file(tmp_path / "plain" / SINGLE)
    config["quantization_config"]["modules_to_not_convert"] = about
    tensors = load_file(tmp_path / "quantized" / SINGLE)
    for name in list(tensors):
        if name.endswith("_proj.weight") and any(each in name for each in about):
            tensors[name] = plain[name]
            del tensors[f"{name}_scale_inv"]
    save(tmp_path / "quantized", tensors, config)
    exact, found = reader(tmp_path / "plain").alone(TOKENS), reader(tmp_path / "quantized").alone(TOKENS)
    assert (found - exact).abs().max() <= 1e-3 * (exact.max() - exact.min())


def test_zeros_that_are_none_are_refused_where_weights_are_called_symmetric(tmp_path) -> None:
    published(tmp_path, "gptq")
    config = config_of(tmp_path / "quantized")
    config["quantization_config"]["sym"] = True
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"qzeros.*symmetric"):
        reader(tmp_path / "quantized")


GROUPS = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
WHOLE = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}
MODELOPT, Q_PROJ = {"quant_method": "modelopt"}, "model.layers.0.self_attn.q_proj"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "bitsandbytes.*compressed-tensors"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "gptq.*3 bits"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "groups of 48"),
    ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "lm_head"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
    ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
    ({"quant_method": "fp8", "weight_block_size": [128, 48]}, "groups of 48"),
    ({"quant_method": "fp8", "weight_block_size": [8, 32], "activation_scheme": "group"}, "activation_scheme 'group'"),
    ({"quant_method": "fp8", "weight_block_size": [8, 32], "fmt": "e5m2"}, "e5m2"),
    ({"format": "nvfp4-pack-quantized", "config_groups": {"g": GROUPS}}, "nvfp4"),
    ({"format": "float-quantized", "config_groups": {"g": GROUPS}}, "4 bits of type int"),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "quant_algo 'FP8_PB_WO' .*modelopt .nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing"),
    (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "W4A8_AWQ"}}, **MODELOPT},
        "quantized_layers, a.b: .*quant_algo 'W4A8_AWQ'",
    ),
    (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {f"{Q_PROJ}": {"quant_algo": "FP8"}}, **MODELOPT},
        f"alike, not {Q_PROJ}: fp8 by tensor, .*k_proj: floats",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
    ({"format": "pack-quantized", "config_groups": {"g": GROUPS | {"output_activations": {"num_bits": 8}}}}, "outputs"),
    (
        {"format": "pack-quantized", "config_groups": {"g": GROUPS}, "kv_cache_scheme": {"num_bits": 4}},
        "kv_cache_scheme: a KV cache of int4",
    ),
    ({"format": "int-quantized", "config_groups": {"g": GROUPS | {"weights": WHOLE}}}, "strategy 'tensor'"),
    ({"format": "pack-quantized", "config_groups": {"g": GROUPS}, "ignore": ["re:("]}, "not a valid pattern"),
    ({"format": "pack-quantized", "config_groups": {"g": GROUPS}, "ignore": ["re:.*q_proj"]}, "quantised alike"),
    ({"quant_method": "fp8", "ignored_layers": ["re:((a{99}){99}){99}"]}, "ignored_layers: .*repeats more than 1,000"),
    (
        {"quant_method": "gguf", "modules": [["re:" + "(" * 3000 + ")" * 3000, ["Q8_0"]]]},
        "modules: .*is not a valid pattern",
    ),
    ({"quant_method": "fp8", "ignored_layers": [r"re:(?:(.)|.)+\1{3}$"]}, "takes too long"),
]


@pytest.mark.parametrize(("about", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_not_supported_is_refused(tmp_path, about, words) -> None:
    make("qwen3", tmp_path)
    config = config_of(tmp_path) | {"quantization_config": {"quant_method": "compressed-tensors", **about}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        check(Checkpoint.open(tmp_path), ModelConfig.from_directory(tmp_path))


@pytest.mark.parametrize(
    ("about", "all_but"),
    [
        ({"format": "pack-quantized", "config_groups": {"g": GROUPS}, "ignore": ["re:([a-z0-9_.]+)+!"]}, True),
        ({"format": "pack-quantized", "config_groups": {"g": GROUPS | {"targets": ["re:(.*)*!"]}}}, False),
        ({"quant_method": "fp8", "ignored_layers": ["re:(.|.)*!"]}, True),
        ({"quant_method": "gguf", "modules": [["re:([a-z0-9_.]+)+!", ["Q8_0"]]]}, False),
    ],
    ids=["ignore", "targets", "ignored_layers", "modules"],
)
def test_a_pattern_that_never_ends_does_not_hold_loading_up(tmp_path, about, all_but) -> None:
    """all_but: whether it names what is not quantised; it matches no module."""
    make("qwen3", tmp_path)
    config = config_of(tmp_path) | {"quantization_config": {"quant_method": "compressed-tensors", **about}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = ModelConfig.from_directory(tmp_path).quantization
    assert quantization is not None
    assert (quantization.scheme("model.layers.0.self_attn.q_proj", 64) is not None) is all_but


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (r"model\.layers\.1\.", {"1.mlp.down_proj", "1.self_attn.o_proj", "1.mamba.in_proj"}),
        (r"model\.language_model\.layers\.1\.mlp", {"1.mlp.down_proj"}),
        (r"language_model\.model\.layers\.0\.self_attn", {"0.self_attn.o_proj"}),
        (r".*feed_forward\.w2$", {"0.mlp.down_proj", "1.mlp.down_proj"}),  # LFM2
        (r".*\.self_attn\.out_proj", {"0.self_attn.o_proj", "1.self_attn.o_proj"}),
        (r"backbone\.layers\.1\.mixer\.(in|o)_proj", {"1.self_attn.o_proj", "1.mamba.in_proj"}),  # Nemotron-H
        (r"model.*feed_forward\.down_proj", {"0.mlp.down_proj", "1.mlp.down_proj"}),  # Falcon-H1
        (r"visual\.|mlp", set()),  # a pattern matches from the beginning
        (r"(?!.*(mlp|mamba))", {"0.self_attn.o_proj", "1.self_attn.o_proj"}),  # no other family's names
        (r"(?!model\.layers\.0)", {"1.mlp.down_proj", "1.self_attn.o_proj", "1.mamba.in_proj"}),
    ],
)
def test_a_pattern_matches_the_names_that_its_family_has_in_files(pattern, kept) -> None:
    scheme = Scheme(8, None, True, Format.INTEGERS)
    quantization = Quantization("compressed-tensors", (("Linear", scheme),), (f"re:{pattern}",))
    names = [f"{layer}.{name}" for layer in (0, 1) for name in ("mlp.down_proj", "self_attn.o_proj", "mamba.in_proj")]
    assert {name for name in names if quantization.scheme(f"model.layers.{name}", 64) is None} == kept


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_names_that_are_kept_are_parts_of_names(tmp_path, method) -> None:
    make("qwen3", tmp_path)
    about = {"quant_method": method, "bits": 4, "modules_to_not_convert": ["layers.1", "mlp.gate_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(config_of(tmp_path) | {"quantization_config": about}))
    quantization = ModelConfig.from_directory(tmp_path).quantization
    assert quantization is not None
    kept = {
        name: quantization.scheme(f"model.layers.{name}", 128) is None
        for name in ("0.mlp.gate_proj", "0.mlp.up_proj", "1.mlp.up_proj", "11.mlp.up_proj")
    }
    assert kept == {
        "0.mlp.gate_proj": True,
        "0.mlp.up_proj": False,
        "1.mlp.up_proj": True,
        "11.mlp.up_proj": method == "awq",  # of names' beginnings, as the library that writes them
    }


@pytest.mark.parametrize("family", ["qwen3", "smollm", "glm4_moe_lite"], ids=["untied", "tied", "latents"])
@pytest.mark.parametrize("how", ["int8", "int4", "fp8"])
def test_a_written_model_is_the_one_made_at_load_time(tmp_path, how, family) -> None:
    """Bit by bit; and its bytes are those of the plan."""
    make(family, tmp_path / "plain", hidden_size=288, max_shard_size="100kB")
    config = quantized(ModelConfig.from_directory(tmp_path / "plain"), how, "--quantize")
    write(tmp_path / "plain", config, tmp_path / "out", lambda share: None)
    made, read = reader(tmp_path / "plain", torch.bfloat16, how), reader(tmp_path / "out", torch.bfloat16)
    assert torch.equal(made.alone(TOKENS), read.alone(TOKENS))
    linears = made.model.decoder.linears
    assert [one.nbytes for one in linears] == [one.nbytes for one in read.model.decoder.linears]
    planned = packed_bytes(config, "bfloat16") - 2 * config.vocab_size * config.hidden_size
    assert planned == sum(one.nbytes for one in linears)


@pytest.mark.parametrize("how", ["int8", "int4", "fp8"])
def test_the_package_reads_what_we_write(tmp_path, how) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    make("smollm", tmp_path / "plain")
    config = quantized(ModelConfig.from_directory(tmp_path / "plain"), how, "--quantize")
    write(tmp_path / "plain", config, tmp_path / "out", lambda share: None)
    about = QuantizationConfig.model_validate(config_of(tmp_path / "out")["quantization_config"])
    head = next(group for group in about.config_groups.values() if "lm_head" in group.targets)
    compressor = BaseCompressor.get_value_from_registry(about.format)
    tensors = load_file(next((tmp_path / "out").glob("*.safetensors")))
    mine = {name.removeprefix("lm_head."): each for name, each in tensors.items() if name.startswith("lm_head.")}
    weights = load(tmp_path / "plain", config, torch.float32)
    assert not isinstance(weights.lm_head, Tensor)
    assert torch.equal(compressor.decompress(mine, head)["weight"].float(), weights.lm_head.plain().bfloat16().float())
