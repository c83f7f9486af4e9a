"""What a draft that grows by its chances pays for its levels and rows, in tokens that would come in the same time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

#: A row costs what one does on average from so many nodes before the last expected one to as many after it.
_AROUND = 2
#: Choices below a node that count; the share of a second one in what the first leaves, and of each further one in it.
_CHOICES, _SECOND, _FURTHER = 4, 1 / 3, 2 / 3


class Bar(NamedTuple):
    """What the nodes of a level must reach for the next one to be drafted. A node with chance c is expected to have
    children with chances c * s, one for each of the shares s; what those have beyond ``row`` must add up to ``level``.

    It is known before a tree grows where it will end, so a device can see to it as well as the host.
    """

    shares: tuple[float, ...]
    row: float
    level: float

    def reached(self, chances: Sequence[float]) -> bool:
        """Whether the next level is worth it. chances: of the nodes that it would hang below."""
        return sum([max(0.0, c * s - self.row) for c in chances for s in self.shares]) >= self.level


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """level: of one more level. rows: N + 1 of them, of the first 0, 1, .. N nodes together, as many as there may be.
    levels, nodes: that are expected to be worth it."""

    level: float
    rows: Sequence[float]
    levels: int = 1
    nodes: int = _CHOICES

    @classmethod
    def of(cls, pace: float, level: float, seconds: Sequence[float], levels: int, nodes: int) -> Price:
        """At so many tokens in a second. level: seconds of one; seconds: of a step with 0, 1, .. of these nodes."""
        return cls(pace * level, [pace * (spent - seconds[0]) for spent in seconds], levels, nodes)

    def bar(self, first: float) -> Bar:
        """For a level below nodes whose first choices come with this chance."""
        last = len(self.rows) - 1
        low, high = max(0, min(self.nodes - _AROUND, last - 1)), min(self.nodes + _AROUND, last)
        row = (self.rows[high] - self.rows[low]) / (high - low) if last else math.inf
        others = ((1 - first) * _SECOND * _FURTHER**rank for rank in range(_CHOICES - 1))
        return Bar((first, *others), row, self.level)

    def keeps(self, chances: Sequence[float]) -> int:
        """How many of a whole tree's nodes are verified. One in any case: what is drafted and never looked at would
        show nothing."""
        return max(1, worth(sorted(chances, reverse=True), self.rows))


def worth(chances: Sequence[float], rows: Sequence[float]) -> int:
    """How many nodes with these chances, likeliest first, are worth their rows. rows: what the first 0, 1, .. of them
    take, in tokens."""
    gains = [value - row for value, row in zip(accumulate(chances, initial=0.0), rows, strict=False)]
    return max(range(len(gains)), key=gains.__getitem__) if gains else 0
