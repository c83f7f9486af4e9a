"""Seconds of a step: one curve for the target's pass, for every drafter and for what a step takes without drafts.

Each is a sum of parts (a number of rows, a token of context, a level of a draft), measured at start-up
(:mod:`foresay.server.engine.calibrate`). The machine may have been busy then, and machines slow down and speed up. So
if a step took longer than expected, its parts move, the less certain ones more, and all others a little: they share one
pace. Parts not seen for long grow less certain, and an uncertain sum is taken at its optimistic end: so what only looks
expensive is tried, and known a step later.
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

#: When the curve is computed again: after so many steps, and where the context changed by so many tokens.
_REREAD, _MOVED_TOKENS = 16, 128
#: Variances of logs: of a part that was measured once (two deviations are a factor of three), of the common pace, and
#: between equal steps; what a step adds to that of the pace, and to that of a part not seen again.
_UNSURE, _PACE, _NOISE, _PACE_DRIFT, _DRIFT = 0.3, 0.6, 0.02, 0.002, 2e-5
_MOST_UNSURE = _UNSURE + _PACE
#: A step that took longer by more than so many deviations counts less: something else may have delayed it.
_MOST_OFF = 2.0
#: Costs are lowered by so many deviations, as far as these exceed the second value.
_HOPE, _SURE = 2.0, 0.1
#: Learning takes a tenth of a millisecond: after so many times it happens once in so many seconds of steps, for each
#: size.
_AT_FIRST, _LEARNING = 64, 0.05
#: The pace has changed if it differs by this factor from the last plain step's; the seconds that one stays recent.
_ANOTHER, _RECENT = 1.5, 3600.0
#: The least share of a step that does not depend on experts.
_LEAST_ROWS = 0.05
#: What each part of a draft is taken to be where it was measured as 0, as a share of the others: a difference of two
#: measurements may be 0, but no cost is, and what is 0 is never corrected.
_UNMEASURED = np.array((0.01, 0.1, 0.01, 0.01))
#: Likewise what a token of context adds, as a share of a pass of one row.
_LEAST_ADDED = 1e-6
#: The levels of the deepest draft that a shape may have, plus one; and none.
_LEVELS = 65
#: The phases of a step that do not depend on the drafter.
_OF_THE_TARGET = ("forward", "draw", "commit")

FEW = "no step without drafts was timed"
OLD = "no step without drafts was timed lately"
CHANGED = "the pace of this machine has changed since steps without drafts were timed"


class PartCosts:
    """The seconds of all parts as measured, and as learnt from steps since. steps: seen so far; moves: how often that
    changed anything."""

    def __init__(self) -> None:
        self.measured, self.now = np.zeros(0), np.zeros(0)
        self.covariance, self.steps, self.moves, self._drifted = np.zeros((0, 0)), 0, 0, 0

    def group(self, measured: Sequence[float]) -> CostGroup:
        """Add parts that are used together."""
        at = slice(len(self.now), len(self.now) + len(measured))
        self.measured, self.now = (np.append(each, measured) for each in (self.measured, self.now))
        covariance = _PACE + _UNSURE * np.eye(at.stop)
        covariance[: at.start, : at.start] = self.covariance
        self.covariance = covariance
        return CostGroup(self, at)

    def drift(self) -> None:
        """Increase the variance of each part, and of the common pace, for the steps since the last call."""
        since, self._drifted = self.steps - self._drifted, self.steps
        if since:
            self.covariance += min(_PACE_DRIFT * since, _PACE)
            variances = np.einsum("ii->i", self.covariance)
            variances += _DRIFT * since
            # Whole rows and columns: with the diagonal alone made smaller, some sum would have a variance below zero.
            scale = np.sqrt(np.minimum(1.0, _MOST_UNSURE / variances))
            self.covariance *= np.outer(scale, scale)


class CostGroup:
    """Parts that are used together. A sum is given by how much of each part it has: [parts], or [sums, parts]. learnt:
    how many sums it learnt from. drafts: the seconds of drafts computed last, and after which steps."""

    def __init__(self, parts: PartCosts, at: slice) -> None:
        self.parts, self.at, self.learnt, self._spent = parts, at, 0, 0.0
        self._last: dict[int, float] = {}
        self.drafts: tuple[tuple[list[float], list[float]], tuple[int, int]] | None = None

    @property
    def now(self) -> Floats:
        """Seconds of each part."""
        return self.parts.now[self.at]

    @property
    def variances(self) -> Floats:
        """The variance of the log of each part."""
        return np.diagonal(self.parts.covariance)[self.at]

    def seconds(self, amounts: Floats, hope: bool = False, now: Floats | None = None) -> Floats:
        """The expected seconds of each sum; hope: at the optimistic end. now: other seconds of each part."""
        each = amounts * (self.now if now is None else now)
        sums: Floats = each.sum(-1)
        if hope:
            self.parts.drift()
            shares = each / np.maximum(sums, 1e-12)[..., None]
            spread = ((shares @ self.parts.covariance[self.at, self.at]) * shares).sum(-1)
            sums = sums * np.exp(-_HOPE * np.maximum(0.0, np.sqrt(np.maximum(spread, 0.0)) - _SURE))
        return sums

    def due(self, seconds: float, size: int) -> bool:
        """Whether to learn from a sum that took this long. size: groups similar sums; a rare size is learnt from
        whenever it occurs. The time before this sum decides: otherwise delayed steps would be chosen most often."""
        begun, self._spent = self._spent, self._spent + seconds
        since = begun - self._last.get(size, -math.inf)
        if not seconds or (self.learnt >= _AT_FIRST and since < _LEARNING * (1 - 1e-9)):
            return False
        self._last[size] = begun
        return True

    def saw(self, amounts: Floats, seconds: float, first: bool = True) -> None:
        """Learn from a sum's seconds: a Kalman filter of logs, in which each part counts by its share. first: whether
        it shows the first part too; otherwise the second counts for both."""
        parts, expected = self.parts, float(amounts @ self.now)
        self.learnt, parts.moves = self.learnt + 1, parts.moves + 1
        if expected <= 0.0:  # a draft without a measurement: the first value seen
            parts.now[self.at] = parts.measured[self.at] = _UNMEASURED * seconds / float(amounts @ _UNMEASURED)
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
    """Measured seconds of one draft: the call, each level, each row of its passes beyond one a level (siblings, and
    tokens written while it rested), and the host's decision after each level whether to draft another.
    """

    start: float = 0.0
    level: float = 0.0
    token: float = 0.0
    deciding: float = 0.0

    def seconds(self, levels: float, more: float = 0.0, grown: bool = True) -> float:
        """The seconds of one draft. more: rows beyond one a level. grown: the host decides after each level."""
        return float(of_draft(levels, more, grown) @ astuple(self))


def of_draft(levels: float, more: float = 0.0, grown: bool = True) -> Floats:
    """How much of each part a draft has."""
    return np.array((1.0, levels, more, levels * grown))


_DRAFTS = np.array([[of_draft(levels, grown=grown) for levels in range(_LEVELS)] for grown in (False, True)])


class DraftSeconds(NamedTuple):
    """What a model's drafts take in a step. first: before any level. levels: of chains and of trees that grow, by their
    levels; row: each row beyond one a level."""

    first: float
    levels: tuple[list[float], list[float]]
    row: float

    @classmethod
    def of(cls, group: CostGroup, unread: float, hope: bool) -> DraftSeconds:
        """unread: tokens to catch up with."""
        row = float(group.now[2])
        known = group.parts.steps // _REREAD, min(group.learnt, _AT_FIRST)
        if group.drafts is None or group.drafts[1] != known:
            chains, trees = group.seconds(_DRAFTS, hope).tolist()
            group.drafts = (chains, trees), known
        return cls(row * unread, group.drafts[0], row)

    def seconds(self, levels: float, nodes: float, grown: bool) -> float:
        """The seconds of one draft."""
        return self.first + self.levels[grown][math.ceil(levels)] + self.row * max(0.0, nodes - levels)

    def next(self, levels: int) -> float:
        """The seconds of one more level of a tree that grows."""
        return max(0.0, self.levels[True][levels + 1] - self.levels[True][levels])


class CostModel:
    """Seconds of a step by its rows: measured points, interpolated linearly.

    context: seconds that each token of context adds to a pass, by the rows of its sequence. experts: of a mixture; the
    given curve includes the time of the experts that rows of one text activate. siblings: by the rows of the last
    table, what one more row takes as a sibling rather than below another node.
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
        self.context, self._rows, self._clock, self.parts = list(context), tuple(rows), clock, PartCosts()
        self.experts = experts
        self.siblings: list[float] = []
        if experts is not None:
            woken = experts.seconds * experts.chain(rows[-1], 1)[list(rows)]
            seconds = np.maximum(np.asarray(seconds) - woken, _LEAST_ROWS * np.asarray(seconds)).tolist()
        # The last parts are the context and the experts, per second measured for them. More rows never take less.
        self.group = self.parts.group([*np.maximum.accumulate(seconds), 1.0, 1.0])
        points, added = zip(*(context or [(1, 0.0)]), strict=True)
        least = _LEAST_ADDED * seconds[0] if context else 0.0
        self._per_token = np.array(points), np.maximum.accumulate([least, *added])[1:]
        self._table: list[float] = []
        self._shares: dict[tuple[int, int, int, int], float] = {}
        self._read_for, self._calls = (0, 0, 0), 0
        self._overhead, self._plain, self._paced = 0.0, (0.0, -math.inf), (0, 0.0)

    @property
    def points(self) -> list[tuple[int, float]]:
        """The measured points: rows, seconds."""
        return [(rows, self.seconds(rows)) for rows in self._rows]

    def begun(self, root_seconds: float) -> None:
        """Set what a whole step of one sequence without drafts took at start-up; 0 if that was not measured."""
        if root_seconds > 0:
            self._overhead = max(0.0, root_seconds - float(self.parts.now[0]))
            self._plain = self._pace, self._clock()

    def drafts(self, cost: DraftCost) -> CostGroup:
        """Add the parts of a drafter, which share the common pace."""
        measured = np.array(astuple(cost))
        return self.parts.group(np.where(measured > 0.0, measured, _UNMEASURED * measured.sum()).tolist())

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
        """Seconds of a step with 0, 1, .. ``most`` rows for so many sequences with so many tokens of context together,
        never decreasing; computed from time to time. hope: at the optimistic end."""
        self._calls += 1
        read_for = sequences, most, context // _MOVED_TOKENS
        if read_for != self._read_for or self.group.learnt < _AT_FIRST or self._calls % _REREAD == 0:
            added = self._added(np.arange(most + 1) / sequences, context)
            woken = np.zeros(most + 1) if self.experts is None else self.experts.chain(most, sequences)
            amounts = np.column_stack((_weights(self._rows, most), added, woken * self._of_one))
            self._read_for = read_for
            now, variances = self.group.now[:-2], self.group.variances[:-2]
            ordered = np.append(in_order(now, 1.0 / variances), self.group.now[-2:])
            self._table = np.maximum.accumulate(self.group.seconds(amounts, hope, ordered)).tolist()
            if self.experts is not None:
                self.siblings = (self.experts.siblings(woken) * self._of_one * ordered[-1]).tolist()
        return self._table

    @property
    def _of_one(self) -> float:
        return 0.0 if self.experts is None else self.experts.seconds

    def _amounts(self, rows: int, sequences: int = 1, context: int = 0, woken: float = 0.0) -> Floats:
        """woken: experts; 0: as many as rows of one text activate."""
        added = self._added(np.array([rows / sequences]), context)
        if self.experts is not None:
            woken = woken or float(self.experts.chain(rows, sequences)[-1])
        return np.concatenate((_weights(self._rows, 1 << rows.bit_length())[rows], added, [woken * self._of_one]))

    def _added(self, rows: Floats, context: float) -> Floats:
        """Seconds that the context adds, as measured."""
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
        """Learn from a step without a prompt; returns what it would have taken without drafts, 0 if unknown.

        A delay would have delayed the plain step too, so that is this step's own time in the proportion of the two on
        the curve. context: tokens of all. phases: its seconds. woken: experts; kinds: of its rows
        (:func:`~foresay.spec.budget.experts.kinds`).
        """
        own, plain = sum([phases.get(phase, 0.0) for phase in _OF_THE_TARGET]), 0.0
        self.parts.steps += 1
        if not drafted:
            self._plain = self._pace, self._clock()
            plain = sum(phases.values()) - phases.get("propose", 0.0)  # a vain lookup is not plain decoding's time
        elif self._plain[1] > -math.inf:
            plain = own * self._share(rows, sequences, context, woken)
        if self.experts is not None and kinds is not None:
            self.experts.saw(kinds, woken)
        if self.group.due(own, bisect(self._rows, rows)):
            # Costs may climb in stairs: what a plain step takes is not read off a line from it to larger ones.
            first = rows <= self._rows[0] or len(self._rows) == 1 or rows >= self._rows[1]
            self.group.saw(self._amounts(rows, sequences, context, woken), own, first)
            self._shares.clear()
        return plain

    def _share(self, rows: int, sequences: int, context: int, woken: float) -> float:
        """The time without drafts over that of a step of so many rows that activated so many experts."""
        key = rows, sequences, context // _MOVED_TOKENS, round(woken)
        if key not in self._shares:
            each = (sequences, sequences, context), (rows, sequences, context, woken)
            pair = np.stack([self._amounts(*one) for one in each])
            plain, here = self.group.seconds(pair).tolist()
            self._shares[key] = (plain + self._overhead * math.exp(self._pace)) / here
        return self._shares[key]

    @property
    def doubt(self) -> str:
        """Why the estimate of a step without drafts may be wrong; "" if there is no reason to think so."""
        pace, at = self._plain
        if self._clock() - at > _RECENT:
            return OLD if at > -math.inf else FEW
        return CHANGED if abs(self._pace - pace) > math.log(_ANOTHER) else ""


def in_order(values: Floats, weights: Floats) -> Floats:
    """Non-decreasing values, each as near to its old one as its weight says: values in the wrong order become their
    mean (of logs), so that one that is too large does not raise all after it (pooling of adjacent violators, Ayer et
    al. 1955)."""
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
