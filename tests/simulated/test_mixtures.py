"""Mixtures of experts on the simulated device: rows find their experts, and are counted, without the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from foresay.server.engine import build
from foresay.server.engine.build import build_engine, plan
from foresay.server.engine.parameters import quantized
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.units import bytes_in_words
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.proposer import DeviceTree, Proposer
from foresay.verifier.graphs.state import StepState
from foresay.verifier.model import expert_offload
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import WeightsError
from tests.same_tokens.captured import captured_engine, copy
from tests.same_tokens.runs import jobs_of
from tests.same_tokens.test_directories import config
from tests.simulated.device import simulated
from tests.simulated.graph import captured
from tests.simulated.test_captured_steps import there
from tests.simulated.test_engine import GPU, build_there, texts
from tests.simulated.test_waits import ONCE, steps


class Fewer:
    """A proposer of whose trees only the root is left, in as many rows."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, state: StepState) -> DeviceTree:
        tree = self.inner.propose(state)
        return replace(tree, counts=torch.ones_like(tree.counts))


def test_rows_behind_a_tree_wake_no_experts(pair) -> None:
    made = pair("qwen3_moe")
    moved, jobs = there(made), jobs_of(made.vocab_size, (9,), 12)
    with simulated():
        wrap = cast(Callable[[Proposer], Proposer], Fewer)
        engine = captured_engine(moved, copy(moved), TreeShape.parse("3,2,1"), capture=captured, wrap=wrap)
        engine.add(jobs[0].request())
        woken = {engine.runner.woken for _ in iter(lambda: engine.has_work and engine.step(), False)}
    assert len(woken) == 2 and min(woken) == 3, "of the prompt, and of steps"


def short_of_room(monkeypatch: pytest.MonkeyPatch, settings: EngineConfig) -> list[int]:
    """From now on the device lacks a byte for these settings. Returns the sizes of what is page-locked since."""
    model = quantized(ModelConfig.from_directory(Path(settings.target)), settings.quantize, "")
    sizes = list[int]()

    def locked(count: int) -> torch.Tensor:
        sizes.append(count)
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    needed = plan(settings, 160, "float32", model, [], GPU).total
    monkeypatch.setattr(build, "find_device", lambda config: replace(GPU, free=needed - 1))
    monkeypatch.setattr(expert_offload, "page_locked", locked)
    return sizes


def test_memory_is_locked_as_long_as_a_tensor_is_in_it(monkeypatch) -> None:
    """By a driver that locks a page at most."""
    unlocked = list[int]()
    driver = SimpleNamespace(
        cudaHostRegister=lambda place, count, flags: 0 if count <= 4096 else 2, cudaHostUnregister=unlocked.append
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    part = expert_offload.page_locked(4096).view(torch.int16)[5:]
    place = part.data_ptr() - 10
    for count, words in ((8192, "8,192 bytes .*cannot be page-locked .CUDA error 2"), (1 << 50, "cannot be allocated")):
        with pytest.raises(WeightsError, match=words):
            expert_offload.page_locked(count)
    assert not unlocked
    del part
    assert unlocked == [place], "not what was refused"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "quantize"), [("qwen3_moe", None), ("qwen3_moe", "int4")])
def test_experts_on_the_host_change_no_token(pair, family, quantize, monkeypatch) -> None:
    """Of one layer. The others' are laid out some rows at a time too; a step waits once."""
    settings = config(pair(family).directory, "none", max_seqs=2, max_model_len=160, kv_tokens=1200, quantize=quantize)
    build_there(monkeypatch)
    with simulated():
        wanted = texts(build_engine(settings))
        sizes = short_of_room(monkeypatch, settings)
        monkeypatch.setattr(expert_offload, "_NUMBERS", 1000)
        engine = build_engine(settings)
        assert texts(engine) == wanted
        found = list(steps(engine, engine.info.vocab_size, 2))[2:]
    assert Counter(found).most_common(1)[0][0] == ONCE._replace(copies=0), found
    assert max(each.waits for each in found) == 1, found
    assert len(sizes) == (4 if quantize else 2), "of two products values, and scales if they have some"
    assert f"experts of 1 layer, {bytes_in_words(sum(sizes))}," in engine.info.memory
