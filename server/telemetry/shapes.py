"""Shapes of draft trees: what is counted of a tree once for all steps that use it."""

from __future__ import annotations

from collections.abc import Sequence

#: Trees grown by their chances have ever new shapes; more than these are not remembered at once.
MOST_SHAPES = 1024
#: A node's place: its depth times this, plus its rank among the nodes of its depth. A tree has at most 64 nodes.
PLACES_PER_DEPTH = 64


class Shape:
    """One shape. per_depth[d]: its nodes of depth d + 1. places[n]: of node n (the root's is 0).

    parents: as in :class:`~spec.request.Origin`.
    """

    __slots__ = ("parents", "per_depth", "places")

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = tuple(parents)
        depths = [0] * len(parents)
        self.per_depth: list[int] = []
        self.places = [0] * len(parents)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depth = depths[parent] + 1
            self.per_depth.extend([0] * (depth - len(self.per_depth)))
            self.places[node] = depth * PLACES_PER_DEPTH + self.per_depth[depth - 1]
            self.per_depth[depth - 1] += 1


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
