"""Parts of ``bench.gpu`` on a device as strict as a GPU: nothing mixes with the CPU's tensors, nothing is read
while a step is captured, a replay launches what was captured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.gpu import parts, settings
from bench.gpu.device import Call, Device
from bench.gpu.session import Clock, Session
from foresay.verifier.graphs.capture import without_stops
from tests.simulated.conftest import frozen as frozen
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
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A rehearsal's session. The device makes no random numbers of its own: those of the CPU are moved there."""
    made = torch.Generator

    class OnCpu(made):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = None) -> Any:
            return made()

    monkeypatch.setattr(torch, "Generator", OnCpu)
    monkeypatch.setattr("bench.gpu.engines.Direct", captured)
    with simulated():
        yield Session(SimulatedDevice(), settings.tiny(), Clock(600.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps tiny", "split"])
def test_a_part(name: str, on_device: Session) -> None:
    args = argparse.Namespace(tiny=True, device="cpu", only=None)
    run = next(run for part, _, run in parts.parts(on_device, args) if part.startswith(name))
    run()
    assert on_device.failures == []
