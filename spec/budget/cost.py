"""Seconds of a step: of the target's pass, by its rows and context, and of every drafter's drafts.

Each is a sum of parts (so many rows at such a context, a level of a draft), measured at start-up
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

#: Variances of logs. Of a part that was measured once, busy or not: two deviations are a factor of three. Of a guess: a
#: factor of ten is nothing unusual. Of the pace: all machines seen were within five times of their start-up.
_UNSURE, _GUESSED, _PACE = 0.3, 2.0, 0.6
#: The same between equal steps, which differ by a tenth; and what a step adds to that of the pace, so that it follows a
#: change within some ten steps, and to that of a part since it was seen, so that it is tried again after minutes.
_NOISE, _PACE_DRIFT, _DRIFT = 0.01, 0.002, 2e-5
#: A step that is off by more deviations counts less: something else delayed it. Hopes are as many deviations low, as
#: far as these exceed a tenth.
_MOST_OFF, _SURE = 2.0, 0.1
#: What each part of a draft is taken to be where none was measured, or 0, as a share of the whole.
_UNMEASURED = (0.01, 0.1, 0.01, 0.01)
#: Tokens of context from which passes are told apart, twice as many for each further row of the table.
_CONTEXT = 1024
#: Seconds after which a step without drafts does not say any more what one takes, and a change of the pace, as a log,
#: after which none does.
_RECENT, _ANOTHER = 3600.0, 0.4

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
        return self.seconds * math.exp(pace.log - _MOST_OFF * max(0.0, math.sqrt(unsure) - _SURE))


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
    tokens written while it rested), and the host's decision after each level whether to draft another."""

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    deciding: float = 0.0

    def seconds(self, levels: float, more: float = 0.0, grown: bool = True) -> float:
        """The seconds of one draft. more: rows beyond one a level. grown: the host decides after each level."""
        return self.start + self.level * levels + self.token * more + self.deciding * levels * grown


class DraftCosts:
    """Seconds of a model's drafts, as learnt."""

    def __init__(self, cost: DraftCost, pace: MachinePace) -> None:
        pairs = zip(each := astuple(cost), _UNMEASURED, strict=True)
        self.parts = [Part(part) if part else Part(share * sum(each), _GUESSED) for part, share in pairs]
        self.pace = pace

    def now(self, hope: bool = False) -> DraftCost:
        """What it takes now. hope: at the optimistic end."""
        pace = math.exp(self.pace.log)
        return DraftCost(*[part.hoped(self.pace) if hope else part.seconds * pace for part in self.parts])

    def saw(self, levels: float, more: float, grown: bool, seconds: float) -> None:
        """Learn what a draft took."""
        if not self.parts[0].seconds:  # nothing was measured at start-up: the first value seen
            for part, share in zip(self.parts, _UNMEASURED, strict=True):
                part.seconds = share * seconds
        learn(self.pace, list(zip(self.parts, (1.0, levels, more, levels * grown), strict=True)), seconds)


class CostModel:
    """Seconds of a step by its rows: measured points, interpolated linearly, and a row of them for each size of context
    that was met, which begins as the nearest one. pace: of the machine."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float], clock: Callable[[], float] = monotonic) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self._rows, self._clock, self.pace = tuple(rows), clock, MachinePace()
        self._measured = list(accumulate(seconds, max))  # more rows never take less
        self._parts = {0: list(map(Part, self._measured))}
        self._timed = -math.inf, 0.0

    @property
    def points(self) -> list[tuple[int, float]]:
        """The measured points: rows, seconds."""
        return list(zip(self._rows, self._measured, strict=True))

    def begun(self, root_seconds: float) -> None:
        """Set what a whole step of one sequence without drafts took at start-up; 0 if that was not measured. What that
        is beyond a pass of one row, every step takes."""
        if root_seconds > 0:
            beyond, self._timed = max(0.0, root_seconds - self._measured[0]), (self._clock(), self.pace.log)
            self._measured = [seconds + beyond for seconds in self._measured]
            self._parts = {0: list(map(Part, self._measured))}

    def seconds(self, rows: int) -> float:
        """At start-up, of a step with ``rows`` rows; beyond the last point in proportion to it."""
        return sum([weight * self._measured[point] for point, weight in _weights(self._rows, rows)])

    def now(self, rows: int, context: int = 0) -> float:
        """By what steps have shown since. context: tokens of all sequences."""
        parts = self._at(context)
        return math.exp(self.pace.log) * sum([parts[p].seconds * weight for p, weight in _weights(self._rows, rows)])

    def _at(self, context: int) -> list[Part]:
        """The points at such a context."""
        size = (context // _CONTEXT).bit_length()
        if size not in self._parts:
            near = self._parts[min(self._parts, key=lambda known: abs(known - size))]
            self._parts[size] = [Part(part.seconds, part.unsure(self.pace) + _NOISE) for part in near]
        return self._parts[size]

    def table(self, context: int, most: int, hope: bool = False) -> list[float]:
        """Seconds of a step with 0, 1, .. ``most`` rows, never decreasing. context: tokens of all sequences. hope: at
        the optimistic end."""
        parts, pace = self._at(context), math.exp(self.pace.log)
        points = [part.hoped(self.pace) if hope else part.seconds * pace for part in parts]
        least = math.inf
        for at in reversed(range(len(points))):
            points[at] = min(points[at], least)  # a larger pass took less: what was delayed is known by that
            least = min(least, parts[at].seconds * pace) if parts[at].seen else least
        points = list(accumulate(points, max))
        return [less * points[low] + more * points[high] for low, less, high, more in _table(self._rows, most)]

    def saw(self, rows: int, sequences: int, context: int, phases: Mapping[str, float]) -> float:
        """Learn from a step without a prompt. context: tokens of all. phases: its seconds, by phase. Returns what it
        would have taken without drafts; 0 if unknown.

        A delay would have delayed the plain step too, so that is this step's own time in the proportion of the two.
        """
        own = sum(phases.values()) - phases.get("plan", 0.0) - phases.get("propose", 0.0)
        if rows == sequences:
            plain, self._timed = own, (self._clock(), self.pace.log)
        elif self._timed[0] == -math.inf:
            plain = 0.0
        elif self._at(context)[0].seen:
            plain = own * self.now(sequences, context) / self.now(rows, context)
        else:  # only larger steps were corrected
            plain = own * self.seconds(sequences) / self.seconds(rows)
        if own > 0.0:
            parts = self._at(context)
            amounts = [(parts[point], weight) for point, weight in _weights(self._rows, rows)]
            if len(amounts) == 2 and amounts[0][0] is parts[0]:
                # Costs may climb in stairs: what a plain step takes is not read off a line from it to larger ones.
                (first, less), (second, more) = amounts
                amounts = [(second, more + less * first.seconds / second.seconds)]
            learn(self.pace, amounts, own)
        return plain

    @property
    def doubt(self) -> str:
        """Why the estimate of a step without drafts may be wrong; "" if there is no reason to think so."""
        at, pace = self._timed
        if self._clock() - at > _RECENT:
            return OLD if at > -math.inf else FEW
        return CHANGED if abs(self.pace.log - pace) > _ANOTHER else ""


@lru_cache(maxsize=1024)
def _weights(points: tuple[int, ...], rows: int) -> tuple[tuple[int, float], ...]:
    """The points that so many rows are between, and the weight of each; beyond the last in proportion to it."""
    index = bisect_left(points, rows)
    if index == len(points):
        return ((index - 1, rows / points[-1]),)
    if not index or points[index] == rows:
        return ((index, 1.0),)
    part = (rows - points[index - 1]) / (points[index] - points[index - 1])
    return (index - 1, 1.0 - part), (index, part)


@lru_cache(maxsize=8)
def _table(points: tuple[int, ...], most: int) -> list[tuple[int, float, int, float]]:
    """Of 0, 1, .. ``most`` rows: two points, and the weight of each."""
    both = [(*_weights(points, rows), (0, 0.0))[:2] for rows in range(most + 1)]
    return [(low, less, high, more) for (low, less), (high, more) in both]
