"""An engine on another device than the CPU: nothing of it is left behind, and it writes the same tokens."""

from __future__ import annotations

import pytest

import server.engine.build
from kvpaging import KVStore
from server.engine.build import build_engine
from server.engine.device import Device
from server.settings.config import EngineConfig
from spec.engine import Engine
from spec.errors import ConfigurationError
from spec.request import Request
from spec.sampling import SamplingParams
from tests.simulated.device import DEVICE, Simulated, simulated
from tests.simulated.graph import captured
from verifier.graphs.capture import direct
from verifier.graphs.runner import GraphRunner

GPU = Device(DEVICE.type, 24 << 30, 23 << 30, "a GPU in all but speed", (9, 0))
PARAMS = (
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=1.0, top_p=0.95, seed=3, frequency_penalty=0.5, min_tokens=3),
)


def texts(engine: Engine) -> dict[str, list[int]]:
    """What two requests get, side by side."""
    written: dict[str, list[int]] = {}
    for index, params in enumerate(PARAMS):
        engine.add(Request(id=str(index), prompt=list(range(7, 27 + 50 * index)), params=params))
    while engine.has_work:
        for delta in engine.step():
            written.setdefault(delta.id, []).extend(delta.tokens)
    return written


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft", ["auto", "eagle3", "tests.same_tokens.customs:Random", "tests.same_tokens.customs:Rubbish"]
)
def test_the_same_tokens_as_on_the_cpu(draft, monkeypatch) -> None:
    """fp32 leaves no close calls here: a token that differs was drawn from something else."""
    config = EngineConfig(
        draft=draft, draft_tree="3,2,1", dtype="float32", device="cpu", max_seqs=2, max_model_len=128, kv_tokens=256
    )
    expected = texts(build_engine(config))
    monkeypatch.setattr(server.engine.build, "find_device", lambda config: GPU)
    monkeypatch.setattr(server.engine.build, "_MEASURED_ROWS", (2, 8))  # its attention goes row by row
    monkeypatch.setattr(server.engine.build, "capture_of", lambda graphs: captured if graphs else direct)
    with simulated():
        engine = build_engine(config)
        assert texts(engine) == expected
    assert isinstance(engine.runner, GraphRunner)
    assert engine.info.device == "meta (a GPU in all but speed)"
    assert "workspace" in engine.info.memory
    assert all(isinstance(store, KVStore) and isinstance(store.keys, Simulated) for store in engine.pool.stores)


def test_what_a_drafter_of_ones_own_cannot_have_there_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(server.engine.build, "find_device", lambda config: GPU)
    draft = "tests.same_tokens.customs:Reading"
    config = EngineConfig(draft=draft, dtype="float32", device="cpu", max_seqs=2, max_model_len=128, kv_tokens=256)
    with simulated(), pytest.raises(ConfigurationError, match="needs features of the target, which stay on the device"):
        build_engine(config)
