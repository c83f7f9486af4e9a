"""A stand-in for a captured graph, on the simulated device.

The first runs are for warming up, the next is the capture; each later one is a replay. It runs the step op by op, and
fails where a graph would quietly go wrong: if a launch has other shapes or dtypes than when it was captured, if there
are more launches or fewer, if a tensor it reads from outside was replaced, if values pass between device and host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulated.device import CURRENT, NotOnTheDevice

_WARM_UP = 2


@dataclass
class StandInGraph:
    """A :data:`verifier.graphs.capture.Launcher`. launches: what was captured. replays: how often it ran since."""

    step: Callable[[], object]
    launches: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    replays: int = 0

    def __call__(self) -> None:
        again = recorded(self.step)
        self.replays += 1
        for number, (now, then) in enumerate(zip(again, self.launches, strict=False)):
            if now != then:
                raise NotOnTheDevice(f"launch {number} was captured as {then}, and is {now}")
        if len(again) != len(self.launches):
            raise NotOnTheDevice(f"{len(self.launches)} launches were captured, and there are {len(again)}")


def recorded(step: Callable[[], object]) -> list[tuple[str, tuple[Any, ...]]]:
    """Run a step under the rules of a capture; returns its launches."""
    with CURRENT.capture() as launches:
        step()
    return launches


def captured(step: Callable[[], object]) -> StandInGraph:
    """A :data:`verifier.graphs.capture.Capture`."""
    for _ in range(_WARM_UP):
        step()
    return StandInGraph(step, recorded(step))
