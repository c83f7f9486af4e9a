"""Seconds of a step, from measurements on the running machine: of the target's pass and of a drafter.

A curve is measured at start-up (:mod:`foresay.server.engine.calibrate`) and corrected by what steps then take: other
texts, other sampling and whoever else uses the machine.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A step that mixes prefill with decoding takes at most this many times the decode step alone, or so many seconds,
#: which nobody sees in a text: small pieces of a prompt cost more by the row, so all would wait longer for it.
MIXED_STEP_FACTOR, MIXED_STEP_SECONDS = 2.0, 0.05
#: When the curve is read again: after so many steps, and where the context moved by about so many tokens.
_REREAD, _MOVED_TOKENS = 16, 128
#: How far one step moves what is expected of the next: of all steps, since machines are slower at times, and of those
#: of as many rows as much again. How far off one may count to be.
_STEP, _MOST_OFF = 0.03, 1.5


class CostModel:
    """Seconds of one forward pass by number of rows: measured points, straight lines between them.

    context: seconds that each token of context adds to a pass, by the rows of its sequence.
    """

    def __init__(
        self, rows: Sequence[int], seconds: Sequence[float], context: Sequence[tuple[int, float]] = ()
    ) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self._rows = list(rows)
        self._seconds = _rising(seconds)
        self._context_rows = [rows for rows, _ in context]
        self._per_token = _rising([seconds for _, seconds in context])
        self._lately = list(self._seconds)  # what the points took in the last steps
        self._table: list[float] = []
        self._read_for, self._asked = (0, 0, 0), 0

    @property
    def points(self) -> list[tuple[int, float]]:
        """The measured points, those that fall pooled: rows, seconds."""
        return list(zip(self._rows, self._seconds, strict=True))

    @property
    def context(self) -> list[tuple[int, float]]:
        """What a token of context adds: rows, seconds."""
        return list(zip(self._context_rows, self._per_token, strict=True))

    def seconds(self, rows: float) -> float:
        """The expected time of a pass over ``rows`` rows of short texts; beyond the last point in proportion to it."""
        return _read(self._rows, self._seconds, rows)

    def expected(self, most: int) -> list[float]:
        """Seconds of a step with 0, 1, .. ``most`` rows as steps took them lately, that of more rows never less."""
        expected: list[float] = _line(self._rows, list(accumulate(self._lately, max)), np.arange(most + 1)).tolist()
        return expected

    def table(self, sequences: int, context: int, most: int) -> list[float]:
        """The same of steps of so many sequences with so many tokens of context together; read off now and then."""
        self._asked += 1
        read_for = sequences, most, context // _MOVED_TOKENS
        if read_for != self._read_for or self._asked % _REREAD == 0:
            seconds = np.array(self.expected(most))
            if self._per_token:
                seconds += context * _line(self._context_rows, self._per_token, np.arange(most + 1) / sequences)
            self._read_for, self._table = read_for, np.maximum.accumulate(seconds).tolist()
        return self._table

    def behind(self, rows: float, context: float) -> float:
        """What so many tokens of context add to a step, as steps take lately. rows: of one sequence."""
        return context * _read(self._context_rows, self._per_token, rows) if self._per_token else 0.0

    def saw(self, rows: int, each: float, context: float, seconds: float) -> float:
        """A step took so many seconds: the curve moves a little of the way, the points around its rows a little more.

        each: rows of one sequence; context: tokens of all. Returns by what all points were multiplied.
        """
        off = _off(seconds, _read(self._rows, self._lately, rows) + self.behind(each, context))
        self._lately = [(1.0 + _STEP * off) * one for one in self._lately]
        self._per_token = [(1.0 + _STEP * off) * one for one in self._per_token]
        for point, share in _near(self._rows, rows):
            self._lately[point] *= 1.0 + _STEP * share * off
        return 1.0 + _STEP * off

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
        within = max(MIXED_STEP_FACTOR * self.seconds(decode_rows), MIXED_STEP_SECONDS)
        return max(1, self.rows_within(within, decode_rows + most) - decode_rows)


def _rising(seconds: Sequence[float]) -> list[float]:
    """More rows never cost less: points that fall are noise of the measurement, and are taken to be their mean."""
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, many), (before, few) = pools.pop(), pools.pop()
            pools.append(((last * many + before * few) / (many + few), many + few))
    return [value for value, count in pools for _ in range(count)]


def _near(rows: Sequence[int], wanted: float) -> list[tuple[int, float]]:
    """The points around ``wanted``, and the share that each has in it."""
    high = min(max(bisect.bisect_left(rows, wanted), 1), len(rows) - 1)
    low = max(0, high - 1)
    share = min(max((wanted - rows[low]) / max(1, rows[high] - rows[low]), 0.0), 1.0)
    return [(low, 1.0 - share), (high, share)]


def _line(rows: Sequence[int], seconds: Sequence[float], wanted: NDArray[Any]) -> NDArray[np.float64]:
    """Straight lines between the points, the first one before them, and beyond them in proportion to the last."""
    read: NDArray[np.float64] = np.interp(wanted, rows, seconds) * np.maximum(1.0, wanted / rows[-1])
    return read


def _read(rows: Sequence[int], seconds: Sequence[float], wanted: float) -> float:
    """The same at one place."""
    between = sum(share * seconds[point] for point, share in _near(rows, wanted))
    return between * max(1.0, wanted / rows[-1])


def _off(seconds: float, expected: float) -> float:
    """How much longer something took than expected, as a share; of one that was held up not all."""
    return min(max(seconds / expected, 1.0 / _MOST_OFF), _MOST_OFF) - 1.0 if expected > 0 else 0.0


@dataclass(slots=True)
class DraftCost:
    """Seconds of one draft: for being asked, for each level, and for each row of the draft's passes beside one a level:
    siblings, and tokens that were written while it rested. slower: how much longer drafts take lately than measured.
    deciding: for each level after which the host decides whether there is to be another one."""

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    slower: float = 1.0
    deciding: float = 0.0

    @property
    def each(self) -> float:
        """Seconds of one more level."""
        return self.slower * (self.level + self.deciding)

    def reading(self, tokens: float) -> float:
        """Seconds that so many tokens more take to catch up with."""
        return self.slower * self.token * tokens

    def seconds(self, levels: float, more: float = 0.0) -> float:
        """What a draft of so many levels is expected to take. more: rows beside one a level."""
        return self.slower * self.start + self.each * levels + self.reading(more)

    def saw(self, levels: float, seconds: float, more: float = 0.0) -> None:
        """A draft took so many seconds."""
        expected = self.seconds(levels, more)
        if expected <= 0:
            self.start = seconds / self.slower
        self.slower *= 1.0 + _STEP * _off(seconds, expected)
