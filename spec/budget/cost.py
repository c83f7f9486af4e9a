"""Seconds of a step, by its rows and context, and of each drafter's drafts: measured at start-up, corrected by steps.

Each is a sum of parts (so many rows, a level of a draft), times the machine's pace. A machine may have been busy at
start-up, slow down, and speed up. So if a step took longer than expected, its parts move, the less certain ones more,
and with them the pace. Parts not seen for long grow less certain, and an uncertain part is taken at its optimistic end:
so what only looks expensive is tried, and known a step later.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate

#: Variances of logs. Of a part that was measured once, busy or not: two deviations are a factor of three. Of a guess: a
#: factor of ten is nothing unusual. Of the pace: all machines seen were within five times of their start-up.
_UNSURE, _GUESSED, _PACE = 0.3, 2.0, 0.6
#: The same between equal steps, which differ by a tenth; and what a step adds to that of the pace, so that it follows a
#: change within some ten steps, and to that of a part since it was seen, so that it is tried again after minutes.
_NOISE, _PACE_DRIFT, _DRIFT = 0.01, 0.002, 2e-5
#: A step that is off by more deviations counts less: something else delayed it. Hopes are as many deviations low.
_MOST_OFF = 2.0
#: What each part of a draft is taken to be where none was measured, or 0, as a share of the whole.
_UNMEASURED = (0.01, 0.1, 0.01, 0.01)
#: Tokens of context from which passes are told apart, twice as many for each further row of the table.
_CONTEXT = 1024
#: A change of the pace, as a log, after which a step without drafts does not say any more what one takes.
_ANOTHER = 0.4


class Part:
    """seconds: of one unit, as learnt but for the pace. variance: of its log, when it was last seen; most: the largest
    one."""

    __slots__ = ("most", "seconds", "seen", "variance")

    def __init__(self, seconds: float, variance: float = _UNSURE) -> None:
        self.seconds, self.variance, self.most, self.seen = seconds, variance, variance, 0


class Pace:
    """How much longer everything takes than at start-up, as a log, and its variance. steps: learnt from so far."""

    def __init__(self) -> None:
        self.log, self.variance, self.steps = 0.0, _PACE, 0

    def unsure(self, part: Part) -> float:
        """A part's variance by now."""
        return min(part.most, part.variance + _DRIFT * (self.steps - part.seen))

    def seconds(self, part: Part, hope: bool = False) -> float:
        """A part's seconds now. hope: at the optimistic end."""
        off = math.sqrt(self.unsure(part) + self.variance) - math.sqrt(_NOISE) if hope else 0.0
        return part.seconds * math.exp(self.log - _MOST_OFF * max(0.0, off))

    def learn(self, amounts: Sequence[tuple[Part, float]], seconds: float) -> None:
        """Learn from a sum's seconds: a Kalman filter of logs, in which each part counts by its share, and none by what
        it has to do with the others. amounts: parts, and how much of each."""
        expected = sum([part.seconds * amount for part, amount in amounts])
        off = math.log(seconds / expected) - self.log
        self.steps += 1
        self.variance = min(_PACE, self.variance + _PACE_DRIFT)
        terms, whole = [], _NOISE + self.variance
        for part, amount in amounts:
            if amount:
                share = part.seconds * amount / expected
                part.variance, part.seen = self.unsure(part), self.steps
                terms.append((part, share))
                whole += part.variance * share * share
        counts = off / (whole * max(1.0, off / (_MOST_OFF * math.sqrt(whole))))
        for part, share in terms:
            part.seconds *= math.exp(part.variance * share * counts)
            part.variance *= 1.0 - part.variance * share * share / whole
        self.log += self.variance * counts
        self.variance *= 1.0 - self.variance / whole


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of one draft: the call, each level, each row of its passes beyond one a level (siblings, and tokens
    written while it rested), and the host's decision after each level whether to draft another."""

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    deciding: float = 0.0

    def seconds(self, levels: float, more: float = 0.0, grown: bool = True) -> float:
        """The seconds of one draft. more: rows beyond one a level. grown: the host decides after each level."""
        return self.start + self.level * levels + self.token * more + self.deciding * levels * grown


class DraftCosts:
    """Seconds of a model's drafts, as learnt."""

    def __init__(self, cost: DraftCost, pace: Pace) -> None:
        pairs, self._pace = zip(each := astuple(cost), _UNMEASURED, strict=True), pace
        self.parts = [Part(part) if part else Part(share * sum(each), _GUESSED) for part, share in pairs]

    def now(self, hope: bool = False) -> DraftCost:
        """What it takes now. hope: at the optimistic end."""
        return DraftCost(*[self._pace.seconds(part, hope) for part in self.parts])

    def saw(self, levels: float, more: float, grown: bool, seconds: float) -> None:
        """Learn what a draft took."""
        if not self.parts[0].seconds:  # nothing was measured at start-up: the first value seen
            for part, share in zip(self.parts, _UNMEASURED, strict=True):
                part.seconds = share * seconds
        self._pace.learn(list(zip(self.parts, (1.0, levels, more, levels * grown), strict=True)), seconds)


class CostModel:
    """Seconds of a step by its rows: measured points, interpolated linearly, and a row of them for each size of context
    that was met, which begins as the nearest one. pace: of the machine."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self._rows, self.pace = tuple(rows), Pace()
        self._measured = list(accumulate(seconds, max))  # more rows never take less
        self._parts = {0: list(map(Part, self._measured))}
        self._timed: float | None = None  # the pace of the last step without drafts

    @property
    def points(self) -> list[tuple[int, float]]:
        """The measured points: rows, seconds."""
        return list(zip(self._rows, self._measured, strict=True))

    def begun(self, root_seconds: float) -> None:
        """Set what a whole step of one sequence without drafts took at start-up; 0 if that was not measured. What that
        is beyond a pass of one row, every step takes."""
        beyond = max(0.0, root_seconds - self._measured[0])
        self._measured = [seconds + beyond for seconds in self._measured]
        self._timed = self.pace.log if root_seconds else None
        self._parts = {0: list(map(Part, self._measured))}

    def seconds(self, rows: int) -> float:
        """At start-up, of a step with ``rows`` rows; beyond the last point in proportion to it."""
        return sum([weight * self._measured[point] for point, weight in _weights(self._rows, rows)])

    def now(self, rows: int, context: int = 0) -> float:
        """By what steps have shown since. context: tokens of all sequences."""
        parts = self._at(context)
        return sum([weight * self.pace.seconds(parts[point]) for point, weight in _weights(self._rows, rows)])

    def _at(self, context: int) -> list[Part]:
        """The points at such a context."""
        size = (context // _CONTEXT).bit_length()
        if size not in self._parts:
            near = self._parts[min(self._parts, key=lambda known: abs(known - size))]
            self._parts[size] = [Part(part.seconds, self.pace.unsure(part) + _NOISE) for part in near]
        return self._parts[size]

    def table(self, context: int, most: int, hope: bool = False) -> list[float]:
        """Seconds of a step with 0, 1, .. ``most`` rows, never decreasing. context: tokens of all sequences. hope: at
        the optimistic end."""
        parts, least = self._at(context), math.inf
        points = [self.pace.seconds(part, hope) for part in parts]
        for at in reversed(range(len(points))):
            points[at] = min(points[at], least)  # a larger pass took less: what was delayed is known by that
            least = min(least, self.pace.seconds(parts[at])) if parts[at].seen else least
        points = list(accumulate(points, max))
        return [less * points[low] + more * points[high] for low, less, high, more in _table(self._rows, most)]

    def saw(self, rows: int, sequences: int, context: int, phases: Mapping[str, float]) -> float:
        """Learn from a step without a prompt. context: tokens of all. phases: its seconds, by phase. Returns what it
        would have taken without drafts: a delay would have delayed the plain step too, so that is this step's own time
        in the proportion of the two."""
        own = sum(phases.values()) - phases.get("plan", 0.0) - phases.get("propose", 0.0)
        if rows == sequences:
            plain, self._timed = own, self.pace.log
        else:
            plain = own * self.now(sequences, context) / self.now(rows, context)
        if own > 0.0:
            parts = self._at(context)
            amounts = [(parts[point], weight) for point, weight in _weights(self._rows, rows)]
            if len(amounts) == 2 and amounts[0][0] is parts[0]:
                # Costs may climb in stairs: what a plain step takes is not read off a line from it to larger ones.
                (first, less), (second, more) = amounts
                amounts = [(second, more + less * first.seconds / second.seconds)]
            self.pace.learn(amounts, own)
        return plain

    @property
    def unsure(self) -> bool:
        """Whether the machine's pace has changed since a step without drafts was timed."""
        return self._timed is not None and abs(self.pace.log - self._timed) > _ANOTHER


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
