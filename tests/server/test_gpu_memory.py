"""The memory plan of GPUs that are not here: the device's numbers are made up, the arithmetic is the server's."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PagePool, StatePages, WindowPages
from foresay.server.cli.main import COMMANDS, build_parser
from foresay.server.engine import gpu_memory
from foresay.server.engine.build import plan
from foresay.server.engine.gpu_memory import GRAPH_RESERVE, UTILIZATION, rope_bytes, workspace_bytes
from foresay.server.engine.memory import MemoryPlan
from foresay.server.engine.parameters import Device
from foresay.server.settings.config import EngineConfig, ServeConfig
from foresay.server.settings.load import load
from foresay.server.settings.resolved import CannotRun
from foresay.server.settings.units import bytes_in_words
from foresay.verifier.model.config import KVShape, ModelConfig, parameters, window_shapes
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.weights import allocate
from tests.checking.planned import draft_of

GIB = 1 << 30
DOCS = Path(__file__).resolve().parents[2] / "docs"
H200 = Device("cuda:0", 139 * GIB, 138 * GIB, "NVIDIA H200", (9, 0))
RTX_4090 = Device("cuda:0", 24 * GIB, 23 * GIB, "NVIDIA GeForce RTX 4090", (8, 9))
T4 = Device("cuda:0", 15 * GIB, 15 * GIB - (1 << 28), "Tesla T4", (7, 5))

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
LLAMA_1B = {**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
PER_TOKEN = 2 * 32 * 8 * 128 * 2


def llama(shape: dict[str, Any], **changed: object) -> ModelConfig:
    return ModelConfig.from_llama(Fields({**shape, **changed}, "config.json"))


def planned(device: Device, *models: ModelConfig, dtype: str = "bfloat16", **settings: Any) -> MemoryPlan:
    config = EngineConfig(**settings)
    models = models or (llama(LLAMA_8B),)
    drafts = [draft_of(model) for model in models[1:]]
    return plan(config, config.max_model_len or models[0].max_positions, dtype, models[0], drafts, device)


def test_the_rest_of_an_h200_is_kv_cache() -> None:
    found = planned(H200)
    assert found.weights == {"target": 2 * parameters(llama(LLAMA_8B))}
    # The workspace of the largest step over tables of this length, with a stretch of a prompt; logits where steps stop,
    # of the passes, by tables of four widths, and of the last rows of two stretches, alone and after 16 and 64 rows.
    logits = (64 + 4 * (4 + 16 + 64 + 16 + 64) + 2 + 2 * (17 + 65)) * 128256 * 4
    workspace = workspace_bytes(llama(LLAMA_8B), 2, 131072 + 64, 128 + 512, 128) - 512 * 128256 * 4
    assert found.overhead["graphs"] == GRAPH_RESERVE + logits + workspace
    assert found.kv_bytes == found.pages * 16 * PER_TOKEN
    budget = UTILIZATION * 139 * GIB
    assert 0 <= budget - found.total < 2 * 16 * PER_TOKEN
    assert 800_000 < found.tokens < 1_000_000
    assert f"KV cache of {found.tokens:,} tokens" in found.described
    assert "workspace" in found.described


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_planned_is_what_is_allocated(tied) -> None:
    """On a device without memory: the loader's tensors and the store's, of an 8B model on an H200."""
    model = llama(LLAMA_8B, tie_word_embeddings=tied)
    found = planned(H200, model)
    weights = allocate(model, torch.bfloat16, "meta")
    loaded = [matrix for layer in weights.layers for matrix in layer.matrices.values()]
    loaded += [weights.embed] if tied else [weights.embed, weights.lm_head]
    assert found.weights["target"] == sum(tensor.nbytes for tensor in loaded if isinstance(tensor, Tensor))
    norms = [norm.nbytes for layer in weights.layers for norm in layer.vectors.values()]
    assert sum(norms) < 1e-4 * found.weights["target"]  # not counted
    store = KVStore(PagePool(found.pages, 16), [KVShape(8, 128, 128)] * 32, torch.bfloat16, "meta")
    assert found.kv_bytes == sum(part.nbytes for part in store.tensors)


def test_recurrent_states_are_planned_as_they_are_allocated() -> None:
    """Of Qwen3.5's 27B: with records of four sequences if there are three, as captured steps have room for them."""
    shape = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "linear_num_value_heads": 48}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 4, "vocab_size": 248320, "head_dim": 256}
    model = ModelConfig.read(Fields({**LLAMA_8B, **shape, **heads, "architectures": ["Qwen3_5ForCausalLM"]}, ""))
    found = planned(H200, model, max_seqs=3, max_model_len=8192)
    assert found.states == (4, 1 + 6 * 3 + 16)
    pool = PagePool(found.pages, 16)
    pool.attach(StatePages(*found.states, pool.page_size))
    kept = KVStore(pool, window_shapes(model), torch.bfloat16, "meta").states
    assert kept is not None and found.overhead["recurrent states"] == sum(part.nbytes for part in kept.layers)
    assert 0 <= UTILIZATION * 139 * GIB - found.total < 2 * 16 * found.token_bytes


def test_a_mixture_is_planned_by_what_its_rows_choose() -> None:
    """Of Qwen3's 30B-A3B: vectors of eight experts for a row, not of 128."""
    shape = {"hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128, "num_key_value_heads": 4}
    experts = {"num_experts": 128, "moe_intermediate_size": 768, "architectures": ["Qwen3MoeForCausalLM"]}
    model, more = (
        ModelConfig.read(Fields({**LLAMA_8B, **shape, **experts, "num_experts_per_tok": chosen}, ""))
        for chosen in (8, 9)
    )
    assert 0.99 < 2 * parameters(model) / planned(H200, model).weights["target"] < 1.01
    least = 512 * (2048 * 4 + 768 * 2)
    assert least < workspace_bytes(more, 2, 4096, 512, 0) - workspace_bytes(model, 2, 4096, 512, 0) < 1.4 * least


QWEN3_30B = {
    **LLAMA_8B, "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128, "num_key_value_heads": 4,
    "vocab_size": 151936, "num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
EXPERTS = 128 * 3 * 2048 * 768 * 2


def test_experts_stay_on_the_host_where_a_gpu_has_no_room(monkeypatch) -> None:
    """Of as few layers as necessary, as the host's memory allows, and it says so."""
    model, settings = ModelConfig.read(Fields(QWEN3_30B, "")), dict[str, Any](max_model_len=32768)
    monkeypatch.setattr(gpu_memory, "machine_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda: 60 * GIB)
    whole = planned(H200, model, **settings)
    assert (whole.away, whole.host) == ((), 0) and "host" not in whole.described
    fitting = replace(RTX_4090, free=whole.total - whole.kv_bytes + 32832 * 2 * 48 * 4 * 128 * 2, total=80 * GIB)
    for more, layers in ((GIB, 0), (-GIB, 1), (-3 * GIB, 3)):
        device = replace(fitting, free=(fitting.free or 0) + more)
        found = planned(device, model, **settings)
        assert (found.away, found.host) == (tuple(range(layers)), layers * EXPERTS), more
        assert found.weights["target"] + found.host == whole.weights["target"]
        assert found.total <= (fitting.free or 0) + more
    tight = replace(fitting, free=whole.weights["target"] - 2 * EXPERTS + GIB * 6 // 5)
    found = planned(tight, model, max_model_len=2048, graphs=False)
    assert len(found.away) == 3, "two are enough for texts, but not for laying out a further layer"
    small = planned(RTX_4090, model, **settings)
    assert small.host == len(small.away) * EXPERTS
    assert f"experts of {len(small.away)} layers, {bytes_in_words(small.host)}, stay in the host's" in small.described
    monkeypatch.setattr(gpu_memory, "free_bytes", lambda: (small.host + EXPERTS) * 4 // 3 - GIB)
    with pytest.raises(CannotRun, match=f"experts of {len(small.away)} layers in the host's memory takes"):
        planned(RTX_4090, model, **settings)
    with pytest.raises(CannotRun, match="the engine would take"):
        planned(replace(RTX_4090, free=2 * GIB), model, **settings)


def test_every_part_takes_its_share_of_the_tokens() -> None:
    most = planned(H200).tokens
    assert planned(H200, gpu_memory_utilization=0.5).tokens == pytest.approx(most - 0.4 * 139 * GIB / PER_TOKEN, abs=32)
    assert planned(H200, graphs=False).tokens == pytest.approx(
        most + planned(H200).overhead["graphs"] / PER_TOKEN, abs=32
    )
    draft = llama(LLAMA_1B)
    pair = planned(H200, llama(LLAMA_8B), draft)
    assert pair.weights["draft_model"] == 2 * parameters(draft)
    assert pair.kv_bytes == pair.pages * 16 * (PER_TOKEN + 2 * 16 * 8 * 64 * 2)
    assert planned(H200, max_model_len=8192).overhead["workspace"] < planned(H200).overhead["workspace"]


def test_what_others_hold_is_left_to_them() -> None:
    crowded = replace(H200, free=60 * GIB)
    assert planned(crowded).total <= 60 * GIB
    assert planned(crowded).total > 59 * GIB


def test_a_tied_output_head_is_held_once() -> None:
    tied = llama(LLAMA_8B, tie_word_embeddings=True)
    assert planned(H200, tied).weights["target"] == 2 * (parameters(tied) - 128256 * 4096)


def test_the_workspace_is_counted_from_the_shapes() -> None:
    model = llama(LLAMA_8B)
    rows, trees, positions = 512 + 4 * 64, 4 * 64, 131072 + 64
    logits, partials = rows * 128256 * 4, trees * 32 * (128 + 2) * 4 * (131136 // 512 + 8 + 2)
    least = logits + partials + rows * (6144 + 28672) * 2
    found = workspace_bytes(model, 2, positions, rows, trees)
    assert least < found < 1.3 * least
    assert planned(H200).overhead["workspace"] == found + rope_bytes(model, 2, positions)
    assert rope_bytes(model, 2, positions) == positions * 128 * 2 * 2


def test_a_tiny_model_does_not_fill_the_gpu() -> None:
    tiny = llama(LLAMA_8B, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    assert planned(H200, tiny, max_model_len=4096).tokens == 1 << 22


def test_kv_tokens_are_taken_at_their_word() -> None:
    assert planned(RTX_4090, max_model_len=8192, kv_tokens=10_000).tokens == 10_000


def refused(device: Device, *models: ModelConfig, dtype: str = "bfloat16", **settings: Any) -> CannotRun:
    with pytest.raises(CannotRun) as caught:
        planned(device, *models, dtype=dtype, **settings)
    return caught.value


def remedies(error: CannotRun) -> list[str]:
    """The flags that the message names."""
    if error.hint.startswith("any one of these fits: "):
        return error.hint.removeprefix("any one of these fits: ").split("; ")
    return [error.hint.removesuffix(" fits")]


def test_a_long_context_does_not_fit_a_small_card() -> None:
    error = refused(RTX_4090)
    assert "the engine would take 34.0 GiB" in error.fault
    assert "of cuda:0 (NVIDIA GeForce RTX 4090) (target 15.0 GiB, workspace" in error.fault
    assert "KV cache of 131,072 tokens 16.0 GiB" in error.fault
    assert error.fault.endswith("but --gpu-memory-utilization 0.9 of its 24.0 GiB is 21.6 GiB")
    (length,) = remedies(error)
    assert length.startswith("--max-model-len ")


def test_the_documents_have_these_plans() -> None:
    devices = (DOCS / "devices.md").read_text("utf-8")
    error = refused(RTX_4090)
    assert f"{error.fault}: {error.hint}" in " ".join(devices.split())
    for device, length in ((H200, 131_072), (RTX_4090, 32_768)):
        found = planned(device, max_model_len=length)
        parts = [found.weights["target"], found.overhead["workspace"], found.overhead["graphs"]]
        sizes = " | ".join(bytes_in_words(part) for part in parts)
        kv_cache = f"{found.tokens:,} tokens, {bytes_in_words(found.kv_bytes)}"
        assert f"| {device.total // GIB} GiB, {length:,} tokens | {sizes} | {kv_cache} |" in devices
    halved = planned(RTX_4090, max_model_len=32_768, kv_dtype="int8").tokens
    assert f"{found.tokens:,} become {halved:,}" in (DOCS / "quantization.md").read_text("utf-8")


def typed_in(hint: str) -> dict[str, Any]:
    """The settings that the command line makes of some flags."""
    names = [word.removeprefix("--").replace("-", "_") for word in hint.split() if word.startswith("--")]
    given = vars(build_parser(COMMANDS["serve"]).parse_args(["bundled", *shlex.split(hint)]))
    config = load(ServeConfig, {name: given[name] for name in names}, {}).config
    return {name: getattr(config, name) for name in names}


#: A device, settings, and the flags of each remedy.
CASES: dict[str, tuple[Device, dict[str, Any], list[str]]] = {
    "context": (RTX_4090, {}, ["--max-model-len"]),
    "kv tokens": (RTX_4090, {"max_model_len": 8192, "kv_tokens": 100_000}, ["--kv-tokens"]),
    "both": (RTX_4090, {"max_model_len": 90_000, "kv_tokens": 100_000}, ["--max-model-len --kv-tokens"]),
    "share": (RTX_4090, {"max_model_len": 8192, "gpu_memory_utilization": 0.5}, ["--gpu-memory-utilization"]),
    "dtype": (RTX_4090, {"max_model_len": 8192, "dtype": "float32"}, ["--dtype"]),
    "dtype and context": (RTX_4090, {"dtype": "float32"}, ["--dtype --max-model-len"]),
    "no bf16": (
        T4, {"dtype": "float32", "max_model_len": 2048, "shape": LLAMA_1B, "gpu_memory_utilization": 0.3},
        ["--gpu-memory-utilization", "--dtype"],
    ),
    "crowded": (replace(H200, free=20 * GIB), {}, ["--max-model-len"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_refusal_names_fits(case) -> None:
    """Each remedy is typed in as it stands: it is enough, and in numbers of tokens nothing is given away."""
    device, given, flags = CASES[case]
    settings = dict(given)
    model, dtype = llama(settings.pop("shape", LLAMA_8B)), settings.pop("dtype", "bfloat16")
    found = remedies(refused(device, model, dtype=dtype, **settings))
    assert [" ".join(word for word in hint.split() if word.startswith("--")) for hint in found] == flags
    for hint in found:
        typed = typed_in(hint)
        assert planned(device, model, **{"dtype": dtype, **settings, **typed}).total <= (device.free or 0)
        more = {name: count + 256 for name, count in typed.items() if name in ("max_model_len", "kv_tokens")}
        if more:
            refused(device, model, **{"dtype": dtype, **settings, **typed, **more})


def test_too_large_a_model_is_called_so() -> None:
    large = llama(LLAMA_8B, num_hidden_layers=128)
    assert refused(RTX_4090, large, max_model_len=4096).hint == "name a smaller model"


def test_without_a_draft_model_it_may_fit() -> None:
    error = refused(RTX_4090, llama(LLAMA_8B), llama(LLAMA_1B), max_model_len=25_000)
    assert "--draft none" in remedies(error)
    assert planned(RTX_4090, max_model_len=25_000).tokens >= 25_000


def test_without_graphs_it_may_fit() -> None:
    most = planned(RTX_4090, max_model_len=8192).tokens
    error = refused(RTX_4090, max_model_len=8192, kv_tokens=most + 512)
    assert "--no-graphs" in remedies(error)
    assert planned(RTX_4090, max_model_len=8192, kv_tokens=most + 512, graphs=False).tokens == most + 512


DEEPSEEK = {
    **LLAMA_1B,
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 768,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024, "first_k_dense_replace": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def test_latents_are_planned_as_they_are_kept() -> None:
    """A key of a token alone, partials as wide as a value; where a program has too little shared memory, refused."""
    model = ModelConfig.read(Fields(DEEPSEEK, ""))
    found = planned(H200, model)
    assert found.kv_bytes == found.pages * 16 * 16 * 576 * 2
    rows, trees, positions = 128, 64, 131072 + 64
    partials = trees * 16 * (512 + 2 * 2) * 4 * (131136 // 512 + 8 + 2)
    least = rows * 128256 * 4 + partials
    assert least < workspace_bytes(model, 2, positions, rows, trees) < 1.1 * least
    wider = ModelConfig.read(Fields({**DEEPSEEK, "kv_lora_rank": 576}, ""))  # queries twice, and output
    more = workspace_bytes(wider, 2, positions, rows, 0) - workspace_bytes(model, 2, positions, rows, 0)
    assert 16 * 3 * 64 < more / (2 * rows) < 1.1 * 16 * 3 * 64
    assert rope_bytes(model, 2, positions) == positions * 64 * 2 * 2
    assert "latents" in refused(RTX_4090, model).fault


def test_layers_of_several_widths_are_planned_as_they_are_kept() -> None:
    """Gemma 4: full layers with wider heads, and layers that keep nothing; a block of these heads may be too large."""
    values = {
        "architectures": ["Gemma4ForCausalLM"], "hidden_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_kv_shared_layers": 6, "sliding_window": 512, "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    model = ModelConfig.read(Fields({**without(LLAMA_1B, "head_dim", "rope_parameters", "rope_scaling"), **values}, ""))
    found = planned(H200, model, max_seqs=1, max_model_len=8192)
    pool = PagePool(found.pages, 16)
    pool.attach(WindowPages(found.window_pages, 512, pool.num_pages, pool.page_size))
    store = KVStore(pool, window_shapes(model), torch.bfloat16, "meta")
    assert found.kv_bytes == sum(part.nbytes for part in store.tensors)
    assert [part.shape[0] for part in store.tensors] == [5, 5, 1, 1]
    assert rope_bytes(model, 2, 100) == 100 * 2 * 2 * (256 + 512)
    assert "wide heads (Gemma4ForCausalLM)" in refused(RTX_4090, model).fault


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
