"""Models far larger than a test could load: sparse files with true headers and no numbers in them."""

from __future__ import annotations

import json
import math
import resource
import struct
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from foresay.server.cli.pair import check
from foresay.server.engine.build import fitting, plan
from foresay.server.engine.drafters.heads import Eagle
from foresay.server.engine.drafters.registry import drafts
from foresay.server.engine.memory import MemoryPlan
from foresay.server.engine.parameters import Device, free_bytes, machine_bytes
from foresay.server.settings import resolved
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun, choose_draft
from foresay.server.settings.units import bytes_in_words
from foresay.verifier.model.config import ModelConfig, parameters
from foresay.verifier.model.weights import allocate, destinations
from tests.checking.pairs import make_model
from tests.heads.writing import write_config
from tests.verifier.published import PUBLISHED

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


def write_sparse(file: Path, shapes: dict[str, tuple[int, ...]], integers: tuple[str, ...] = ()) -> None:
    """A safetensors file of these shapes in bf16 (int64 for ``integers``), all zeros, which take no room on a disk."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * (8 if name in integers else 2)
        kind = "I64" if name in integers else "BF16"
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 8B and an EAGLE-3 head for it."""
    root = tmp_path_factory.mktemp("large")
    make_model(root / "target", num_hidden_layers=1)
    write_config(root / "target", LLAMA_8B)
    model = ModelConfig.from_directory(root / "target")
    weights = allocate(model, torch.bfloat16, "meta")
    write_sparse(
        root / "target" / "model.safetensors",
        {name: tuple(location.shape) for name, location in destinations(model, weights)},
    )
    head = {**LLAMA_8B, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    write_config(root / "head", head)
    layer = {
        "self_attn.q_proj": (4096, 8192),
        "self_attn.k_proj": (1024, 8192),
        "self_attn.v_proj": (1024, 8192),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
        "input_layernorm": (4096,),
        "hidden_norm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    shapes: dict[str, tuple[int, ...]] = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (4096, 3 * 4096), "norm.weight": (4096,), "lm_head.weight": (32000, 4096), "d2t": (32000,)}
    write_sparse(root / "head" / "model.safetensors", shapes, integers=("d2t",))
    return root


def test_a_large_pair_is_judged_without_its_weights(large, monkeypatch) -> None:
    monkeypatch.setattr("foresay.server.engine.parameters.machine_bytes", lambda: 64 * GIB)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    report = check(
        EngineConfig(target=str(large / "target"), draft=str(large / "head"), dtype="bfloat16", device="cpu")
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024
    assert time.process_time() - begun < 20
    assert report.works, report.fault
    assert report.memory["weights"]["target"] == pytest.approx(15 * GIB, rel=0.02)
    assert report.memory["weights"]["head"] == pytest.approx(0.8 * GIB, rel=0.1)


def test_a_published_hybrid_is_judged_without_its_weights(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("foresay.server.engine.parameters.machine_bytes", lambda: 64 * GIB)
    make_model(tmp_path, num_hidden_layers=1)
    write_config(tmp_path, PUBLISHED["Falcon-H1-0.5B-Instruct"][1])
    model = ModelConfig.from_directory(tmp_path)
    stored = {of: tuple(into.shape) for of, into in destinations(model, allocate(model, torch.bfloat16, "meta"))}
    write_sparse(tmp_path / "model.safetensors", stored)
    report = check(EngineConfig(target=str(tmp_path), draft="suffix", dtype="bfloat16", device="cpu"))
    assert report.works, report.fault
    assert report.memory["weights"]["target"] == pytest.approx(2 * 521.4e6, rel=0.02)


@pytest.mark.parametrize(("machine", "taken"), [(15, "15.9")])
def test_weights_alone_may_be_too_much(large, monkeypatch, machine, taken) -> None:
    """In fp32, with matrices in 16 bits and an embedding in fp32."""
    monkeypatch.setattr("foresay.server.engine.parameters.machine_bytes", lambda: machine * GIB)
    config = EngineConfig(target=str(large / "target"), draft="ngram", dtype="float32", device="cpu")
    fault = check(config).fault
    expected = f"would take {taken} GiB (target {taken} GiB), but this machine has {machine}.0 GiB"
    assert f"the weights alone {expected}" in fault
    assert fault.endswith(
        "load them with --dtype bfloat16, make them smaller with --quantize int4, or name a smaller model"
    )


def planned(model: ModelConfig, machine: int, head: Eagle | None = None, **settings: object) -> MemoryPlan:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    length = config.max_model_len or model.max_positions
    return plan(config, length, "bfloat16", model, [head] if head else [], Device("cpu", machine))


def test_the_cache_leaves_room_for_the_weights(large) -> None:
    model = ModelConfig.from_directory(large / "target")
    roomy = planned(model, 64 * GIB)
    assert roomy.tokens == 4 * 8192
    assert roomy.kv_bytes == roomy.pages * 16 * 2 * 32 * 8 * 128 * 2
    tight = planned(model, 18 * GIB)
    assert 8192 < tight.tokens < 4 * 8192
    assert tight.total < 18 * GIB
    with pytest.raises(CannotRun, match=r"the KV cache holds \d+ tokens, fewer than max_model_len \(8192\)"):
        planned(model, 16 * GIB)


def test_the_cache_that_fits_is_named(large) -> None:
    model = ModelConfig.from_directory(large / "target")
    with pytest.raises(CannotRun) as refused:
        planned(model, 20 * GIB, kv_tokens=100_000)
    assert "KV cache of 100,000 tokens" in refused.value.fault
    fits = int(refused.value.hint.split()[1])
    assert planned(model, 20 * GIB, kv_tokens=fits).total <= 20 * GIB


def test_a_head_is_counted_too(large) -> None:
    model = ModelConfig.from_directory(large / "target")
    head = Eagle("head", "head", large / "head")
    assert planned(model, 64 * GIB, head).kv_bytes > planned(model, 64 * GIB).kv_bytes
    assert set(planned(model, 64 * GIB, head).weights) == {"target", "head"}


def test_parameters_are_near_the_truth(large) -> None:
    model = ModelConfig.from_directory(large / "target")
    assert parameters(model) == pytest.approx(8.03e9, rel=0.001)
    assert parameters(replace(model, stack=replace(model.stack, layers=model.stack.layers[:1]))) < parameters(model) / 5


def test_this_machine_has_memory() -> None:
    free = free_bytes()
    assert machine_bytes() > GIB // 4
    assert free is None or free > 0


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ("0::/user.slice/a:b.service\n", "memory.max"),
        ("9:cpu,cpuacct:/other\n4:memory:/user.slice/a:b.service\n0::/\n", "memory.limit_in_bytes"),
    ],
)
def test_a_limit_of_any_control_group_around_a_process_counts(groups, name, tmp_path, monkeypatch) -> None:
    (tmp_path / "user.slice").mkdir()
    (tmp_path / "user.slice" / name).write_text(f"{64 << 20}\n")
    (tmp_path / "cgroup").write_text(groups)
    monkeypatch.setattr(
        "foresay.server.engine.parameters._GROUPS", {"": (tmp_path, "memory.max"), "memory": (tmp_path, name)}
    )
    monkeypatch.setattr("foresay.server.engine.parameters._OWN", tmp_path / "cgroup")
    assert machine_bytes() == 64 << 20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "user.slice" / name).unlink()
    assert machine_bytes() > GIB // 4


@pytest.mark.parametrize(
    ("count", "words"), [(12, "12 bytes"), (14_700_000, "14.0 MiB"), (8 << 30, "8.0 GiB"), (300 << 20, "300 MiB")]
)
def test_bytes_in_words(count, words) -> None:
    assert bytes_in_words(count) == words


def test_auto_lets_a_target_of_floats_draft_for_itself_where_there_is_room(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(resolved, "_LEAST", 1)
    make_model(tmp_path)
    config = EngineConfig(target=str(tmp_path), kv_tokens=640, max_model_len=256)
    chosen, model = choose_draft(config).value, ModelConfig.from_directory(tmp_path)
    assert chosen == "self,suffix"
    assert choose_draft(msgspec.structs.replace(config, quantize="int4")).value == "suffix"
    named = drafts(config, chosen)
    enough = plan(config, 256, "float32", model, named, Device("cpu", 1 << 40)).total
    for room, found in ((enough, ["self", "suffix"]), (enough - 1, ["suffix"])):
        assert [one.option for one in fitting(config, 256, "float32", model, named, Device("cpu", room))[1]] == found
    with pytest.raises(CannotRun):
        fitting(msgspec.structs.replace(config, draft=chosen), 256, "float32", model, named, Device("cpu", enough - 1))
