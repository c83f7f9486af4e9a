"""Shapes of draft trees: what is counted of a tree once for all steps that use it."""

from __future__ import annotations

from collections.abc import Sequence

#: Trees grown by their chances have ever new shapes; more than these are not remembered at once.
MOST_SHAPES = 1024
#: A tree has at most 64 nodes, so ranks and depths fit in 6 bits each.
BITS = 6
MASK = (1 << BITS) - 1


def link(depth: int, rank: int, parent: int) -> int:
    """A place in a tree as one number: depth, rank among the nodes of its depth, and its parent's rank."""
    return (depth << BITS | rank) << BITS | parent


def unlink(number: int) -> tuple[int, int, int]:
    """Depth, rank and the parent's rank of a place."""
    return number >> 2 * BITS, number >> BITS & MASK, number & MASK


class Shape:
    """One shape, made of the parents of its nodes as in :class:`~spec.request.Origin`.

    drafted: its nodes below the root. per_depth[d]: those of depth d + 1. links[n]: the place of node n + 1. trails[n]:
    the places on the way from the root to node n, that of node n included.
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
    """Remembers shapes by their parents."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Shape] = {}

    def of(self, parents: Sequence[int]) -> Shape:
        """The shape of a tree; the same object for the same shape, unless it was forgotten between."""
        key = tuple(parents)
        shape = self._known.get(key)
        if shape is None:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            shape = self._known[key] = Shape(key)
        return shape
