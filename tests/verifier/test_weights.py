"""Fused weights against transformers' state dict, and every way in which a checkpoint can fail to be whole."""

from __future__ import annotations

import json
import random
import re
import shutil
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foresay.server.engine.parameters import quantized
from foresay.verifier.model import per_layer
from foresay.verifier.model.checkpoint import Checkpoint
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import WeightsError
from foresay.verifier.model.recurrences import DECAYS
from foresay.verifier.model.save_quantized import write
from foresay.verifier.model.weights import ModelWeights, load
from tests.verifier.families import FAMILIES, less_one, make, of_heads
from tests.verifier.reading import Reader, load_decoder, random_tokens

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read(directory, dtype=torch.float32) -> ModelWeights:
    return load(directory, ModelConfig.from_directory(directory), dtype)


def of_experts(name: str, tensor: Tensor, in_turns: bool) -> tuple[str, Tensor]:
    """Of all experts gates lie one below the other, then what they are for. in_turns: gpt-oss has [E, H, 2 I], gates
    and these in turns."""
    prefix, _, part = name.partition(".experts.")
    module, bias, _ = part.partition("_bias")
    rows = tensor.mT if in_turns and not bias else tensor
    halves: tuple[Tensor, ...] = (rows,)
    if module == "gate_up_proj":
        halves = (rows[:, ::2], rows[:, 1::2]) if in_turns else rows.chunk(2, dim=1)
    own = f"{prefix.rpartition('.')[0]}.mlp.{module}.{'bias' if bias else 'weight'}"
    return own, torch.cat([half.flatten(0, 1) for half in halves])


def _called(name: str, shared: str) -> str:
    """What most models call it. shared: what an MLP is called that all rows go through."""
    name = name.replace("language_model.", "").replace("shared_mlp.input_linear", f"{shared}.gate_up_proj")
    return name.replace("shared_mlp.output_linear", f"{shared}.down_proj")


def assert_equal(weights: ModelWeights, model, dtype=torch.float32) -> None:
    """Every fused tensor holds the projections of the state dict in the documented order, and nothing is left over."""
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if "vision" not in name}
    shared = "mlp.shared_experts" if any("block_sparse_moe" in name for name in state) else "mlp"
    state = {_called(name, shared): tensor for name, tensor in state.items()}
    if any("per_expert_scale" in name for name in state):  # Gemma 4's experts, beside an MLP that all rows go through
        moved = {".mlp.": ".mlp.shared_expert.", ".experts.": ".mlp.experts."}
        for own, usual in moved.items():
            state = {name.replace(own, usual): tensor for name, tensor in state.items()}
    if less_one(model):  # its norms multiply by one more; the last one of Muse does not
        more = "layernorm.weight" if model.config.model_type.startswith("muse") else "norm.weight"
        less = [name for name in state if name.endswith(more) and "linear_attn" not in name]
        state |= {name: state[name] + 1 for name in less}

    if hasattr(own := model.config, "kv_lora_rank"):
        state = of_heads(state, own.qk_nope_head_dim, own.v_head_dim)
        state = {name.replace(".q_proj", ".q_b_proj"): each for name, each in state.items()}
        state |= {name: each.flatten(0, -2) for name, each in state.items() if "_b_proj" in name}

    in_turns = model.config.model_type == "gpt_oss"
    state = dict(of_experts(*one, in_turns) if ".experts." in one[0] else one for one in state.items())

    def take(prefix, *names):
        return torch.cat([state.pop(f"{prefix}{name}") for name in names])

    def check(actual, prefix, *names):
        if actual is not None:
            assert actual.dtype == dtype
            stored = take(prefix, *names)
            assert torch.equal(actual, -stored.exp() if names[0] in DECAYS else stored)

    split = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.kv_a_proj_with_mqa"),
        "query_down": ("self_attn.q_a_proj",),
        "queries": ("self_attn.q_b_proj",),
        "head_keys": ("self_attn.k_b_proj",),
        "head_values": ("self_attn.v_b_proj",),
        "output": ("self_attn.o_proj", "linear_attn.out_proj", "mamba.out_proj"),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "head_gate": ("self_attn.gate_proj",),
        "mixed": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_qkvz", "mamba.in_proj"),
        "rates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a", "linear_attn.in_proj_ba"),
        "shared_gate_up": tuple(
            f"mlp.shared_expert{s}.{one}_proj" for s in ("", "s") for one in ("gate", "up", "gate_up")
        ),
        "shared_down": ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"),
        **{name: (name,) for name in (per_layer.GATE, per_layer.BACK)},
    }
    whole = {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}."
        of = {name: (*whole.get(name, ()), *names) for name, names in split.items()}
        modules = {name: [one for one in names if f"{prefix}{one}.weight" in state] for name, names in of.items()}
        for kind, tensors in (("weight", layer.matrices), ("bias", layer.biases)):
            for name, tensor in tensors.items():
                check(tensor, prefix, *(f"{module}.{kind}" for module in modules[name]))
        for name, vector in layer.vectors.items():
            own = re.sub(r"block_sparse_moe\.(?=gate|e_score)", "mlp.", name).replace("router.layer", "router")
            check(vector, prefix, own)
    check(weights.embed, "model.", "embed_tokens.weight")
    for name, vector in weights.final_norm.items():
        check(vector, "", name)
    check(weights.lm_head, "", "lm_head.weight")
    check(weights.table, "", per_layer.TABLE)
    for name, tensor in {**weights.outside.matrices, **weights.outside.vectors}.items():
        check(tensor, "", name.removesuffix(".weight") + ".weight")
    assert not state


#: Of families whose modules all have other names.
OTHER_NAMES = {"lfm2", "lfm2_moe", "nemotron_h", "nemotron_h_moe", "falcon_h1", "falcon_h1_norm"}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - OTHER_NAMES))
def test_fused_tensors_hold_the_state_dict(tmp_path, family):
    model = make(family, tmp_path)
    weights = read(tmp_path)
    assert_equal(weights, model)
    assert (weights.lm_head is weights.embed) == model.config.get_text_config().tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_on_the_way(tmp_path, dtype):
    model = make("qwen3", tmp_path)
    assert_equal(read(tmp_path, dtype), model, dtype)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "smollm"], ids=["untied", "tied"])
def test_matrices_of_16_bits_stay_as_they_are_stored_where_a_cpu_computes_in_fp32(tmp_path, family, stored):
    make(family, tmp_path).to(stored).save_pretrained(tmp_path)
    weights = read(tmp_path)
    found = [matrix for layer in weights.layers for matrix in layer.matrices.values()]
    assert {matrix.dtype for matrix in found if isinstance(matrix, Tensor)} == {stored}
    assert isinstance(weights.lm_head, Tensor)
    assert weights.lm_head.dtype == (stored if family == "qwen3" else torch.float32)
    assert (
        weights.embed.dtype
        == weights.final_norm["model.norm.weight"].dtype
        == weights.layers[0].vectors["input_layernorm.weight"].dtype
        == torch.float32
    )


def test_where_stored_types_differ_all_is_cast(tmp_path):
    model = make("qwen3", tmp_path)
    model.lm_head.bfloat16()
    model.save_pretrained(tmp_path)
    assert_equal(read(tmp_path), model)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_of_bf16_computes_in_fp32_and_is_kept_in_16_bits(tmp_path, stored):
    """Against transformers, whose weights are widened."""
    model = make("smollm", tmp_path)  # rounded to what bf16 holds
    deepcopy(model).to(stored).save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    kept = {linear.nbytes // (linear.in_features * linear.out_features) for linear in decoder.linears}
    assert kept == {2}
    tokens = random_tokens(random.Random(0), 40, decoder.config.vocab_size)
    expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Reader(decoder).alone(tokens), expected, atol=2e-4, rtol=2e-4)


def test_sharded(tmp_path):
    model = make("qwen3", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_equal(read(tmp_path), model)


def test_progress_counts_every_byte(tmp_path, capsys):
    make("qwen2", tmp_path)
    sizes = [tensor.nbytes for tensor in load_file(tmp_path / SINGLE).values()]
    reported: list[float] = []
    capsys.readouterr()
    load(tmp_path, ModelConfig.from_directory(tmp_path), torch.bfloat16, progress=reported.append)
    steps = [after - before for before, after in pairwise([0.0, *reported])]
    assert sorted(steps) == pytest.approx(sorted(size / sum(sizes) for size in sizes)) and reported[-1] == 1
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def edit(tmp_path):
    """A small checkpoint, and a way to rewrite its tensors."""
    make("llama2", tmp_path, num_hidden_layers=1)

    def edit(change):
        tensors = load_file(tmp_path / SINGLE)
        change(tensors)
        save_file(tensors, tmp_path / SINGLE)
        return tmp_path

    return edit


def refused(directory, *words, dtype=torch.float32):
    with pytest.raises(WeightsError) as caught:
        read(directory, dtype)
    assert all(word in str(caught.value) for word in words), caught.value


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def changed(name, change):
    return lambda tensors: tensors.update({name: change(tensors.get(name))})


LAYER = "model.layers.0."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(f"{LAYER}self_attn.k_proj.weight", "lm_head.weight"),
         [f"{LAYER}self_attn.k_proj.weight is missing", "lm_head.weight is missing", SINGLE]),
        (changed(f"{LAYER}self_attn.q_proj.bias", lambda _: torch.zeros(64)),
         [f"{LAYER}self_attn.q_proj.bias", "unexpected", SINGLE]),
        (changed("vision_tower.weight", lambda _: torch.zeros(2, 2)), ["vision_tower.weight", "unexpected", SINGLE]),
        (changed("model.norm.weight", lambda _: torch.ones(65)), ["model.norm.weight", "[65]", "[64]", SINGLE]),
        (changed(f"{LAYER}mlp.down_proj.weight", lambda matrix: matrix.t().contiguous()),
         [f"{LAYER}mlp.down_proj.weight", "[160, 64]", "[64, 160]", SINGLE]),
        (changed(f"{LAYER}mlp.up_proj.weight", lambda matrix: matrix.to(torch.float8_e4m3fn)),
         [f"{LAYER}mlp.up_proj.weight", "F8_E4M3", "BF16", SINGLE]),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[1:]], ["and 3 more"]),
        (changed("language_model.model.norm.weight", lambda _: torch.ones(64)),
         ["norm.weight and ", "norm.weight are one tensor by two names"]),
    ],
)  # fmt: skip
def test_what_is_amiss_is_named(edit, change, words):
    refused(edit(change), *words)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_keys_of_layers_that_read_those_of_others_are_left_out(tmp_path, quantize):
    """As published files have them; of other layers they are unexpected still."""
    make("gemma4", tmp_path / "plain")
    names = [f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    tensors = load_file(tmp_path / "plain" / SINGLE)
    for layer, changed in ((3, "more"), (1, "wrong")):
        shutil.copytree(tmp_path / "plain", tmp_path / changed)
        more = {f"model.layers.{layer}.{name}": torch.full((3, 64), torch.nan) for name in names}
        save_file({**more, **tensors}, tmp_path / changed / SINGLE)
    config = quantized(ModelConfig.from_directory(tmp_path / "plain"), quantize, "--quantize")
    plain, found = (load(tmp_path / name, config, torch.float32) for name in ("plain", "more"))
    for mine, its in zip(found.layers, plain.layers, strict=True):
        assert list(mine.matrices) == list(its.matrices)
        assert all(torch.equal(whole(mine.matrices[name]), whole(its.matrices[name])) for name in its.matrices)
    narrow = quantized(ModelConfig.from_directory(tmp_path / "more"), "int8", "")
    write(tmp_path / "more", narrow, tmp_path / "out", lambda done: None)
    assert not [name for name in Checkpoint.open(tmp_path / "out").tensors if "layers.3.self_attn.k" in name]
    refused(tmp_path / "wrong", "model.layers.1.self_attn.v_proj.weight", "unexpected")


def whole(matrix):
    return matrix if isinstance(matrix, torch.Tensor) else matrix.numbers()


def test_buffers_of_old_checkpoints_are_ignored(edit):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert len(read(edit(lambda tensors: tensors.update(extra))).layers) == 1


def test_values_beyond_float16_are_refused(edit):
    directory = edit(lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    refused(directory, "model.norm.weight", "float16", "bfloat16", dtype=torch.float16)
    final = read(directory, torch.bfloat16).final_norm["model.norm.weight"]
    assert final[0].item() == pytest.approx(1e5, rel=0.01)


def test_a_stored_head_must_equal_the_embedding_it_is_tied_to(edit, tmp_path):
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    refused(tmp_path, "lm_head.weight", "model.embed_tokens.weight", SINGLE)
    edit(lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    weights = read(tmp_path, torch.bfloat16)
    assert weights.lm_head is weights.embed


def test_absent_shard_and_absent_tensor_of_a_shard(tmp_path):
    make("llama2", tmp_path, max_shard_size="100KB")
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    shard = tmp_path / weight_map["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    refused(tmp_path, "model.norm.weight is missing", shard.name)
    shard.unlink()
    refused(tmp_path, shard.name, "incomplete")


def test_a_tensor_in_two_shards(tmp_path):
    make("llama2", tmp_path, max_shard_size="100KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    save_file({**load_file(first), **load_file(second)}, second)
    refused(tmp_path, "is in both", first.name, second.name)


def test_no_weights_at_all(edit, tmp_path):
    (tmp_path / SINGLE).rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, SINGLE, INDEX, "pytorch_model.bin")


def test_a_cut_off_file(edit, tmp_path):
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[: len(data) // 2])
    refused(tmp_path, SINGLE, "not a complete safetensors file")


def test_files_larger_than_the_memory_are_read(tmp_path) -> None:
    """And behind a byte what is at an odd offset, an empty tensor too."""
    end = 1 << 40
    ranges = {"a": (0, end), "byte": (end, end + 1), "odd": (end + 1, end + 7), "empty": (end + 7, end + 7)}
    entries = {
        name: {"dtype": "BF16", "shape": [(last - first) // 2], "data_offsets": [first, last]}
        for name, (first, last) in ranges.items()
    }
    header = json.dumps(entries | {"byte": {"dtype": "U8", "shape": [1], "data_offsets": ranges["byte"]}}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end + 7)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors["a"].nbytes == end
    tensors = checkpoint.opened(tmp_path / SINGLE)
    assert tensors.get_tensor("a")[-1] == 0
    assert [tensors.get_tensor(name).tolist() for name in ("odd", "empty")] == [[0.0] * 3, []]
