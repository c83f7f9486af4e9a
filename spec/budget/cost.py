"""Seconds of a step: one curve for the target's pass, for every drafter and for what a step takes without drafts.

All of it is a sum of parts (a number of rows, a token of context, a level of a draft), each measured at start-up on the
running machine (:mod:`foresay.server.engine.calibrate`). A start may have met a busy machine, and machines slow down and
speed up. So every part has a factor of its own and all have one in common, the pace; how much longer a step took than
expected moves them, the less sure ones more. What was not seen for long grows less sure, and where a cost is unsure it
is hoped to be low: so what only looks dear is tried, and known a step later.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: When the curve is read again: after so many steps, at first after each, and where the context moved by so many tokens.
_REREAD, _AT_FIRST, _MOVED_TOKENS = 16, 64, 128
#: Variances of logs: of a part that was measured once (two deviations are a factor of three), of the pace, and of what
#: steps differ by that are alike; what a step adds to that of the pace, and to that of a part until it is seen again.
_UNSURE, _PACE, _NOISE, _PACE_DRIFT, _DRIFT = 0.3, 0.1, 0.01, 0.002, 6e-5
#: A step counts as no farther off than so many deviations: something else may have held it up.
_MOST_OFF = 2.0
#: Costs are hoped to be lower by so many deviations, as far as they are less sure than this.
_HOPE, _SURE = 2.0, 0.1
#: Of steps shorter than so many seconds only every so many-th is learnt from: learning takes time too.
_SHORT, _EVERY = 0.001, 8
#: A pace so many times that of the last plain step is another one; a plain step is recent for so many seconds.
_ANOTHER, _RECENT = 1.5, 3600.0
#: The phases of a step that do not depend on who drafts.
_OF_THE_TARGET = ("forward", "draw", "commit")

FEW = "no step without drafts was timed"
OLD = "no step without drafts was timed lately"
CHANGED = "the pace of this machine has changed since steps without drafts were timed"

#: Parts of a sum by their index, each with how much of it there is.
Amounts = Sequence[tuple[int, float]]


@dataclass(slots=True)
class Pace:
    """How much longer everything takes by now than at start-up. log, variance: of that; steps: seen so far."""

    log: float = 0.0
    variance: float = _PACE
    steps: int = 0


class Parts:
    """Seconds that parts took when they were measured, and what steps showed of them since. now: the pace left out."""

    def __init__(self, measured: Sequence[float], pace: Pace) -> None:
        self.measured, self.pace, self.now = list(measured), pace, list(measured)
        self._variances, self._seen = [_UNSURE] * len(self.now), [0] * len(self.now)

    def variance(self, part: int) -> float:
        """How unsure a part is by now."""
        return min(_UNSURE, self._variances[part] + _DRIFT * (self.pace.steps - self._seen[part]))

    def hoped(self, part: int) -> float:
        """What a part may take at best."""
        return self.now[part] * math.exp(-_HOPE * max(0.0, math.sqrt(self.variance(part)) - _SURE))

    def seconds(self, amounts: Amounts, hope: bool = False) -> float:
        """What they are expected to take; hope: at best."""
        each = self.hoped if hope else self.now.__getitem__
        return math.exp(self.pace.log) * sum([amount * each(part) for part, amount in amounts])

    def saw(self, amounts: Amounts, seconds: float) -> None:
        """They took so many seconds: a Kalman filter of the log, in which each part counts by its share."""
        pace, expected = self.pace, self.seconds(amounts)
        if seconds <= 0.0:
            return
        if expected <= 0.0:  # what was never measured is what it takes at first
            part, amount = amounts[0]
            self.now[part] = self.measured[part] = seconds / amount / math.exp(pace.log)
            return
        scale = math.exp(pace.log) / expected
        moved = [(part, amount * self.now[part] * scale, self.variance(part)) for part, amount in amounts]
        pace.variance = min(pace.variance + _PACE_DRIFT, _PACE)
        whole = _NOISE + pace.variance + sum([share * share * variance for _, share, variance in moved])
        most = _MOST_OFF * math.sqrt(whole)
        off = min(max(math.log(seconds / expected), -most), most) / whole
        pace.log += pace.variance * off
        pace.variance -= pace.variance**2 / whole
        for part, share, variance in moved:
            self.now[part] *= math.exp(share * variance * off)
            self._variances[part], self._seen[part] = variance - (share * variance) ** 2 / whole, pace.steps


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of one draft as measured: for being asked, for each level, for each row of the draft's passes beside one a
    level (siblings, and tokens that were written while it rested), and for deciding after a level whether there is to
    be another one."""

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    deciding: float = 0.0

    def seconds(self, levels: float, more: float = 0.0, grown: bool = True) -> float:
        """Of one draft. more: rows beside one a level. grown: the host decides after each level."""
        return self.start + (self.level + grown * self.deciding) * levels + self.token * more

    def parts(self, pace: Pace) -> Parts:
        """To be learnt from now on; see :func:`of_draft`."""
        return Parts((self.start, self.level, self.token, self.deciding), pace)


def of_draft(levels: float, more: float = 0.0, grown: bool = True) -> Amounts:
    """The parts of a draft. grown: the host decides after each level."""
    return (0, 1.0), (1, levels), (2, more), (3, levels * grown)


class CostModel:
    """Seconds of a step by its rows: measured points, straight lines between them.

    context: seconds that each token of context adds to a pass, by the rows of its sequence.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        context: Sequence[tuple[int, float]] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self.pace, self._rows, self._clock = Pace(), list(rows), clock
        # The last part is the context: of a second that it was measured to take.
        self.parts = Parts([*_rising(seconds), 1.0], self.pace)
        self._context_rows, self._per_token = [rows for rows, _ in context], _rising([each for _, each in context])
        self._table: list[float] = []
        self._read_for, self._asked = (0, 0, 0), 0
        self._beside, self._plain = 0.0, (0.0, -math.inf)

    @property
    def points(self) -> list[tuple[int, float]]:
        """The measured points, those that fall pooled: rows, seconds."""
        return list(zip(self._rows, self.parts.measured[:-1], strict=True))

    @property
    def context(self) -> list[tuple[int, float]]:
        """What a token of context was measured to add: rows, seconds."""
        return list(zip(self._context_rows, self._per_token, strict=True))

    def begun(self, root_seconds: float) -> None:
        """At start-up a whole step of one sequence without drafts took so long; 0 if nobody measured."""
        if root_seconds > 0:
            self._beside, self._plain = max(0.0, root_seconds - self.parts.now[0]), (self.pace.log, self._clock())

    def seconds(self, rows: float) -> float:
        """Of a pass over ``rows`` rows of short texts; beyond the last point in proportion to it."""
        return self.parts.seconds(_near(self._rows, rows))

    def expected(self, most: int, hope: bool = False) -> list[float]:
        """Seconds of a step with 0, 1, .. ``most`` rows, that of more rows never less. hope: at best."""
        points = [self.parts.hoped(part) for part in range(len(self._rows))] if hope else self.parts.now[:-1]
        line = _line(self._rows, list(accumulate(points, max)), np.arange(most + 1))
        expected: list[float] = (math.exp(self.pace.log) * line).tolist()
        return expected

    def table(self, sequences: int, context: int, most: int, hope: bool = False) -> list[float]:
        """The same for so many sequences with so many tokens of context together; read off now and then."""
        self._asked += 1
        read_for = sequences, most, context // _MOVED_TOKENS
        if read_for != self._read_for or self.pace.steps < _AT_FIRST or self._asked % _REREAD == 0:
            seconds = np.array(self.expected(most, hope))
            if self._per_token:
                added = _line(self._context_rows, self._per_token, np.arange(most + 1) / sequences)
                seconds += self.parts.seconds([(len(self._rows), context)]) * added
            self._read_for, self._table = read_for, np.maximum.accumulate(seconds).tolist()
        return self._table

    def behind(self, rows: float, context: float) -> float:
        """What so many tokens of context add to a step. rows: of one sequence."""
        return self.parts.seconds([self._context(rows, context)])

    def _context(self, rows: float, context: float) -> tuple[int, float]:
        near = _near(self._context_rows, rows) if self._per_token else ()
        return len(self._rows), context * sum([share * self._per_token[point] for point, share in near])

    def _step(self, rows: int, sequences: int, context: float) -> Amounts:
        return *_near(self._rows, rows), self._context(rows / sequences, context)

    def saw(self, rows: int, sequences: int, context: int, drafted: int, phases: Mapping[str, float]) -> float:
        """Learn from a step without a prompt; returns what it would have taken without drafts, 0 if nobody knows.

        What held it up would have held up the other one too, so that is this step's own time, in the proportion of the
        two on the curve. context: tokens of all. phases: its seconds.
        """
        own, told = sum([phases.get(phase, 0.0) for phase in _OF_THE_TARGET]), 0.0
        self.pace.steps += 1
        if not drafted:
            self._plain = self.pace.log, self._clock()
            told = sum(phases.values()) - phases.get("propose", 0.0)  # looking in vain is not plain decoding's time
        elif self._plain[1] > -math.inf:
            plain = self.parts.seconds(self._step(sequences, sequences, context))
            plain += self._beside * math.exp(self.pace.log)
            told = own * plain / self.parts.seconds(self._step(rows, sequences, context))
        if own > _SHORT or self.pace.steps % _EVERY == 0 or self.pace.steps < _AT_FIRST:
            self.parts.saw(self._step(rows, sequences, context), own)
        return told

    @property
    def doubt(self) -> str:
        """Why what a step would take without drafts may be wrong; "" if there is no reason to think so."""
        pace, at = self._plain
        if self._clock() - at > _RECENT:
            return OLD if at > -math.inf else FEW
        return CHANGED if abs(self.pace.log - pace) > math.log(_ANOTHER) else ""


def _rising(seconds: Sequence[float]) -> list[float]:
    """More rows never cost less: points that fall are noise of the measurement, and are taken to be their mean."""
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, many), (before, few) = pools.pop(), pools.pop()
            pools.append(((last * many + before * few) / (many + few), many + few))
    return [value for value, count in pools for _ in range(count)]


def _line(rows: Sequence[int], seconds: Sequence[float], wanted: NDArray[Any]) -> NDArray[np.float64]:
    """Straight lines between the points, as :func:`_near` has them, at many places."""
    line: NDArray[np.float64] = np.interp(wanted, rows, seconds) * np.maximum(1.0, wanted / rows[-1])
    return line


def _near(rows: Sequence[int], wanted: float) -> list[tuple[int, float]]:
    """The points around ``wanted``, and how much of each there is: beyond the last in proportion to it."""
    high = min(max(bisect.bisect_left(rows, wanted), 1), len(rows) - 1)
    low = max(0, high - 1)
    share = min(max((wanted - rows[low]) / max(1, rows[high] - rows[low]), 0.0), 1.0)
    beyond = max(1.0, wanted / rows[-1])
    return [(low, (1.0 - share) * beyond), (high, share * beyond)]
