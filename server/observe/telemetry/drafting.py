"""What became of drafts: by drafter, by depth, and by place in the tree.

The path through a tree is known by its last node. So a run is one entry in a dictionary, and everything else is worked
out of the entries when somebody asks, or when their second is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, TypeVar

from server.observe.telemetry.shapes import Shape

K = TypeVar("K")
#: Who drafted, the tree, the last accepted node that is in the text (0: the root), and the tokens that are in the text.
Run = tuple[str, Shape, int, int]


class Drafting:
    """One drafter's trees: how many, their nodes, and the accepted ones whose tokens are in the text; by depth too."""

    __slots__ = ("accepted", "accepted_per_depth", "drafted", "drafted_per_depth", "drafts")

    def __init__(self) -> None:
        self.drafts = self.drafted = self.accepted = 0
        self.drafted_per_depth: list[int] = []
        self.accepted_per_depth: list[int] = []

    def count(self, shape: Shape, accepted: int, times: int) -> None:
        """Trees of one shape of which so many nodes were taken: one of each depth down to there."""
        self.drafts += times
        self.drafted += shape.drafted * times
        self.accepted += accepted * times
        self._deepen(len(shape.per_depth))
        for depth, nodes in enumerate(shape.per_depth):
            self.drafted_per_depth[depth] += nodes * times
        for depth in range(accepted):
            self.accepted_per_depth[depth] += times

    def add(self, other: Self) -> None:
        """Count what the other one has counted."""
        self.sum(other.drafts, other.drafted, other.accepted, other.drafted_per_depth, other.accepted_per_depth)

    def sum(
        self, drafts: int, drafted: int, accepted: int, drafted_per_depth: list[int], accepted_per_depth: list[int]
    ) -> None:
        """Count trees that somebody has counted."""
        self.drafts += drafts
        self.drafted += drafted
        self.accepted += accepted
        self._deepen(len(drafted_per_depth))
        for depth, pair in enumerate(zip(drafted_per_depth, accepted_per_depth, strict=True)):
            self.drafted_per_depth[depth] += pair[0]
            self.accepted_per_depth[depth] += pair[1]

    def _deepen(self, depths: int) -> None:
        for counts in (self.drafted_per_depth, self.accepted_per_depth):
            counts.extend([0] * (depths - len(counts)))


class Places:
    """How often there was a node at each place of a tree, and how often it was taken. Places are those of
    :func:`~server.observe.telemetry.shapes.link`."""

    __slots__ = ("drafted", "taken")

    def __init__(self) -> None:
        self.drafted: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def count(self, shape: Shape, last: int, times: int) -> None:
        """Trees of one shape whose path ended with node ``last``."""
        for place in shape.links:
            self.drafted[place] = self.drafted.get(place, 0) + times
        for place in shape.trails[last]:
            self.taken[place] = self.taken.get(place, 0) + times

    def add(self, other: Self) -> None:
        """Count what the other one has counted."""
        add(self.drafted, other.drafted)
        add(self.taken, other.taken)


def add(counts: dict[K, int], more: Mapping[K, int]) -> None:
    """Add up by key."""
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count
