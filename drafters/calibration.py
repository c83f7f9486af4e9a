"""From the probability a draft gives a candidate to the chance that it is accepted, learnt while drafting.

A draft's own softmax is not a calibrated chance: where target and draft both take the likeliest token, the draft's
first choice is accepted far more often than its probability says, and its third less often. So a candidate's
probability is corrected (:mod:`foresay.spec.budget.chance`) by its way of sampling and its rank among its siblings.
Verification gives trials: below every accepted node the emitted token is one of the candidates, or none. Probabilities
of chains are not computed, so for those it learns how often first choices below first choices are accepted, at each
depth. All of this only affects speed: no token depends on it.

Its curves, and the limits of tree growth, are written by the host before a step, and read on the device.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from random import getrandbits

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.spec.budget.chance import MANY, Outcomes
from foresay.spec.price import CHOICES, Bar
from foresay.spec.sampling import KINDS
from foresay.spec.tree import MAX_NODES
from foresay.verifier.graphs.staging import Column, Staged
from foresay.verifier.ops.records import Pieces

Floats = NDArray[np.float64]

#: Depths of chains and ranks that are told apart; deeper or lower ones count as the last.
DEPTHS, GROUPS = 8, 4
#: Steps after which new curves are computed: at most, and at first, doubled each time. Past the most, one of four steps
#: is learnt from.
REFRESH, _FIRST_REFRESH = 128, 16
#: Unlikely to likely candidates are learnt from apart: up to which probabilities, and their usual log odds.
_LIMITS, _LIKELY = (0.05, 0.2, 0.5, 0.75), (-4.0, -2.0, -0.7, 0.5, 2.0)
#: What the log odds of first choices are shifted by at first, by way of sampling: half of what was measured.
_FIRST_SHIFTS = (1.5, 0.0, 0.5)
#: How often first choices are accepted, before anything is known; as how many outcomes that counts, and an evaluation.
_USUAL, _GUESSED, _JUDGED = 0.55, 20.0, 100.0
#: The knots of the curves, as log odds: beyond nine nothing is told apart.
_KNOT_ODDS = np.concatenate(([-900.0], np.linspace(-9.0, 9.0, 25), [60.0]))
_KNOTS = -np.logaddexp(0.0, -_KNOT_ODDS)
_PIECES, _KNOTS_ROOM = len(_KNOTS) + 1, 32
#: A log probability below minus this counts as zero.
_ROOM = 1000.0


class Calibration:
    """The chances of one drafter's candidates. active: False leaves probabilities as they are."""

    def __init__(self) -> None:
        self.active = True
        # By way of sampling: of each rank, all and unlikely to likely; of first choices of chains, all and by depth.
        self._ranks = [[_counts(1 + len(_LIKELY)) for _ in range(GROUPS)] for _ in range(KINDS)]
        for ranks, shift in zip(self._ranks, _FIRST_SHIFTS, strict=True):
            ranks[0][0] = Outcomes(_GUESSED, MANY[1], shift)
        self._claims = [[_USUAL] * DEPTHS] * KINDS
        self._firsts, self._deep = _counts(KINDS), [_counts(DEPTHS) for _ in range(KINDS)]
        self._made: dict[int, NDArray[np.float32]] = {}
        self._chains: dict[int, tuple[float, ...]] = {}
        self._steps, self._refresh_at = 0, _FIRST_REFRESH

    def expect(self, greedy: Sequence[float], sampled: Sequence[float]) -> None:
        """Start from an evaluation of the drafter: how often its first choice was accepted at each depth, given that
        those above it were, at temperature 0 and 1."""
        middle = [(one + other) / 2 for one, other in zip(greedy, sampled, strict=False)]
        for kind, shares in enumerate((greedy, middle, sampled)):
            known = [min(max(share, 0.02), 0.98) for share in shares]
            self._claims[kind] = [known[min(depth, len(known) - 1)] for depth in range(DEPTHS)]
            self._deep[kind] = _counts(DEPTHS, _JUDGED)
        self._firsts, self._chains = _counts(KINDS, _JUDGED), {}

    def saw(self, kind: int, depth: int, chances: Floats, hit: NDArray[np.bool_], chain: bool = True) -> None:
        """A trial below an accepted node: [k] log probabilities of the candidates (NaN if unknown), and which one was
        emitted.

        chain: whether all nodes above it were first choices.
        """
        if self._refresh_at > REFRESH and getrandbits(2):
            return
        came = hit.tolist()
        if chain:
            deep, claim = min(depth, DEPTHS - 1), self._claims[kind][min(depth, DEPTHS - 1)]
            self._deep[kind][deep].saw(self._firsts[kind].corrected(claim), came[0])
            self._firsts[kind].saw(claim, came[0])
        known = [math.exp(min(chance, -1e-4)) for chance in chances.tolist()]
        claims = [*known[: GROUPS - 1], sum(known[GROUPS - 1 :])]
        hits = [*came[: GROUPS - 1], any(came[GROUPS - 1 :])]
        for (every, *counts), claim, right in zip(self._ranks[kind], claims, hits, strict=False):
            if claim > 0.0:  # NaN is not
                claim = min(claim, 1.0)
                counts[bisect(_LIMITS, claim)].saw(every.corrected(claim), right)
                every.saw(claim, right)

    def step(self) -> None:
        """A step has ended: from time to time, compute new curves."""
        self._steps += 1
        if self._steps % min(self._refresh_at, REFRESH) == 0:
            self._refresh_at *= 2
            self._made, self._chains = {}, {}

    def chain(self, kind: int, levels: int) -> tuple[float, ...]:
        """[levels] the chance of each node of a chain to be accepted, from how often first choices below first choices
        were."""
        if kind not in self._chains:
            self._chains[kind] = tuple(accumulate((self.first(kind, depth) for depth in range(MAX_NODES)), mul))
        return self._chains[kind][:levels]

    def first(self, kind: int, depth: int) -> float:
        """How often the first choice is accepted below an accepted node of a chain."""
        deep = min(depth, DEPTHS - 1)
        return self._deep[kind][deep].corrected(self._firsts[kind].corrected(self._claims[kind][deep]))

    def pieces(self, kind: int) -> NDArray[np.float32]:
        """fp32[2, group, piece]: slope and shift of each linear piece of the curves; the outermost pieces extend."""
        if not self.active:
            return _IDENTITY
        if kind not in self._made:
            shifts = [
                every.shift + np.interp(_KNOT_ODDS, _LIKELY, [each.shift for each in counts])
                for every, *counts in self._ranks[kind]
            ]
            hit = -np.logaddexp(0.0, -np.maximum.accumulate(_KNOT_ODDS + np.array(shifts), axis=1))
            slopes = np.diff(hit) / np.diff(_KNOTS)
            made = np.stack((slopes, hit[..., :-1] - slopes * _KNOTS[:-1]))
            self._made[kind] = np.pad(made, ((0, 0),) * 2 + ((1, 1),), mode="edge").astype(np.float32)
        return self._made[kind]


def _counts(number: int, weight: float = _GUESSED) -> list[Outcomes]:
    return [Outcomes(weight, MANY[1]) for _ in range(number)]


#: Pieces that leave probabilities as they are.
_IDENTITY = np.zeros((2, GROUPS, _PIECES), dtype=np.float32)
_IDENTITY[0] = 1.0


class Curves:
    """The calibration curves of some sequences, on the device where trees grow; the host writes them."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        knots = np.pad(_KNOTS, (0, _KNOTS_ROOM - len(_KNOTS)), constant_values=np.inf)
        self._knots = torch.tensor(knots, dtype=torch.float32).to(device)
        self._pieces = torch.zeros(2, sequences, GROUPS * _PIECES, device=device)
        self._written: list[NDArray[np.float32] | None] = [None] * sequences

    def write(self, calibration: Calibration, kinds: Sequence[int]) -> None:
        """kinds: the way each sequence is sampled."""
        for column, kind in enumerate(kinds):
            pieces = calibration.pieces(kind)
            if self._written[column] is not pieces:
                self._written[column] = pieces
                self._pieces[:, column] = torch.from_numpy(pieces).flatten(1)

    @property
    def pieces(self) -> Pieces:
        """As the kernels read them."""
        slopes, shifts = self._pieces
        return Pieces(self._knots, slopes, shifts, _PIECES, -_ROOM)


#: A threshold that every node reaches, and one that none does.
ALWAYS, NEVER = (Bar((0.0,) * CHOICES, 0.0, level) for level in (0.0, math.inf))


class WrittenBars:
    """The thresholds that nodes must reach, for each level but the last of some trees.

    nodes: of the largest tree. counts: int64[S], how many nodes a tree may have. rows: fp32[S, nodes], the total cost
    of 0, 1, .. nodes below the root. levels: int64[S], how many are grown in the end.
    """

    def __init__(self, sequences: int, levels: int, device: torch.device, nodes: int) -> None:
        bars, each = ((levels, sequences, CHOICES + 2), torch.float32), ((sequences,), torch.int64)
        columns: dict[str, Column] = {"bars": bars, "counts": each, "levels": each}
        self._staged, self._ended = Staged(device, columns | {"rows": ((sequences, nodes), torch.float32)}), 0
        self._staged.arrays["counts"][:] = nodes
        self.counts, self.rows, self.levels = (self._staged.tensors[name] for name in ("counts", "rows", "levels"))
        self.end(levels)

    def end(self, levels: int) -> None:
        """All trees have so many levels."""
        if levels != self._ended:
            self._ended = levels
            self._staged.writable()["levels"][:] = levels
            self._staged.send()

    def write(self, bars: Sequence[Sequence[Bar]], counts: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
        """Write those of the first trees; bars level by level. Nodes past the given rows are never worth it."""
        to = self._staged.writable()
        for tree, levels in enumerate(bars):
            to["bars"][: len(levels), tree] = [(*bar.shares, bar.row, bar.level) for bar in levels] or 0.0
        to["counts"][: len(counts)] = counts
        for tree, prices in enumerate(rows):
            known = prices[: to["rows"].shape[1]]
            to["rows"][tree, : len(known)], to["rows"][tree, len(known) :] = known, math.inf
        self._staged.send()

    def below(self, depth: int) -> Tensor:
        """fp32[S, N]: the bars of the level below nodes of a depth."""
        return self._staged.tensors["bars"][depth - 1]
