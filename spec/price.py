"""What a draft that grows by its chances pays for its levels and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Worth(NamedTuple):
    """How many nodes are worth their rows, and the tokens they bring beyond those that this takes."""

    nodes: int
    gain: float


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """In tokens that would otherwise come in the same time.

    level: of one more level. rows: fp64[N + 1], of the first 0, 1, .. N nodes together, as many as there may be.
    levels: that are expected to be worth it.
    """

    level: float
    rows: Floats
    levels: int = 1

    @classmethod
    def of(cls, pace: float, level: float, seconds: Sequence[float], levels: int) -> Price:
        """At so many tokens in a second. level: seconds of one; seconds: of a step with 0, 1, .. of these nodes."""
        beyond = np.array(seconds)
        return cls(pace * level, pace * (beyond - beyond[0]), levels)

    def worth(self, chances: Floats) -> Worth:
        """Of nodes with these chances."""
        return worth(np.sort(chances)[::-1][: len(self.rows)].tolist(), self.rows.tolist())

    def keeps(self, chances: Floats) -> int:
        """How many of a whole tree's nodes are verified. One in any case: what is drafted and never looked at would
        show nothing."""
        return max(1, self.worth(chances).nodes)

    def goes_on(self, chances: Floats, below: Floats) -> bool:
        """Whether the next level is worth its price.

        chances: fp64[N], of the nodes that are there; below: fp64[M], of those that may come to be below the nodes of
        the last level, as they mostly are.
        """
        together = self.worth(np.concatenate((chances, below)))
        return together.nodes > 0 and together.gain - self.worth(chances).gain >= self.level


def worth(chances: Sequence[float], rows: Sequence[float]) -> Worth:
    """Of nodes with these chances, likeliest first. rows: what the first 0, 1, .. of them take, in tokens."""
    nodes, value, gain = 0, 0.0, 0.0
    for taken, (chance, row) in enumerate(zip(chances, rows[1:], strict=False), start=1):
        value += chance
        if value - row > gain:
            nodes, gain = taken, value - row
    return Worth(nodes, gain)
