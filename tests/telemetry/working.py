"""Telemetry of a server that has worked for a while, and how long one piece of work holds the event loop."""

from __future__ import annotations

import random
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from foresay.server.metrics.telemetry import RequestStats, Telemetry
from foresay.server.text.choice import Piece
from foresay.spec.request import Delta, Origin
from foresay.spec.trace import StepTrace
from tests.telemetry.counted import chosen, kept
from tests.telemetry.test_verdict import Engine

T = TypeVar("T")
PARENTS = [-1, *(0,) * 4, *(1,) * 3, *(2,) * 3, *(5,) * 3, *(8,) * 3, *(11,) * 2]
PATHS: list[list[int]] = [[], [1], [1, 5], [1, 5, 11], [2], [2, 8]]
SECONDS = {"plan": 1e-5, "propose": 2e-3, "forward": 5e-3, "draw": 1e-4, "commit": 1e-4}
PER_SECOND = 6


class Working:
    """A server whose time goes by as it works: all the time for the last ten minutes, before that now and then."""

    def __init__(self, seconds: int) -> None:
        self.now = 1_700_000_000.0
        self.telemetry = Telemetry("toy", Engine(), lambda: self.now)
        self._dice, self._steps = random.Random(1), 0
        for left in range(seconds, 0, -1):
            if left <= 700 or left % 10 == 0:
                self.second()
            else:
                self.now += 1.0

    def second(self) -> None:
        """A request that takes a second."""
        with self._request() as stats:
            for _ in range(PER_SECOND):
                self.now += 1 / PER_SECOND
                self._step(stats)

    @contextmanager
    def _request(self) -> Iterator[RequestStats]:
        choice = chosen(str(self._steps), 30)
        with self.telemetry.watching([choice]) as [stats]:
            yield stats
            kept(stats, Delta(id=stats.id, tokens=[], finish_reason="stop"), Piece(finish_reason="stop"))

    def _step(self, stats: RequestStats) -> None:
        self._steps += 1
        trace, delta, piece = a_step(self._steps, PARENTS, self._dice.choice(PATHS))
        self.telemetry.step(trace)
        kept(stats, delta, piece)
        stats.delivered(len(delta.tokens))


def a_step(number: int, parents: list[int], path: list[int]) -> tuple[StepTrace, Delta, Piece]:
    """A step of one request that accepts this path: what the engine sends of it, and what of it is in the text."""
    tokens = [5] * (len(path) + 1)
    trace = StepTrace(
        number=number,
        rows=len(parents),
        sequences=1,
        prefill_rows=0,
        drafted=len(parents) - 1,
        accepted=len(path),
        emitted=len(tokens),
        seconds=SECONDS,
        running=1,
    )
    delta = Delta(id="r", tokens=tokens, origin=Origin(number, "draft_model", parents, 0, path, SECONDS))
    return trace, delta, Piece(text="x" * len(tokens), token_ids=tokens, offsets=list(range(len(tokens))))


def driven(work: Coroutine[Any, Any, T]) -> tuple[T, list[float]]:
    """The result of work that waits for nothing but its next turn, and the CPU seconds of each of its turns."""
    slices: list[float] = []
    while True:
        begun = time.thread_time()
        try:
            work.send(None)
        except StopIteration as end:
            slices.append(time.thread_time() - begun)
            result: T = end.value
            return result, slices
        slices.append(time.thread_time() - begun)
