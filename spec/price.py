"""The price of levels and rows for a draft that grows by its acceptance chances, in tokens generated in the same
time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

#: The price of a row is the average from this many nodes before the last expected one to as many after it.
_AROUND = 2
#: Choices below a node that count; the second one's share of what the first leaves, and each further one's relative to
#: the one before.
CHOICES, _SECOND, _FURTHER = 4, 1 / 3, 2 / 3


class Bar(NamedTuple):
    """The threshold that the nodes of a level must reach for the next one to be drafted. A node with chance c is
    expected to have children with chances c * s, one for each of the shares s; their excess over ``row`` must add up to
    ``level``. It is known before a tree grows, so a device can apply it as well as the host."""

    shares: tuple[float, ...]
    row: float
    level: float

    def reached(self, chances: Sequence[float]) -> bool:
        """Whether the next level is worth it. chances: of the nodes that would be its parents."""
        return sum([max(0.0, c * s - self.row) for c in chances for s in self.shares]) >= self.level


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """level: the price of one more level. rows: N + 1 prices, of the first 0, 1, .. N nodes together, N being the most
    there may be. levels, nodes: how many are expected to be worth it."""

    level: float
    rows: Sequence[float]
    levels: int = 1
    nodes: int = CHOICES

    def bar(self, first: float) -> Bar:
        """For a level below nodes whose first choice has this chance."""
        last = len(self.rows) - 1
        low, high = max(0, min(self.nodes - _AROUND, last - 1)), min(self.nodes + _AROUND, last)
        row = (self.rows[high] - self.rows[low]) / (high - low) if last else math.inf
        others = ((1 - first) * _SECOND * _FURTHER**rank for rank in range(CHOICES - 1))
        return Bar((first, *others), row, self.level)


def worth(chances: Sequence[float], rows: Sequence[float]) -> int:
    """How many nodes with these chances, likeliest first, are worth their rows. rows: the cost of the first 0, 1, .. of
    them, in tokens."""
    gains = [value - row for value, row in zip(accumulate(chances, initial=0.0), rows, strict=False)]
    return max(range(len(gains)), key=gains.__getitem__) if gains else 0
