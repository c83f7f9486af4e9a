"""Seconds of a step, from measurements on the running machine: of the target's pass and of a drafter.

A curve is measured at start-up (:mod:`server.rehearsal`) and corrected by what steps then take: other texts, other
sampling and whoever else uses the machine.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A step that mixes prefill with decoding takes at most this many times the decode step alone.
MIXED_STEP_FACTOR = 2.0
#: When the curve is read again: after so many steps, and where the context moved by so many tokens and such a share.
_REREAD, _MOVED_TOKENS, _MOVED = 16, 128, 0.05
#: How far one step moves what is expected of the next: of all steps, since machines are slower at times, and of those
#: of its kind (as many rows; a chain or a tree) beside. How far off it may count to be.
_STEP, _OF_KIND, _MOST_OFF = 0.03, 0.03, 1.5
#: As many steps what was measured at the start-up counts, at first, against those of its kind.
_MEASURED = 16.0
#: So many times beyond the last point a line is as good as without end.
_ENDLESS = 1e6


class StepCost:
    """Seconds of one forward pass by number of rows: measured points, straight lines between them.

    context: seconds that each token of context adds to a pass, by the rows of its sequence. branching: what a sequence
    adds whose rows are a tree, and no chain. slower: how much longer steps take lately than when it was measured.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        context: Sequence[tuple[int, float]] = (),
        branching: float = 0.0,
    ) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self._rows = list(rows)
        self._seconds = _rising(seconds)
        self._context_rows = [rows for rows, _ in context]
        self._per_token = _rising([seconds for _, seconds in context])
        self._context_factors = [1.0] * len(context)
        self._branching = branching
        self._trees: float | None = None
        self._factors = [1.0] * len(rows)
        self._steps = [_MEASURED] * len(rows)
        self.slower = 1.0

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
        """The measured points, those that fall pooled: rows, seconds."""
        return list(zip(self._rows, self._seconds, strict=True))

    @property
    def branching(self) -> float:
        """What a tree adds to a step, as steps take lately."""
        return self.slower * self._branching

    @property
    def context(self) -> list[tuple[int, float]]:
        """What a token of context adds: rows, seconds."""
        return list(zip(self._context_rows, self._per_token, strict=True))

    def seconds(self, rows: float) -> float:
        """The expected time of a pass over ``rows`` rows of short texts; beyond the last point in proportion to it."""
        return _read(self._rows, self._seconds, rows)

    def expected(self, most: int) -> list[float]:
        """Seconds of a step with 0, 1, .. ``most`` rows as steps took them lately, that of more rows never less."""
        factors = [self.slower * factor for factor in self._factors]
        points = [factor * seconds for factor, seconds in zip(factors, self._seconds, strict=True)]
        expected: list[float] = _line(self._rows, list(accumulate(points, max)), np.arange(most + 1)).tolist()
        return expected

    def table(self, sequences: int, context: float, most: int) -> list[float]:
        """The same of steps of so many sequences with so many tokens of context together."""
        seconds = np.array(self.expected(most))
        if self._per_token:
            each = np.arange(most + 1) / sequences
            factors = np.interp(each, self._context_rows, self._context_factors)
            seconds += self.slower * context * factors * _line(self._context_rows, self._per_token, each)
        steps: list[float] = np.maximum.accumulate(seconds).tolist()
        return steps

    def behind(self, rows: float, context: float) -> float:
        """What so many tokens of context add to a step, as steps take lately. rows: of one sequence."""
        if not self._per_token:
            return 0.0
        near = _near(self._context_rows, rows)
        factor = sum(weight * self._context_factors[i] for i, weight in near)
        return self.slower * factor * context * _read(self._context_rows, self._per_token, rows)

    def saw(self, rows: int, each: float, context: float, seconds: float, trees: int = 0) -> None:
        """A step took so many seconds: the curve moves a little of the way, the points around its rows a little more,
        and what branching adds where there are steps with trees and without.

        each: rows of one sequence; context: tokens of all; trees: how many sequences had one.
        """
        near = _near(self._rows, rows)
        expected = self.slower * sum(weight * self._factors[i] for i, weight in near) * self.seconds(rows)
        behind = self.behind(each, context)
        expected += behind + trees * self.branching
        off = seconds / expected if expected > 0 else 1.0
        off = min(max(off, 1.0 / _MOST_OFF), _MOST_OFF)
        self.slower *= 1.0 + _STEP * (off - 1.0)
        for i, weight in near:
            self._factors[i] *= 1.0 + max(_OF_KIND, 1.0 / self._steps[i]) * weight * (off - 1.0)
            self._steps[i] += weight
        self._saw_trees(trees, max(1.0, rows / each), (off - 1.0) * expected / self.slower)
        if behind:
            for i, weight in _near(self._context_rows, each):
                self._context_factors[i] *= 1.0 + _OF_KIND * weight * behind / expected * (off - 1.0)

    def _saw_trees(self, trees: int, sequences: float, more: float) -> None:
        """How many of so many sequences had a tree, and how many seconds more than expected that took.

        Only what comes with more trees than usual is put down to them: a slower machine is slower for chains too.
        """
        usual = trees if self._trees is None else self._trees
        self._branching = max(0.0, self._branching + _OF_KIND * (trees - usual) / sequences**2 * more)
        self._trees = usual + _OF_KIND * (trees - usual)

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


class Table:
    """Seconds of a step by its rows, for so many sequences with so much context; read off the curve now and then."""

    def __init__(self, cost: StepCost) -> None:
        self.seconds: list[float] = []
        self._cost, self._sequences, self._context, self._asked = cost, 0, 0, 0

    def read(self, sequences: int, context: int, most: int) -> list[float]:
        """Of the next step, with up to ``most`` rows."""
        self._asked += 1
        moved = abs(context - self._context) > max(_MOVED_TOKENS, _MOVED * self._context)
        if sequences != self._sequences or moved or self._asked % _REREAD == 0:
            self._sequences, self._context = sequences, context
            self.seconds = self._cost.table(sequences, context, most)
        return self.seconds


def _rising(seconds: Sequence[float]) -> list[float]:
    """More rows never cost less: points that fall are noise of the measurement, and are taken to be their mean."""
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, many), (before, few) = pools.pop(), pools.pop()
            pools.append(((last * many + before * few) / (many + few), many + few))
    return [value for value, count in pools for _ in range(count)]


def _place(rows: Sequence[int], wanted: float) -> tuple[int, float]:
    """Between which points ``wanted`` lies: the lower one, and how far it is on the way to the next."""
    index = bisect.bisect_left(rows, wanted)
    if index == 0:
        return 0, 0.0
    if index == len(rows):
        return index - 1, 0.0
    return index - 1, (wanted - rows[index - 1]) / (rows[index] - rows[index - 1])


def _near(rows: Sequence[int], wanted: float) -> list[tuple[int, float]]:
    """The points around ``wanted``, and the share that each has in it."""
    low, share = _place(rows, wanted)
    return [(low, 1.0 - share), (min(low + 1, len(rows) - 1), share)]


def _line(rows: Sequence[int], seconds: Sequence[float], wanted: NDArray[Any]) -> NDArray[np.float64]:
    """The points read at many places at once, as :func:`_read` does at one."""
    read: NDArray[np.float64] = np.interp(wanted, [*rows, _ENDLESS * rows[-1]], [*seconds, _ENDLESS * seconds[-1]])
    return read


def _read(rows: Sequence[int], seconds: Sequence[float], wanted: float) -> float:
    low, share = _place(rows, wanted)
    if low == len(rows) - 1:
        return seconds[-1] * max(1.0, wanted / rows[-1])
    return seconds[low] * (1 - share) + seconds[low + 1] * share


@dataclass(slots=True)
class DraftCost:
    """Seconds of one draft: for being asked, for each level, and for each token that was written while it rested.

    tree_level: for each level of a tree, where candidates are ranked and rows see different ones; as ``level`` if 0.
    slower: how much longer all steps take lately than when this was measured.
    """

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    tree_level: float = 0.0
    slower: float = 1.0
    _factors: list[float] = field(default_factory=lambda: [1.0, 1.0])
    _drafts: list[float] = field(default_factory=lambda: [_MEASURED, _MEASURED])

    def seconds(self, levels: float, rested: float = 0, more: float = 0, grown: bool = False) -> float:
        """What a draft of so many levels is expected to take, ``rested`` tokens after the last one.

        more: nodes beside one a level; a chain has none. grown: whether its chances decide what it becomes: its levels
        count as a tree's, whatever that was.
        """
        tree = grown or more > 0
        return self._factor(tree) * (self.start + levels * self._level(tree) + (rested + more) * self.token)

    def of_a_level(self, tree: bool = False) -> float:
        """Seconds of one level more."""
        return self._factor(tree) * self._level(tree)

    @property
    def of_a_token(self) -> float:
        """Seconds of one token more that was written while it rested."""
        return self._factor(tree=False) * self.token

    def _factor(self, tree: bool) -> float:
        return self.slower * self._factors[tree]

    def _level(self, tree: bool) -> float:
        return self.tree_level or self.level if tree else self.level

    def saw(self, levels: float, seconds: float, rested: float = 0, more: float = 0, grown: bool = False) -> None:
        """A draft took so many seconds."""
        expected = self.seconds(levels, rested, more, grown)
        if expected <= 0:
            self.start, self._factors = seconds / self.slower, [1.0, 1.0]
            return
        off = min(max(seconds / expected, 1.0 / _MOST_OFF), _MOST_OFF)
        own = grown or more > 0
        self._factors[not own] *= 1.0 + _STEP * (off - 1.0)
        self._factors[own] *= 1.0 + (_STEP + max(_OF_KIND, 1.0 / self._drafts[own])) * (off - 1.0)
        self._drafts[own] += 1.0
