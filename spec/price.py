"""What a draft that grows by its chances pays for its levels and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A few dozen at most, so that a list is quicker than an array; either will do.
Floats: TypeAlias = Sequence[float] | NDArray[np.float64]


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

    def goes_on(self, chances: Floats, below: Floats) -> bool:
        """Whether the next level is worth its price.

        chances: of the nodes that are there; below: of those that may come to be below the nodes of the last level, as
        they mostly are.
        """
        together = self.worth([*chances, *below])
        return together.nodes > 0 and together.gain - self.worth(chances).gain >= self.level


def worth(chances: Sequence[float], rows: Floats) -> Worth:
    """Of nodes with these chances, likeliest first. rows: what the first 0, 1, .. of them take, in tokens."""
    nodes, value, gain = 0, 0.0, 0.0
    for taken, (chance, row) in enumerate(zip(chances, rows[1:], strict=False), start=1):
        value += chance
        if value - row > gain:
            nodes, gain = taken, value - row
    return Worth(nodes, gain)
