"""An engine on another device than the CPU: nothing of it is left behind, and it writes the same tokens."""

from __future__ import annotations

import pytest

import foresay.server.engine.build
import foresay.server.engine.calibrate
import foresay.verifier.model_runner
from foresay.kvpaging import KVStore
from foresay.server.engine.build import build_engine
from foresay.server.engine.parameters import Device
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import EngineCore
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.graphs.capture import Eager, Work
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.simulated.device import DEVICE, Simulated, simulated
from tests.simulated.graph import captured

GPU = Device(DEVICE.type, 24 << 30, 23 << 30, "a GPU in all but speed", (9, 0))
PARAMS = (
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=1.0, top_p=0.95, seed=3, frequency_penalty=0.5, min_tokens=3, logprobs=2),
)


def build_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are built on the simulated device from now on. What it takes is no GPU's, so it is measured once: its
    attention goes row by row."""
    monkeypatch.setattr(foresay.server.engine.build, "find_device", lambda config: GPU)
    monkeypatch.setattr(foresay.server.engine.calibrate, "_ROWS", (1, 8))
    monkeypatch.setattr(foresay.server.engine.calibrate, "_TURNS", 1)
    monkeypatch.setattr(foresay.server.engine.build, "capture_of", lambda graphs: captured if graphs else Eager)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many passes are run op by op from now on."""
    count = [0]

    class Counted(Eager):
        def __init__(self, work: Work) -> None:
            count[0] += 1
            super().__init__(work)

    monkeypatch.setattr(foresay.verifier.model_runner, "Eager", Counted)
    return count


def texts(engine: EngineCore) -> dict[str, list[int]]:
    """What two requests get, side by side."""
    written: dict[str, list[int]] = {}
    for index, params in enumerate(PARAMS):
        engine.add(Request(id=str(index), prompt=list(range(7, 27 + 50 * index)), params=params))
    while engine.has_work:
        for delta in engine.step():
            written.setdefault(delta.id, []).extend(delta.tokens)
            assert (delta.logprobs is not None) == (delta.id == "1" and bool(delta.tokens))
    return written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "tree", "whole"),
    [
        pytest.param("auto", "3,2,1", True, marks=pytest.mark.soak),
        ("none", None, True),
        pytest.param("suffix,eagle3,draft_model", None, True, marks=pytest.mark.soak),
        ("tests.same_tokens.customs:Reading", "3,2,1", False),
    ],
)
def test_the_same_tokens_as_on_the_cpu(draft, tree, whole, monkeypatch) -> None:
    """fp32 leaves no close calls here: a token that differs was sampled from something else. test_compilations.py has
    engines with heads.

    whole: whether its steps are captured whole; else each in parts.
    """
    config = EngineConfig(
        draft=draft, draft_tree=tree, dtype="float32", device="cpu", max_seqs=2, max_model_len=128, kv_tokens=256
    )
    expected = texts(build_engine(config))
    build_there(monkeypatch)
    with simulated():
        engine = build_engine(config)
        by_op = count_passes(monkeypatch)
        assert texts(engine) == expected
    assert isinstance(engine.runner, GraphStepRunner) == whole
    assert by_op[0] < 8  # of prompts; all others were replayed
    assert engine.info.device == "meta (a GPU in all but speed)"
    assert "workspace" in engine.info.memory
    stores = [store for store in engine.pool.stores if isinstance(store, KVStore)]
    assert stores and all(isinstance(store.tensors[0], Simulated) for store in stores)
