"""Seconds of a step: one curve for the target's pass, for every drafter and for what a step takes without drafts.

All of it is a sum of parts (a number of rows, a token of context, a level of a draft), each measured at start-up
(:mod:`foresay.server.engine.calibrate`). A start may have met a busy machine, and machines slow down and speed up. So
how much longer a step took than expected moves its parts, the less sure ones more, and all others a little: they go at
one pace. What was not seen for long grows less sure, and where a sum is unsure it is hoped to be low: so what only
looks dear is tried, and known a step later.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from time import monotonic
from typing import NamedTuple

import numpy as np

from foresay.spec.budget.experts import Experts, Floats

#: When the curve is read again: after so many steps, and where the context moved by so many tokens.
_REREAD, _MOVED_TOKENS = 16, 128
#: Variances of logs: of a part that was measured once (two deviations are a factor of three), of the pace of all of
#: them, and of what steps differ by that are alike; what a step adds to that of the pace, and of a part not seen again.
_UNSURE, _PACE, _NOISE, _PACE_DRIFT, _DRIFT = 0.3, 0.6, 0.02, 0.002, 2e-5
_MOST_UNSURE = _UNSURE + _PACE
#: What took longer by more than so many deviations counts as less sure: something else may have held the step up.
_MOST_OFF = 2.0
#: Costs are hoped to be lower by so many deviations, as far as they are less sure than this.
_HOPE, _SURE = 2.0, 0.1
#: Learning takes a tenth of a millisecond: after the first so many times it is done once in so many seconds of steps,
#: of each size of these.
_AT_FIRST, _LEARNING = 64, 0.05
#: A pace so many times that of the last plain step is another one; a plain step is recent for so many seconds.
_ANOTHER, _RECENT = 1.5, 3600.0
#: The least share of a step that is not its experts'.
_LEAST_ROWS = 0.05
#: Levels of the deepest draft that a shape may have, none and one more.
_LEVELS = 65
#: The phases of a step that do not depend on who drafts.
_OF_THE_TARGET = ("forward", "draw", "commit")

FEW = "no step without drafts was timed"
OLD = "no step without drafts was timed lately"
CHANGED = "the pace of this machine has changed since steps without drafts were timed"


class Parts:
    """The seconds of all parts as they were measured, and what steps showed of them since. steps: seen so far; moves:
    how often that changed anything."""

    def __init__(self) -> None:
        self.measured, self.now = np.zeros(0), np.zeros(0)
        self.covariance, self.steps, self.moves, self._drifted = np.zeros((0, 0)), 0, 0, 0

    def group(self, measured: Sequence[float]) -> Group:
        """Some more, which are asked for together."""
        at = slice(len(self.now), len(self.now) + len(measured))
        self.measured, self.now = (np.append(each, measured) for each in (self.measured, self.now))
        covariance = _PACE + _UNSURE * np.eye(at.stop)
        covariance[: at.start, : at.start] = self.covariance
        self.covariance = covariance
        return Group(self, at)

    def drift(self) -> None:
        """What was not seen since is less sure, and all of it together."""
        since, self._drifted = self.steps - self._drifted, self.steps
        if since:
            self.covariance += min(_PACE_DRIFT * since, _PACE)
            variances = np.einsum("ii->i", self.covariance)
            variances += _DRIFT * since
            # Whole rows and columns: with the diagonal alone made smaller, some sum would have a variance below zero.
            scale = np.sqrt(np.minimum(1.0, _MOST_UNSURE / variances))
            self.covariance *= np.outer(scale, scale)


class Group:
    """Parts that are asked for together. Sums are told by how much of each part is in them: [parts], or [sums, parts].
    learnt: how often from one. told: what was last read of drafts."""

    def __init__(self, parts: Parts, at: slice) -> None:
        self.parts, self.at, self.learnt, self._spent = parts, at, 0, 0.0
        self._last: dict[int, float] = {}
        self.told: tuple[list[float], list[float]] | None = None

    @property
    def now(self) -> Floats:
        """Seconds of each."""
        return self.parts.now[self.at]

    @property
    def variances(self) -> Floats:
        """Of the log of each."""
        return np.diagonal(self.parts.covariance)[self.at]

    def seconds(self, amounts: Floats, hope: bool = False, now: Floats | None = None) -> Floats:
        """What each sum is expected to take; hope: at best. now: another belief of what each part takes."""
        each = amounts * (self.now if now is None else now)
        sums: Floats = each.sum(-1)
        if hope:
            self.parts.drift()
            shares = each / np.maximum(sums, 1e-12)[..., None]
            spread = ((shares @ self.parts.covariance[self.at, self.at]) * shares).sum(-1)
            sums = sums * np.exp(-_HOPE * np.maximum(0.0, np.sqrt(np.maximum(spread, 0.0)) - _SURE))
        return sums

    def due(self, seconds: float, size: int) -> bool:
        """Whether to learn from what took so many. size: of what is alike; what is seldom seen is learnt from when it
        is."""
        self._spent += seconds
        since = self._spent - self._last.get(size, -math.inf)
        if not seconds or (self.learnt >= _AT_FIRST and since < _LEARNING * (1 - 1e-9)):
            return False
        self._last[size] = self._spent
        return True

    def saw(self, amounts: Floats, seconds: float, first: bool = True) -> None:
        """A sum took so many seconds: a Kalman filter of logs, in which each part counts by its share. first: whether
        it tells of the first part too; else the second counts for both."""
        parts, expected = self.parts, float(amounts @ self.now)
        self.learnt, parts.moves = self.learnt + 1, parts.moves + 1
        if expected <= 0.0:  # what was never measured is what it takes at first
            parts.now[self.at.start] = parts.measured[self.at.start] = seconds
            return
        parts.drift()
        shares = amounts * self.now / expected
        if not first:
            shares[0], shares[1] = 0.0, shares[0] + shares[1]
        gains = parts.covariance[:, self.at] @ shares
        whole = _NOISE + float(gains[self.at] @ shares)
        off = math.log(seconds / expected)
        whole *= max(1.0, off / (_MOST_OFF * math.sqrt(whole)))
        parts.now *= np.exp(gains * off / whole)
        parts.covariance -= np.outer(gains, gains / whole)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of one draft as measured: for being asked, for each level, for each row of its passes beside one a level
    (siblings, and tokens that were written while it rested), and for deciding after a level whether another one comes.
    """

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    deciding: float = 0.0

    def seconds(self, levels: float, more: float = 0.0, grown: bool = True) -> float:
        """Of one draft. more: rows beside one a level. grown: the host decides after each level."""
        return float(of_draft(levels, more, grown) @ astuple(self))


def of_draft(levels: float, more: float = 0.0, grown: bool = True) -> Floats:
    """The parts of a draft."""
    return np.array((1.0, levels, more, levels * grown))


_DRAFTS = np.array([[of_draft(levels, grown=grown) for levels in range(_LEVELS)] for grown in (False, True)])


class DraftSeconds(NamedTuple):
    """What a model's drafts take in a step. first: before any level. levels: of chains and of trees that grow, by their
    levels; row: of each row beside one a level."""

    first: float
    levels: tuple[list[float], list[float]]
    row: float

    @classmethod
    def of(cls, group: Group, unread: float, hope: bool) -> DraftSeconds:
        """unread: tokens to catch up with."""
        row = float(group.now[2])
        if group.told is None or group.parts.steps % _REREAD == 0 or group.learnt < _AT_FIRST:
            chains, trees = group.seconds(_DRAFTS, hope).tolist()
            group.told = chains, trees
        return cls(row * unread, group.told, row)

    def seconds(self, levels: float, nodes: float, grown: bool) -> float:
        """Of one draft."""
        return self.first + self.levels[grown][math.ceil(levels)] + self.row * max(0.0, nodes - levels)

    def next(self, levels: int) -> float:
        """Of one more level of a tree that grows."""
        return max(0.0, self.levels[True][levels + 1] - self.levels[True][levels])


class CostModel:
    """Seconds of a step by its rows: measured points, straight lines between them.

    context: seconds that each token of context adds to a pass, by the rows of its sequence. experts: of a mixture, what
    those woken take, which the curve has in it as it is given, for rows of one text.
    siblings: by the rows of the table read last, what one more takes if it stands beside another, not below.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        context: Sequence[tuple[int, float]] = (),
        clock: Callable[[], float] = monotonic,
        experts: Experts | None = None,
    ) -> None:
        assert rows and len(rows) == len(seconds) and sorted(rows) == list(rows)
        self.context, self._rows, self._clock, self.parts = list(context), tuple(rows), clock, Parts()
        self.experts = experts
        self.siblings: list[float] = []
        if experts is not None:
            woken = experts.seconds * experts.chain(rows[-1], 1)[list(rows)]
            seconds = np.maximum(np.asarray(seconds) - woken, _LEAST_ROWS * np.asarray(seconds)).tolist()
        # The last parts are the context and the experts: of a second that they were measured to take. More rows never
        # take less.
        self.group = self.parts.group([*np.maximum.accumulate(seconds), 1.0, 1.0])
        points, added = zip(*(context or [(1, 0.0)]), strict=True)
        self._per_token = np.array(points), np.maximum.accumulate(added)
        self._table: list[float] = []
        self._shares: dict[tuple[int, int, int, int], float] = {}
        self._read_for, self._asked = (0, 0, 0), 0
        self._beside, self._plain, self._paced = 0.0, (0.0, -math.inf), (0, 0.0)

    @property
    def points(self) -> list[tuple[int, float]]:
        """The measured points: rows, seconds."""
        return [(rows, self.seconds(rows)) for rows in self._rows]

    def begun(self, root_seconds: float) -> None:
        """At start-up a whole step of one sequence without drafts took so long; 0 if nobody measured."""
        if root_seconds > 0:
            self._beside = max(0.0, root_seconds - float(self.parts.now[0]))
            self._plain = self._pace, self._clock()

    def drafts(self, cost: DraftCost) -> Group:
        """The parts of a drafter, which goes at the pace of all."""
        return self.parts.group(astuple(cost))

    @property
    def _pace(self) -> float:
        """How much longer everything takes than at start-up, as a log."""
        if self._paced[0] != self.parts.moves:
            rows = slice(len(self._rows))
            self._paced = self.parts.moves, float(np.log(self.parts.now[rows] / self.parts.measured[rows]).mean())
        return self._paced[1]

    def seconds(self, rows: int) -> float:
        """At start-up, of a pass over ``rows`` rows of short texts; beyond the last point in proportion to it."""
        return float(self._amounts(rows) @ self.parts.measured[self.group.at])

    def table(self, sequences: int, context: int, most: int, hope: bool = False) -> list[float]:
        """Seconds of a step with 0, 1, .. ``most`` rows of so many sequences with so many tokens of context together,
        that of more rows never less; read off now and then. hope: at best."""
        self._asked += 1
        read_for = sequences, most, context // _MOVED_TOKENS
        if read_for != self._read_for or self.group.learnt < _AT_FIRST or self._asked % _REREAD == 0:
            added = self._added(np.arange(most + 1) / sequences, context)
            woken = np.zeros(most + 1) if self.experts is None else self.experts.chain(most, sequences)
            amounts = np.column_stack((_weights(self._rows, most), added, woken * self._of_one))
            self._read_for = read_for
            now, variances = self.group.now[:-2], self.group.variances[:-2]
            ordered = np.append(in_order(now, 1.0 / variances), self.group.now[-2:])
            self._table = np.maximum.accumulate(self.group.seconds(amounts, hope, ordered)).tolist()
            if self.experts is not None:
                self.siblings = (self.experts.beside(woken) * self._of_one * ordered[-1]).tolist()
        return self._table

    def behind(self, rows: float, context: float) -> float:
        """What so many tokens of context add to a step. rows: of one sequence."""
        return float(self._added(np.array([rows]), context)[0] * self.group.now[-2])

    @property
    def _of_one(self) -> float:
        return 0.0 if self.experts is None else self.experts.seconds

    def _amounts(self, rows: int, sequences: int = 1, context: int = 0, woken: float = 0.0) -> Floats:
        """woken: experts; 0: as many as rows of one text wake."""
        added = self._added(np.array([rows / sequences]), context)
        if self.experts is not None:
            woken = woken or float(self.experts.chain(rows, sequences)[-1])
        return np.concatenate((_weights(self._rows, 1 << rows.bit_length())[rows], added, [woken * self._of_one]))

    def _added(self, rows: Floats, context: float) -> Floats:
        """Seconds that the context was measured to add."""
        points, seconds = self._per_token
        added: Floats = context * np.interp(rows, points, seconds) * np.maximum(1.0, rows / points[-1])
        return added

    def saw(
        self,
        rows: int,
        sequences: int,
        context: int,
        drafted: int,
        phases: Mapping[str, float],
        woken: float = 0.0,
        kinds: Floats | None = None,
    ) -> float:
        """Learn from a step without a prompt; returns what it would have taken without drafts, 0 if nobody knows.

        What held it up would have held up the other one too, so that is this step's own time, in the proportion of the
        two on the curve. context: tokens of all. phases: its seconds. woken: experts; kinds: of its rows
        (:func:`~foresay.spec.budget.experts.kinds`).
        """
        own, told = sum([phases.get(phase, 0.0) for phase in _OF_THE_TARGET]), 0.0
        self.parts.steps += 1
        if not drafted:
            self._plain = self._pace, self._clock()
            told = sum(phases.values()) - phases.get("propose", 0.0)  # looking in vain is not plain decoding's time
        elif self._plain[1] > -math.inf:
            told = own * self._share(rows, sequences, context, woken)
        if self.experts is not None and kinds is not None:
            self.experts.saw(kinds, woken)
        if self.group.due(own, bisect(self._rows, rows)):
            # Costs may climb in stairs: what a plain step takes is not read off a line from it to larger ones.
            first = rows <= self._rows[0] or len(self._rows) == 1 or rows >= self._rows[1]
            self.group.saw(self._amounts(rows, sequences, context, woken), own, first)
            self._shares.clear()
        return told

    def _share(self, rows: int, sequences: int, context: int, woken: float) -> float:
        """What a step without drafts takes, over one of so many rows that woke so many experts."""
        key = rows, sequences, context // _MOVED_TOKENS, round(woken)
        if key not in self._shares:
            each = (sequences, sequences, context), (rows, sequences, context, woken)
            pair = np.stack([self._amounts(*one) for one in each])
            plain, here = self.group.seconds(pair).tolist()
            self._shares[key] = (plain + self._beside * math.exp(self._pace)) / here
        return self._shares[key]

    @property
    def doubt(self) -> str:
        """Why what a step would take without drafts may be wrong; "" if there is no reason to think so."""
        pace, at = self._plain
        if self._clock() - at > _RECENT:
            return OLD if at > -math.inf else FEW
        return CHANGED if abs(self._pace - pace) > math.log(_ANOTHER) else ""


def in_order(values: Floats, weights: Floats) -> Floats:
    """None less than the one before, each as near to what it was as its weight says: of those in the wrong order the
    mean (of logs), so that one that is too large does not make all behind it dear (pooling of adjacent violators,
    Ayer et al. 1955)."""
    if (values[1:] >= values[:-1]).all():
        return values
    pools: list[tuple[float, float, int]] = []
    for log, weight in zip(np.log(values).tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] > log:
            other, more, others = pools.pop()
            log, weight, count = (log * weight + other * more) / (weight + more), weight + more, count + others
        pools.append((log, weight, count))
    ordered: Floats = np.exp(np.repeat([log for log, _, _ in pools], [count for _, _, count in pools]))
    return ordered


@lru_cache(maxsize=16)
def _weights(rows: tuple[int, ...], most: int) -> Floats:
    """[most + 1, points]: how much of each point is in a step of 0, 1, .. ``most`` rows."""
    wanted = np.arange(most + 1)
    between = np.column_stack([np.interp(wanted, rows, each) for each in np.eye(len(rows))])
    return between * np.maximum(1.0, wanted / rows[-1])[:, None]
