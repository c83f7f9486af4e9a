"""What a draft that grows by its chances pays for its levels and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A few dozen at most, so that a list is quicker than an array; either will do.
Floats: TypeAlias = Sequence[float] | NDArray[np.float64]


#: A row costs what one of the first so many does on average: most trees that grow are not larger.
_MOSTLY = 8


class Bar(NamedTuple):
    """What the chances of a level's nodes must reach for the next level to be drafted: what each has beyond ``each``
    must add up to ``together``."""

    each: float
    together: float

    def reached(self, chances: Sequence[float]) -> bool:
        """Whether it is worth it."""
        return sum([max(0.0, chance - self.each) for chance in chances]) >= self.together


class Worth(NamedTuple):
    """How many nodes are worth their rows, and the tokens they bring beyond those that this takes."""

    nodes: int
    gain: float


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """In tokens that would otherwise come in the same time.

    level: of one more level. rows: N + 1 of them, of the first 0, 1, .. N nodes together, as many as there may be.
    levels: that are expected to be worth it.
    """

    level: float
    rows: Floats
    levels: int = 1

    @classmethod
    def of(cls, pace: float, level: float, seconds: Sequence[float], levels: int) -> Price:
        """At so many tokens in a second. level: seconds of one; seconds: of a step with 0, 1, .. of these nodes."""
        first = seconds[0]
        return cls(pace * level, [pace * (spent - first) for spent in seconds], levels)

    def worth(self, chances: Floats) -> Worth:
        """Of nodes with these chances."""
        return worth(sorted(chances, reverse=True), self.rows)

    def keeps(self, chances: Floats) -> int:
        """How many of a whole tree's nodes are verified. One in any case: what is drafted and never looked at would
        show nothing."""
        return max(1, self.worth(chances).nodes)

    def bar(self, first: float) -> Bar:
        """For a level below nodes whose first choices come with this chance. So it is known before a tree grows where
        it ends, whether that is decided here or on a device."""
        nodes = min(_MOSTLY, len(self.rows) - 1)
        row = self.rows[nodes] / nodes if nodes else float("inf")
        return Bar(row / first, self.level / first)


def worth(chances: Sequence[float], rows: Floats) -> Worth:
    """Of nodes with these chances, likeliest first. rows: what the first 0, 1, .. of them take, in tokens."""
    nodes, value, gain = 0, 0.0, 0.0
    for taken, (chance, row) in enumerate(zip(chances, rows[1:], strict=False), start=1):
        value += chance
        if value - row > gain:
            nodes, gain = taken, value - row
    return Worth(nodes, gain)
