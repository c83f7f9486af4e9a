"""A stand-in for a captured graph, on the simulated device.

The first runs are for warming up, the next is the capture; each later one is a replay. It runs the step op by op, and
fails where a graph would quietly go wrong: if a launch has other shapes or dtypes than when it was captured, if there
are more launches or fewer, if a tensor it reads from outside was replaced, if values pass between device and host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.simulated.device import CURRENT, NotOnTheDevice
from verifier.graphs.capture import Work

_WARM_UP = 2
#: Of one part.
Launches = list[tuple[str, tuple[Any, ...]]]


@dataclass
class StandInGraph:
    """A :class:`verifier.graphs.capture.Replay`. launches: what was captured, by part. replays: how often a part ran
    since."""

    work: Work
    launches: list[Launches] = field(default_factory=list)
    replays: int = 0
    _going: Iterator[object] = field(default_factory=lambda: iter(()))

    def __call__(self) -> None:
        for part in range(len(self.launches)):
            self.run(part)

    def run(self, part: int) -> None:
        if not part:
            self._going = self.work()
        again = recorded(lambda: next(self._going))
        self.replays += 1
        then_all = self.launches[part]
        for number, (now, then) in enumerate(zip(again, then_all, strict=False)):
            if now != then:
                raise NotOnTheDevice(f"launch {number} was captured as {then}, and is {now}")
        if len(again) != len(then_all):
            raise NotOnTheDevice(f"{len(then_all)} launches were captured, and there are {len(again)}")


def recorded(step: Callable[[], object]) -> Launches:
    """Run a step under the rules of a capture; returns its launches."""
    with CURRENT.capture() as launches:
        step()
    return launches


def captured(work: Work) -> StandInGraph:
    """A :data:`verifier.graphs.capture.Capture`."""
    parts = 0
    for _ in range(_WARM_UP):
        parts = sum(1 for _ in work())
    going = work()
    return StandInGraph(work, [recorded(lambda: next(going)) for _ in range(parts)])
