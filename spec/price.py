"""What a draft that grows by its chances pays for its levels and rows, in tokens that would come in the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """level: of one more level. rows: N + 1 of them, of the first 0, 1, .. N nodes together, as many as there may be.
    levels: that are expected to be worth it."""

    level: float
    rows: Sequence[float]
    levels: int = 1

    @classmethod
    def of(cls, pace: float, level: float, seconds: Sequence[float], levels: int) -> Price:
        """At so many tokens in a second. level: seconds of one; seconds: of a step with 0, 1, .. of these nodes."""
        return cls(pace * level, [pace * (spent - seconds[0]) for spent in seconds], levels)

    def bar(self, first: float) -> Bar:
        """For a level below nodes whose first choices come with this chance. So it is known before a tree grows where
        it ends, whether that is decided here or on a device."""
        nodes = min(_MOSTLY, len(self.rows) - 1)
        row = self.rows[nodes] / nodes if nodes else float("inf")
        return Bar(row / first, self.level / first)

    def keeps(self, chances: Sequence[float]) -> int:
        """How many of a whole tree's nodes are verified. One in any case: what is drafted and never looked at would
        show nothing."""
        return max(1, worth(sorted(chances, reverse=True), self.rows))


def worth(chances: Sequence[float], rows: Sequence[float]) -> int:
    """How many nodes with these chances, likeliest first, are worth their rows. rows: what the first 0, 1, .. of them
    take, in tokens."""
    gains = [value - row for value, row in zip(accumulate(chances, initial=0.0), rows, strict=False)]
    return max(range(len(gains)), key=gains.__getitem__) if gains else 0
