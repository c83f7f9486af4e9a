"""Steps of ``bench.gpu`` on a device as strict as a GPU: nothing mixes with the CPU's tensors, nothing is read while a
step is captured, a replay launches what was captured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import settings
from bench.gpu.device import Call, Device
from bench.gpu.worker import Lines, Task
from foresay.verifier.graphs.capture import without_stops
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
@pytest.mark.parametrize(
    "function", ["steps:passes", "steps:whole", pytest.param("profile:profile", marks=pytest.mark.soak)]
)
def test_a_step(function: str, on_device: Device, tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines.jsonl", "A", "simulated")
    lines.write("bandwidth", "bandwidth", 1e9)
    task = Task("8B", lines, math.inf, on_device, settings.tiny())
    assert task.run(function) == "held"
