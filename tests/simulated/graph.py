"""A stand-in for captured graphs, on the simulated device.

The first run is for warming up, the second is the capture; each later one is a replay. It runs the work op by op, and
fails where a graph would quietly go wrong: if a launch has other shapes, dtypes or numbers than when it was captured,
if there are more launches or fewer, if a tensor it reads from outside was replaced, if values pass between device and
host, if the captured work is gone, and with it what it reads. Memory is that of a pool which graphs share: what nobody
named when a part was captured belongs to whoever comes next, so it is overwritten behind each replay; what somebody
named has the replay's values.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from ctypes import memmove, memset
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from foresay.spec.engine import EngineCore
from foresay.verifier.graphs.capture import CapturedGraphs, Work
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.simulated.device import CURRENT, NotOnTheDevice


class Captured:
    """The work behind the graphs of its parts: not its owner, as graphs are not (that is
    :class:`foresay.verifier.graphs.capture.CapturedGraphs`). going: what was captured, where it stopped."""

    def __init__(self, work: Work, going: Iterator[object]) -> None:
        self._work, self._captured = work, weakref.ref(going)
        self._going: Iterator[object] = iter(())

    def on(self, part: int) -> Iterator[object]:
        """Where a replay goes on."""
        if self._captured() is None:
            raise NotOnTheDevice("the captured work is gone, and the memory that its graphs read")
        if not part:
            self._going = self._work()
        return self._going


@dataclass
class StandInGraph:
    """Stands where the CUDA graph of a part stands. launches: what was captured. replays: how often it ran since."""

    captured: Captured
    part: int
    launches: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    replays: int = 0
    _memory: list[tuple[Any, bool]] = field(default_factory=list)

    def capture(self, going: Iterator[object]) -> object:
        """Run the part and note what it launches; what it yielded."""
        gc.disable()  # so that all that the part makes stays young
        try:
            with CURRENT.capture() as self.launches:
                result = next(going)
            gc.collect(0)
        finally:
            gc.enable()
        self._memory = CURRENT.left()
        return result

    def replay(self) -> None:
        """Run it again, and compare."""
        CURRENT.launched["graph"] += 1
        going = self.captured.on(self.part)
        with CURRENT.capture() as again:
            next(going)
        self.replays += 1
        for number, (now, then) in enumerate(zip(again, self.launches, strict=False)):
            if now != then:
                raise NotOnTheDevice(f"launch {number} was captured as {then}, and is {now}")
        if len(again) != len(self.launches):
            raise NotOnTheDevice(f"{len(self.launches)} launches were captured, and there are {len(again)}")
        for (fresh, _), (captured, named) in zip(CURRENT.left(), self._memory, strict=True):
            if named:
                memmove(captured.data_ptr(), fresh.data_ptr(), captured.nbytes())
            else:
                memset(fresh.data_ptr(), 255, fresh.nbytes())  # NaN, or -1


def assert_launched(engine: EngineCore, least: int = 5) -> None:
    """Its steps are captured whole, and so many were replayed."""
    assert isinstance(engine.runner, GraphStepRunner)
    assert engine.runner.counts["launched"] >= least


def captured(work: Work) -> CapturedGraphs:
    """A :data:`foresay.verifier.graphs.capture.Capture`."""
    parts = sum(1 for _ in work())
    going = work()
    behind = Captured(work, going)
    graphs = [StandInGraph(behind, part) for part in range(parts)]
    results = [graph.capture(going) for graph in graphs]
    return CapturedGraphs(cast(list[torch.cuda.CUDAGraph], graphs), going, results)
