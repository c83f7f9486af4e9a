"""Seconds of a step: of the target's pass, of every drafter's drafts, and of what a step takes without drafts.

Each is a sum of parts (a number of rows, a token of context, a level of a draft), measured at start-up
(:mod:`foresay.server.engine.calibrate`). The machine may have been busy then, and machines slow down and speed up. So
if a step took longer than expected, its parts move, the less certain ones more, and with them the machine's pace, which
is a factor of all. Parts not seen for long grow less certain, and an uncertain part is taken at its optimistic end: so
what only looks expensive is tried, and known a step later.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate
from time import monotonic

#: Variances of logs: of a part that was measured once (two deviations are a factor of three), of one that is guessed,
#: of the pace, and between equal steps; what a value adds to that of the pace, and to that of a part since it was seen.
_UNSURE, _GUESSED, _PACE, _NOISE, _PACE_DRIFT, _DRIFT = 0.3, 2.0, 0.6, 0.01, 0.002, 2e-5
#: A step that took longer by more than so many deviations counts less: something else may have delayed it.
_MOST_OFF = 2.0
#: Costs are lowered by so many deviations, as far as these exceed the second value.
_HOPE, _SURE = 2.0, 0.1
#: The pace has changed if it differs by this log from the last plain step's; the seconds that one stays recent.
_ANOTHER, _RECENT = math.log(1.5), 3600.0
#: What each part of a draft is taken to be where it was measured as 0, as a share of the others: a difference of two
#: measurements may be 0, but no cost is, and what is 0 is never corrected. Likewise what a token of context adds, as a
#: share of a pass of one row.
_UNMEASURED, _LEAST_ADDED = (0.01, 0.1, 0.01, 0.01), 1e-6
#: The phases of a step that do not depend on the drafter.
_OF_THE_TARGET = ("forward", "draw", "commit")

FEW = "no step without drafts was timed"
OLD = "no step without drafts was timed lately"
CHANGED = "the pace of this machine has changed since steps without drafts were timed"


class MachinePace:
    """How much longer everything takes than at start-up, as a log, and its variance. values: learnt from so far."""

    __slots__ = ("log", "values", "variance")

    def __init__(self) -> None:
        self.log, self.variance, self.values = 0.0, _PACE, 0


class Part:
    """seconds: of one unit, as learnt but for the pace. variance: of its log, when it was last seen; most: the largest
    one."""

    __slots__ = ("most", "seconds", "seen", "variance")

    def __init__(self, seconds: float, variance: float = _UNSURE) -> None:
        self.seconds, self.variance, self.most, self.seen = seconds, variance, variance, 0

    def unsure(self, pace: MachinePace) -> float:
        """Its variance by now."""
        return min(self.most, self.variance + _DRIFT * (pace.values - self.seen))

    def hoped(self, pace: MachinePace) -> float:
        """Its seconds at the optimistic end."""
        unsure = self.unsure(pace) + pace.variance
        return self.seconds * math.exp(pace.log - _HOPE * max(0.0, math.sqrt(unsure) - _SURE))


def learn(pace: MachinePace, amounts: Sequence[tuple[Part, float]], seconds: float) -> None:
    """Learn from a sum's seconds: a Kalman filter of logs, in which each part counts by its share, and none by what it
    has to do with the others. amounts: parts, and how much of each."""
    expected = sum([part.seconds * amount for part, amount in amounts])
    off = math.log(seconds / expected) - pace.log
    pace.values += 1
    pace.variance = min(_PACE, pace.variance + _PACE_DRIFT)
    terms, whole = [], _NOISE + pace.variance
    for part, amount in amounts:
        if amount:
            share = part.seconds * amount / expected
            part.variance, part.seen = part.unsure(pace), pace.values
            terms.append((part, share))
            whole += part.variance * share * share
    counts = off / (whole * max(1.0, off / (_MOST_OFF * math.sqrt(whole))))
    for part, share in terms:
        part.seconds *= math.exp(part.variance * share * counts)
        part.variance *= 1.0 - part.variance * share * share / whole
    pace.log += pace.variance * counts
    pace.variance *= 1.0 - pace.variance / whole


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Measured seconds of one draft: the call, each level, each row of its passes beyond one a level (siblings, and
    tokens written while it rested), and the host's decision after each level whether to draft another.
    """

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    deciding: float = 0.0

    def seconds(self, levels: float, more: float = 0.0, grown: bool = True) -> float:
        """The seconds of one draft. more: rows beyond one a level. grown: the host decides after each level."""
        return self.start + self.level * levels + self.token * more + self.deciding * levels * grown


class DraftCosts:
    """Seconds of a model's drafts, as learnt. learnt: from how many."""

    def __init__(self, cost: DraftCost, pace: MachinePace) -> None:
        each = astuple(cost)
        pairs = zip(each, _UNMEASURED, strict=True)
        self.parts = [Part(part) if part else Part(share * sum(each), _GUESSED) for part, share in pairs]
        self.pace, self.learnt = pace, 0

    def now(self, hope: bool = False) -> DraftCost:
        """What it takes now. hope: at the optimistic end."""
        pace = math.exp(self.pace.log)
        return DraftCost(*[part.hoped(self.pace) if hope else part.seconds * pace for part in self.parts])

    def saw(self, levels: float, more: float, grown: bool, seconds: float) -> None:
        """Learn what a draft took."""
        self.learnt += 1
        if not self.parts[0].seconds:  # nothing was measured at start-up: the first value seen
            for part, share in zip(self.parts, _UNMEASURED, strict=True):
                part.seconds = share * seconds
        learn(self.pace, list(zip(self.parts, (1.0, levels, more, levels * grown), strict=True)), seconds)


class CostModel:
    """Seconds of a step by its rows: measured points, interpolated linearly.

    context: seconds that each token of context adds to a pass, by the rows of its sequence. pace: of the machine.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        context: Sequence[tuple[int, float]] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self.context, self._rows, self._clock, self.pace = list(context), tuple(rows), clock, MachinePace()
        self._measured = _running(seconds)  # more rows never take less
        points, added = zip(*(context or [(1, 0.0)]), strict=True)
        self._per_token = points, tuple(_running(added, _LEAST_ADDED * seconds[0] if context else 0.0))
        # The last part is the context, per second measured for it.
        self._parts = [Part(each) for each in (*self._measured, 1.0)]
        self._overhead, self._plain = 0.0, (0.0, -math.inf)

    @property
    def points(self) -> list[tuple[int, float]]:
        """The measured points: rows, seconds."""
        return list(zip(self._rows, self._measured, strict=True))

    def begun(self, root_seconds: float) -> None:
        """Set what a whole step of one sequence without drafts took at start-up; 0 if that was not measured."""
        if root_seconds > 0:
            self._overhead = max(0.0, root_seconds - self.seconds(1))
            self._plain = self._level, self._clock()

    @property
    def _level(self) -> float:
        """How much longer passes take than at start-up, as a log."""
        pairs = zip(self._parts, self._measured, strict=False)
        return self.pace.log + sum([math.log(part.seconds / was) for part, was in pairs]) / len(self._measured)

    def seconds(self, rows: int, sequences: int = 1, context: int = 0) -> float:
        """At start-up, of a pass over ``rows`` rows; beyond the last point in proportion to it. context: tokens of all
        sequences."""
        added = context and context * _added(self._per_token, rows / sequences)
        return sum([weight * self._measured[point] for point, weight in _weights(self._rows, rows)]) + added

    def now(self, rows: int, sequences: int = 1, context: int = 0) -> float:
        """By what steps have shown since."""
        sums = [part.seconds * amount for part, amount in self._amounts(rows, sequences, context)]
        return math.exp(self.pace.log) * sum(sums)

    def _amounts(self, rows: int, sequences: int, context: int) -> list[tuple[Part, float]]:
        of_rows = [(self._parts[point], weight) for point, weight in _weights(self._rows, rows)]
        return [*of_rows, (self._parts[-1], context * _added(self._per_token, rows / sequences))]

    def table(self, sequences: int, context: int, most: int, hope: bool = False) -> list[float]:
        """Seconds of a step with 0, 1, .. ``most`` rows for so many sequences with so many tokens of context together,
        never decreasing. hope: at the optimistic end."""
        pace = math.exp(self.pace.log)
        *points, added = [part.hoped(self.pace) if hope else part.seconds * pace for part in self._parts]
        least = math.inf
        for at, part in reversed(list(enumerate(self._parts[:-1]))):
            points[at] = min(points[at], least)  # a larger pass took less: what was delayed is known by that
            least = min(least, part.seconds * pace) if part.seen else least
        points, added = _running(points), added * context
        rows = _table(self._rows, self._per_token, most, sequences)
        return [less * points[low] + more * points[high] + added * token for low, less, high, more, token in rows]

    def saw(
        self, rows: int, sequences: int, context: int, drafted: int, phases: Mapping[str, float], root: float = 0.0
    ) -> float:
        """Learn from a step without a prompt; returns what it would have taken without drafts, 0 if unknown.

        A delay would have delayed the plain step too, so that is this step's own time in the proportion of the two.
        context: tokens of all. phases: its seconds. root: of a plain step, if that was measured.
        """
        own = sum([phases.get(phase, 0.0) for phase in _OF_THE_TARGET])
        if not drafted:
            self._plain = self._level, self._clock()
            root = sum(phases.values()) - phases.get("propose", 0.0)  # a vain lookup is not plain decoding's time
        elif not root and self._plain[1] > -math.inf:
            of, overhead = self.seconds, self._overhead
            if self._parts[0].seen:  # else the larger passes alone were corrected
                of, overhead = self.now, overhead * math.exp(self._level)
            root = own * (of(sequences, sequences, context) + overhead) / of(rows, sequences, context)
        if own > 0.0:
            (first, amount), *others = amounts = self._amounts(rows, sequences, context)
            if len(others) > 1 and first is self._parts[0]:
                # Costs may climb in stairs: what a plain step takes is not read off a line from it to larger ones.
                (second, more), *others = others
                amounts = [(second, more + amount * first.seconds / second.seconds), *others]
            learn(self.pace, amounts, own)
        return root

    @property
    def doubt(self) -> str:
        """Why the estimate of a step without drafts may be wrong; "" if there is no reason to think so."""
        level, at = self._plain
        if self._clock() - at > _RECENT:
            return OLD if at > -math.inf else FEW
        return CHANGED if abs(self._level - level) > _ANOTHER else ""


Points = tuple[tuple[int, ...], tuple[float, ...]]


def _running(values: Sequence[float], least: float = 0.0) -> list[float]:
    """The largest so far, of each."""
    return list(accumulate(values, max, initial=least))[1:]


@lru_cache(maxsize=1024)
def _weights(points: tuple[int, ...], rows: float) -> tuple[tuple[int, float], ...]:
    """The points that so many rows are between, and the weight of each; beyond the last in proportion to it."""
    index = bisect_left(points, rows)
    if index == len(points):
        return ((index - 1, rows / points[-1]),)
    if not index or points[index] == rows:
        return ((index, 1.0),)
    part = (rows - points[index - 1]) / (points[index] - points[index - 1])
    return (index - 1, 1.0 - part), (index, part)


def _added(per_token: Points, rows: float) -> float:
    """Seconds that a token of context adds to a pass over so many rows of its sequence."""
    return sum([weight * per_token[1][point] for point, weight in _weights(per_token[0], rows)])


@lru_cache(maxsize=64)
def _table(
    points: tuple[int, ...], per_token: Points, most: int, sequences: int
) -> list[tuple[int, float, int, float, float]]:
    """Of 0, 1, .. ``most`` rows: two points and the weight of each, and what a token of context adds."""
    found = []
    for rows in range(most + 1):
        (low, less), *others = _weights(points, rows)
        high, more = others[0] if others else (low, 0.0)
        found.append((low, less, high, more, _added(per_token, rows / sequences)))
    return found
