"""Counts: histograms, clients' connections, starts of the engine process, results of re-runs."""

from __future__ import annotations

import operator
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import msgspec

from foresay.server.engine.generation import Cause, EngineStatus

#: Upper bounds in seconds of the time between two chunks or tokens: a small model on a CPU takes less than a
#: millisecond per token, a large one on a busy machine a second.
TOKEN_BOUNDS = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0065, 0.008),
    *(0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5),
)
#: Of whole requests and their parts.
REQUEST_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: Tokens that one step emitted for one request.
RUN_BOUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 64.0)
#: How long WebSockets stay open.
SOCKET_BOUNDS = (0.1, 1.0, 10.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
#: Choices that a request wants.
CHOICE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0)
#: Tokens of a prompt or an answer.
LENGTH_BOUNDS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)


class Histogram:
    """counts: values in each bucket (above the previous bound, up to this one); the last is of those above all bounds.
    count, sum: of all values."""

    __slots__ = ("bounds", "count", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.count = 0
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value ``times`` times."""
        self.count += times
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add(self, other: Histogram) -> None:
        """Add the counts of another with the same bounds."""
        if other.count:
            self.count += other.count
            self.counts = list(map(operator.add, self.counts, other.counts))
            self.sum += other.sum

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` of all values do not exceed, interpolated linearly within its bucket; None without
        values.

        A value above the last bound is reported as that bound.
        """
        wanted, below = share * self.count, 0
        for index, count in enumerate(self.counts):
            if count and below + count >= wanted:
                high = self.bounds[min(index, len(self.bounds) - 1)]
                low = 0.0 if index == 0 else self.bounds[index - 1]
                return low + (high - low) * (wanted - below) / count if index < len(self.bounds) else high
            below += count
        return None


class Connections:
    """http: responses by status. websockets: open ones; websocket_seconds: durations of closed ones."""

    def __init__(self) -> None:
        self.http: dict[int, int] = {}
        self.websockets, self.websocket_seconds = 0, Histogram(SOCKET_BOUNDS)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Count a WebSocket while it is open."""
        self.websockets += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.websockets -= 1
            self.websocket_seconds.observe(time.monotonic() - began)

    def answered(self, status: int) -> None:
        """Count an HTTP response."""
        self.http[status] = self.http.get(status, 0) + 1


class Startup:
    """Follows the engine's status. seconds: by phase of the last start, including ``total`` once it is ready. restarts:
    of the engine process, by the cause of its predecessor's end. resumed: how often a request continued in another
    engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.restarts: dict[str, int] = dict.fromkeys(get_args(Cause), 0)
        self.resumed = 0
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._phase = ""
        self._phase_began = self._began = clock()
        self._starts = 0

    def see(self, status: EngineStatus) -> None:
        """Record a new status of the engine."""
        now = self._clock()
        self.count(status)
        if status.starts != self._starts:
            self._starts, self._began, self._phase, self.seconds = status.starts, now, "", {}
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._phase_began
        if status.state == "ready" and self._phase:
            self.seconds["total"] = now - self._began
        self._phase = status.message.replace(" ", "_") if status.state == "loading" else ""
        self._phase_began = now

    def count(self, status: EngineStatus) -> None:
        """Record a new status of an engine that requests do not go to."""
        if status.cause is not None:
            self.restarts[status.cause] += 1
        self.resumed += status.resumed


class SelfCheckCounts(msgspec.Struct):
    """share: of the finished requests to be decoded again plainly. checked: those that were; tokens: compared in them;
    mismatches: requests whose tokens differ. waiting: until the engine is idle. skipped: dropped for newer ones, or
    lost with the engine."""

    share: float = 0.0
    checked: int = 0
    tokens: int = 0
    mismatches: int = 0
    waiting: int = 0
    skipped: int = 0
