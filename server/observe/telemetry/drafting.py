"""What became of drafts: by drafter, by depth, and by position in the tree.

A path through a tree is identified by its last node. So a run is one dictionary entry, and everything else is computed
from the entries on demand, or when their second is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

from foresay.spec.trace import ShadowReport

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

K = TypeVar("K")
#: Drafter, tree, the last accepted node that is in the text (0: the root), and the number of tokens in the text.
Run = tuple[str, Shape, int, int]


class DraftCounts:
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
        self._deepen(len(shape.per_depth))
        for depth, nodes in enumerate(shape.per_depth):
            self.drafted_per_depth[depth] += nodes * times
        for depth in range(accepted):
            self.accepted_per_depth[depth] += times

    def add(self, other: DraftCounts | ShadowReport) -> None:
        """Add the counts of another."""
        self.drafts += other.drafts
        self.drafted += other.drafted
        self.accepted += other.accepted
        self._deepen(len(other.drafted_per_depth))
        for depth, pair in enumerate(zip(other.drafted_per_depth, other.accepted_per_depth, strict=True)):
            self.drafted_per_depth[depth] += pair[0]
            self.accepted_per_depth[depth] += pair[1]

    def _deepen(self, depths: int) -> None:
        for counts in (self.drafted_per_depth, self.accepted_per_depth):
            counts.extend([0] * (depths - len(counts)))


class PositionCounts:
    """How often there was a node at each position of a tree, and how often it was accepted. Positions are those of
    :func:`~foresay.server.observe.telemetry.drafting.link`."""

    __slots__ = ("drafted", "taken")

    def __init__(self) -> None:
        self.drafted: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def count(self, shape: Shape, last: int, times: int) -> None:
        """Count ``times`` trees of one shape whose accepted path ended with node ``last``."""
        for place in shape.links:
            self.drafted[place] = self.drafted.get(place, 0) + times
        for place in shape.trails[last]:
            self.taken[place] = self.taken.get(place, 0) + times

    def add(self, other: Self) -> None:
        """Count what the other one has counted."""
        add(self.drafted, other.drafted)
        add(self.taken, other.taken)


def add(counts: dict[K, Any], more: Mapping[K, Any]) -> None:
    """Add up by key: numbers, or objects with an ``add`` method."""
    for key, count in more.items():
        if isinstance(count, int | float):
            counts[key] = counts.get(key, 0) + count
        else:
            counts.setdefault(key, type(count)()).add(count)


# -- what a shadow drafter would have had accepted ---------------------------------------------------------------------


class Shadowing:
    """One shadow drafter's hypothetical steps. tokens: what they would have emitted; seconds: what drafting took."""

    __slots__ = ("drafting", "seconds", "steps", "tokens")

    def __init__(self) -> None:
        self.drafting = DraftCounts()
        self.tokens = self.steps = 0
        self.seconds = 0.0

    def count(self, report: ShadowReport) -> None:
        """Count a finished request."""
        self.tokens += report.tokens
        self.steps += report.steps
        self.seconds += report.seconds
        self.drafting.add(report)

    def add(self, other: Self) -> None:
        """Count what the other one has counted."""
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.drafting.add(other.drafting)
