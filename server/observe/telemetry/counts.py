"""Counts: histograms, clients' connections, starts of the engine process, results of re-runs; and what became of
drafts: by drafter, by depth, and by position in the tree.

A path through a tree is identified by its last node. So a run is one dictionary entry, and everything else is computed
from the entries on demand, or when their second is over.
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import msgspec

from foresay.server.engine.generation import Cause, EngineStatus
from foresay.spec.accept import summed

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

K = TypeVar("K")


def add(counts: dict[K, Any], more: Mapping[K, Any]) -> None:
    """Add up by key: numbers, or objects with an ``add`` method."""
    for key, count in more.items():
        if isinstance(count, int | float):
            counts[key] = counts.get(key, 0) + count
        else:
            counts.setdefault(key, type(count)()).add(count)


def added(own: Any, more: Any) -> Any:
    """The sum of two counts: numbers, counts by depth from 0 on, counts by key, or of several things."""
    if isinstance(more, int | float):
        return own + more
    if isinstance(more, list):
        return summed([own, more])
    add(own, more) if isinstance(more, dict) else own.add(more)
    return own


class Counts:
    """Counts several things, its slots, which add up."""

    __slots__: tuple[str, ...] = ()

    def add(self, other: Any) -> None:
        """Count what the other one has counted."""
        for name in self.__slots__:
            setattr(self, name, added(getattr(self, name), getattr(other, name)))


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
        if status.cause is not None:
            self.restarts[status.cause] += 1
        self.resumed += status.resumed
        if status.starts != self._starts:
            self._starts, self._began, self._phase, self.seconds = status.starts, now, "", {}
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._phase_began
        if status.state == "ready" and self._phase:
            self.seconds["total"] = now - self._began
        self._phase = status.message.replace(" ", "_") if status.state == "loading" else ""
        self._phase_began = now


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


# -- shapes of draft trees ---------------------------------------------------------------------------------------------


#: Dynamic trees keep having new shapes; at most this many are cached.
MOST_SHAPES = 1024
#: A tree has at most 64 nodes, so ranks and depths fit in 6 bits each.
BITS = 6
MASK = (1 << BITS) - 1


def link(depth: int, rank: int, parent: int) -> int:
    """A position in a tree as one number: depth, rank among the nodes of its depth, and its parent's rank."""
    return (depth << BITS | rank) << BITS | parent


def unlink(number: int) -> tuple[int, int, int]:
    """Depth, rank and the parent's rank of a position."""
    return number >> 2 * BITS, number >> BITS & MASK, number & MASK


class Shape:
    """A tree's shape, given by the parents of its nodes as in :class:`~foresay.spec.request.Origin`.

    drafted: its nodes below the root. per_depth[d]: those of depth d + 1. links[n]: the position of node n + 1.
    trails[n]: the positions on the path from the root to node n, inclusive.
    """

    __slots__ = ("drafted", "links", "per_depth", "trails")

    def __init__(self, parents: Sequence[int]) -> None:
        self.drafted = len(parents) - 1
        self.per_depth: list[int] = []
        self.links: list[int] = []
        self.trails: list[tuple[int, ...]] = [()]
        ranks = [0]
        for parent in parents[1:]:
            depth = len(self.trails[parent]) + 1
            self.per_depth.extend([0] * (depth - len(self.per_depth)))
            ranks.append(self.per_depth[depth - 1])
            self.per_depth[depth - 1] += 1
            self.links.append(link(depth, ranks[-1], ranks[parent]))
            self.trails.append((*self.trails[parent], self.links[-1]))


class Shapes:
    """Caches shapes by their parents."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Shape] = {}

    def of(self, parents: Sequence[int]) -> Shape:
        """The shape of a tree; the same object for the same shape, unless evicted meanwhile."""
        key = tuple(parents)
        shape = self._known.get(key)
        if shape is None:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            shape = self._known[key] = Shape(key)
        return shape


# -- what became of drafts ---------------------------------------------------------------------------------------------

#: Drafter, tree, the last accepted node that is in the text (0: the root), and the number of tokens in the text.
Run = tuple[str, Shape, int, int]


class DraftCounts(Counts):
    """One drafter's trees: how many, their nodes, and the accepted nodes whose tokens are in the text; also by
    depth."""

    __slots__ = ("accepted", "accepted_per_depth", "drafted", "drafted_per_depth", "drafts")

    def __init__(self) -> None:
        self.drafts = self.drafted = self.accepted = 0
        self.drafted_per_depth: list[int] = []
        self.accepted_per_depth: list[int] = []

    def count(self, shape: Shape, accepted: int, times: int) -> None:
        """Count ``times`` trees of one shape with ``accepted`` accepted nodes, one at each depth."""
        self.drafts += times
        self.drafted += shape.drafted * times
        self.accepted += accepted * times
        deeper = len(shape.per_depth) - accepted
        self.drafted_per_depth = summed([self.drafted_per_depth, [nodes * times for nodes in shape.per_depth]])
        self.accepted_per_depth = summed([self.accepted_per_depth, [times] * accepted + [0] * deeper])


class PositionCounts(Counts):
    """How often there was a node at each position of a tree, and how often it was accepted. Positions are those of
    :func:`~foresay.server.observe.telemetry.counts.link`."""

    __slots__ = ("drafted", "taken")

    def __init__(self) -> None:
        self.drafted: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def count(self, shape: Shape, last: int, times: int) -> None:
        """Count ``times`` trees of one shape whose accepted path ended with node ``last``."""
        for position in shape.links:
            self.drafted[position] = self.drafted.get(position, 0) + times
        for position in shape.trails[last]:
            self.taken[position] = self.taken.get(position, 0) + times
