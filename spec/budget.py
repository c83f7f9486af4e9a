"""What a step may cost, from measurements on the running machine.

For now it answers one question, how many prefill rows may ride along with a decode step; the choice of drafter and
tree by measured cost builds on the same curve.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

#: A step that mixes prefill with decoding takes at most this many times the decode step alone.
MIXED_STEP_FACTOR = 2.0


class StepCost:
    """Seconds of one forward pass by number of rows: measured points, straight lines between them."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self._rows = list(rows)
        # More rows never cost less; a dip is noise of the measurement.
        self._seconds = [max(seconds[: i + 1]) for i in range(len(seconds))]

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
        """The expected time of a pass over ``rows`` rows; beyond the last point in proportion to it."""
        index = bisect.bisect_left(self._rows, rows)
        if index == 0:
            return self._seconds[0]
        if index == len(self._rows):
            return self._seconds[-1] * rows / self._rows[-1]
        low, high = self._rows[index - 1], self._rows[index]
        share = (rows - low) / (high - low)
        return self._seconds[index - 1] * (1 - share) + self._seconds[index] * share

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
