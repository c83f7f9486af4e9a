"""Seconds of a step, from measurements on the running machine: of the target's pass and of a drafter.

A curve is measured at start-up (:mod:`server.rehearsal`) and corrected by what steps then take: other texts, other
sampling and whoever else uses the machine.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: A step that mixes prefill with decoding takes at most this many times the decode step alone.
MIXED_STEP_FACTOR = 2.0
#: How far one step moves what is expected of the next, and how far off it may count to be.
_STEP, _MOST_OFF = 0.05, 1.5


class StepCost:
    """Seconds of one forward pass by number of rows: measured points, straight lines between them.

    per_token, per_row_token: seconds that each token of context adds to a pass, and to each of its rows.
    """

    def __init__(
        self, rows: Sequence[int], seconds: Sequence[float], per_token: float = 0.0, per_row_token: float = 0.0
    ) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self._rows = list(rows)
        # More rows never cost less; a dip is noise of the measurement.
        self._seconds = [max(seconds[: i + 1]) for i in range(len(seconds))]
        self.per_token, self.per_row_token = per_token, per_row_token
        self._factors = [1.0] * len(rows)

    @classmethod
    def measure(cls, run: Callable[[int], float], sizes: Sequence[int], patience: float) -> StepCost:
        """Time ``run(rows)`` (which returns seconds) at growing sizes until one takes longer than ``patience``."""
        rows, seconds = [], []
        for size in sizes:
            rows.append(size)
            seconds.append(run(size))
            if seconds[-1] > patience:
                break
        return cls(rows, seconds)

    @property
    def points(self) -> list[tuple[int, float]]:
        """The measured points: rows, seconds."""
        return list(zip(self._rows, self._seconds, strict=True))

    def seconds(self, rows: float) -> float:
        """The expected time of a pass over ``rows`` rows of short texts; beyond the last point in proportion to it."""
        return _read(self._rows, self._seconds, rows)

    def expected(self, most: int) -> list[float]:
        """Seconds of a step with 0, 1, .. ``most`` rows as steps took them lately, that of more rows never less."""
        points = [factor * seconds for factor, seconds in zip(self._factors, self._seconds, strict=True)]
        points = [max(points[: i + 1]) for i in range(len(points))]
        return [_read(self._rows, points, rows) for rows in range(most + 1)]

    def behind(self, rows: float, context: float) -> float:
        """What so many tokens of context add to a step."""
        return context * (self.per_token + rows * self.per_row_token)

    def saw(self, rows: int, each: float, context: float, seconds: float) -> None:
        """A step took so many seconds: the points around its rows move a little of the way.

        each: rows of one sequence; context: tokens of all.
        """
        low, share = _place(self._rows, rows)
        near = [(low, 1.0 - share), (min(low + 1, len(self._rows) - 1), share)]
        expected = sum(weight * self._factors[i] for i, weight in near) * self.seconds(rows)
        off = (seconds - self.behind(each, context)) / expected if expected > 0 else 1.0
        off = min(max(off, 1.0 / _MOST_OFF), _MOST_OFF)
        for i, weight in near:
            self._factors[i] *= 1.0 + _STEP * weight * (off - 1.0)

    def rows_within(self, seconds: float, most: int) -> int:
        """The largest number of rows, up to ``most``, whose pass is expected to take at most ``seconds``."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle - 1)
        return low

    def chunk(self, decode_rows: int, most: int) -> int:
        """Prefill rows that may join ``decode_rows`` rows of running sequences; at least one, so that all move on."""
        if not decode_rows:
            return most
        total = self.rows_within(MIXED_STEP_FACTOR * self.seconds(decode_rows), decode_rows + most)
        return max(1, total - decode_rows)


def _place(rows: Sequence[int], wanted: float) -> tuple[int, float]:
    """Between which points ``wanted`` lies: the lower one, and how far it is on the way to the next."""
    index = bisect.bisect_left(rows, wanted)
    if index == 0:
        return 0, 0.0
    if index == len(rows):
        return index - 1, 0.0
    return index - 1, (wanted - rows[index - 1]) / (rows[index] - rows[index - 1])


def _read(rows: Sequence[int], seconds: Sequence[float], wanted: float) -> float:
    low, share = _place(rows, wanted)
    if low == len(rows) - 1:
        return seconds[-1] * max(1.0, wanted / rows[-1])
    return seconds[low] * (1 - share) + seconds[low + 1] * share


@dataclass(slots=True)
class DraftCost:
    """Seconds of one draft: for being asked, for each level, and for each token that was written while it rested."""

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    _factor: float = field(default=1.0)

    def seconds(self, levels: float, rested: float = 0) -> float:
        """What a draft of so many levels is expected to take, ``rested`` tokens after the last one."""
        return self._factor * (self.start + levels * self.level + rested * self.token)

    @property
    def of_a_level(self) -> float:
        """Seconds of one level more."""
        return self._factor * self.level

    def saw(self, levels: float, seconds: float, rested: float = 0) -> None:
        """A draft took so many seconds."""
        expected = self.seconds(levels, rested)
        if expected <= 0:
            self.start, self._factor = seconds, 1.0
            return
        off = min(max(seconds / expected, 1.0 / _MOST_OFF), _MOST_OFF)
        self._factor *= 1.0 + _STEP * (off - 1.0)
