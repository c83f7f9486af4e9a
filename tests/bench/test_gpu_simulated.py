"""Steps of ``bench.gpu`` on a device as strict as a GPU: nothing mixes with the CPU's tensors, nothing is read while a
step is captured, a replay launches what was captured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu import settings, steps
from bench.gpu.device import Call, Device
from bench.gpu.worker import Lines, Task
from foresay.verifier.graphs.capture import without_stops
from foresay.verifier.graphs.step import SpeculativeStep
from tests.simulated.device import DEVICE, simulated
from tests.simulated.graph import captured


class SimulatedDevice(Device):
    """Captures by the stand-in for graphs; time is the wall clock's."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.torch = DEVICE

    def captured(self, call: Call) -> Call:
        return captured(without_stops(call))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The device makes no random numbers of its own: those of the CPU are moved there."""
    made = torch.Generator

    class OnCpu(made):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = None) -> Any:
            return made()

    monkeypatch.setattr(torch, "Generator", OnCpu)
    monkeypatch.setattr("bench.engines.Eager", captured)
    with simulated():
        yield SimulatedDevice()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_prompt_that_is_read_wrongly_beside_others_is_seen(wrong: bool, on_device, tmp_path, monkeypatch) -> None:
    """It arrives while another text decodes, and is read inside captured steps."""
    lines, read = Lines(tmp_path / "lines.jsonl", "A", "simulated"), SpeculativeStep._read
    monkeypatch.setattr("bench.engines.GPU_CHUNK", 128)  # fewer captures

    def misread(self: SpeculativeStep, *given: Any) -> Tensor:
        return read(self, *given) + wrong

    monkeypatch.setattr(SpeculativeStep, "_read", misread)
    task = Task("same tokens", lines, math.inf, on_device, replace(settings.tiny(), tokens=12))
    steps.same(task, ways=[("none", "", True, (0, 3), 4)])
    assert (task.failures > 0) == wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("8B passes", "steps:passes"),
        ("8B steps", "steps:whole"),
        ("Qwen3-8B steps", "steps:whole"),
        ("stack Qwen3.5-9B", "bench.hybrids:stack"),
        pytest.param("profile", "profile:profile", marks=pytest.mark.soak),
    ],
)
def test_a_step(name: str, function: str, on_device: Device, tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines.jsonl", "A", "simulated")
    lines.write("bandwidth", "bandwidth", 1e9)
    task = Task(name, lines, math.inf, on_device, settings.tiny())
    assert task.run(function) == "held"
