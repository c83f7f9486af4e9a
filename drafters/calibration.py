"""From the probability a draft gives a candidate to the chance that it is accepted, learnt while drafting.

A draft's own softmax is not a calibrated chance: where target and draft both take the likeliest token, the draft's
first choice is accepted far more often than its probability says, and its third less often. So a candidate's
probability is corrected (:mod:`foresay.spec.budget.chance`) by its way of sampling, its rank among its siblings, and
both at its depth. Verification gives trials: below every accepted node the emitted token is one of the candidates, or
none. Probabilities of chains are not computed, so for those it learns how often first choices below first choices are
accepted. All of this only affects speed: no token depends on it.

Its curves, and the limits of tree growth, are written by the host before a step, and read on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.spec.budget.chance import Feature, chance_of, learn
from foresay.spec.price import CHOICES, Bar
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import MAX_NODES
from foresay.verifier.graphs.staging import Staged
from foresay.verifier.ops.records import Pieces

Floats = NDArray[np.float64]

#: Ways of sampling that differ in how often drafts are accepted: temperature 0, up to 0.75, above. Depths and ranks
#: that are distinguished; deeper or lower ones count as the last.
KINDS, DEPTHS, GROUPS = 3, 8, 4
#: Steps after which new curves are computed: at most, and at first, doubled each time; once past the most, one of so
#: many steps is learnt from, chosen by a hash.
REFRESH, _FIRST_REFRESH, _EVERY, _HASH = 128, 16, 4, 40503
#: The initial log-odds shift of first choices, by way of sampling: half of what was measured.
_FIRST_SHIFTS = (1.5, 0.0, 0.5)
#: The initial log odds of first choices.
_USUAL = math.log(0.55 / 0.45)
#: Prior variances: of candidates, what all depths share and what each adds; of chains, either of these, also after an
#: evaluation of the drafter; of stretches, relative to these; how much variance returns with each trial, little, since
#: there are many: the last few thousand are remembered.
_SHARED, _OF_DEPTH, _CHAINS, _JUDGED, _STRETCH, _DRIFT = 0.5, 0.025, 0.4, 0.04, 0.15, 0.0002
#: The range of log odds that are distinguished. The knots of the curves: log probabilities of a candidate.
_MOST_ODDS = 9.0
_KNOT_ODDS = np.concatenate(([-900.0], np.linspace(-_MOST_ODDS, _MOST_ODDS, 25), [60.0]))
_KNOTS = -np.logaddexp(0.0, -_KNOT_ODDS)
_PIECES, _KNOTS_ROOM = len(_KNOTS) + 1, 32
#: A log probability below minus this counts as zero.
_ROOM = 1000.0


def kind_of(sampling: SamplingParams) -> int:
    """Which way of sampling this is."""
    return 0 if sampling.greedy else 1 if sampling.temperature <= 0.75 else 2


class Calibration:
    """The chances of one drafter's candidates. active: False leaves probabilities as they are."""

    def __init__(self) -> None:
        self.active = True
        # By way of sampling, and by depth, for all ranks and then for first choices of chains.
        self._shared = [_features(_SHARED) for _ in range(KINDS)]
        self._deep = [[_features(_OF_DEPTH) for _ in range(DEPTHS)] for _ in range(KINDS)]
        for features, shift in zip(self._shared, _FIRST_SHIFTS, strict=True):
            features[0].shift = shift
        self._made: dict[int, NDArray[np.float32]] = {}
        self._chains: dict[int, tuple[float, ...]] = {}
        self._steps, self._refresh_at = 0, _FIRST_REFRESH

    def expect(self, greedy: Sequence[float], sampled: Sequence[float]) -> None:
        """Start from an evaluation of the drafter: how often its first choice was accepted at each depth, given that
        those above it were, at temperature 0 and 1."""
        ends = [[_odds(share) for share in shares] for shares in (greedy, sampled)]
        middle = [(one + other) / 2 for one, other in zip(*ends, strict=False)]
        for shared, deep, odds in zip(self._shared, self._deep, (ends[0], middle, ends[1]), strict=True):
            shared[GROUPS] = Feature(_JUDGED, 0.0, _DRIFT)
            for depth, features in enumerate(deep):
                features[GROUPS] = Feature(_JUDGED, 0.0, _DRIFT)
                features[GROUPS].shift = odds[min(depth, len(odds) - 1)] - _USUAL
        self._chains = {}

    def saw(self, kind: int, depth: int, chances: Floats, hit: NDArray[np.bool_], chain: bool = True) -> None:
        """A trial below an accepted node: [k] log probabilities of the candidates (NaN if unknown), and which one was
        emitted.

        chain: whether all nodes above it were first choices.
        """
        if self._refresh_at > REFRESH and (_HASH * self._steps & 0xFFFF) * _EVERY >> 16:
            return  # hashed, not every n-th: texts are periodic
        shared, deep = self._shared[kind], self._deep[kind][min(depth, DEPTHS - 1)]
        if chain:
            learn(_USUAL, (shared[GROUPS], deep[GROUPS]), bool(hit[0]))
        known, came = chances.tolist(), hit.tolist()
        rest = sum([math.exp(min(chance, 0.0)) for chance in known[GROUPS - 1 :]])
        claims = [*known[: GROUPS - 1], math.log(rest) if rest > 0 else math.nan]
        hits = [*came[: GROUPS - 1], any(came[GROUPS - 1 :])]
        for group, (claim, right) in enumerate(zip(claims, hits, strict=True)):
            if claim > -_ROOM:  # NaN is not
                claim = min(claim, -1e-4)
                odds = min(max(claim - math.log(-math.expm1(claim)), -_MOST_ODDS), _MOST_ODDS)
                learn(odds, (shared[group], deep[group]), right)

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
            firsts = [self.first(kind, depth) for depth in range(MAX_NODES)]
            self._chains[kind] = tuple(np.cumprod(firsts).tolist())
        return self._chains[kind][:levels]

    def first(self, kind: int, depth: int) -> float:
        """How often the first choice is accepted below an accepted node of a chain."""
        return chance_of(_USUAL, (self._shared[kind][GROUPS], self._deep[kind][min(depth, DEPTHS - 1)][GROUPS]))

    def pieces(self, kind: int) -> NDArray[np.float32]:
        """fp32[2, depth, group, piece]: slope and shift of each linear piece of the curves; the outermost pieces
        extend."""
        if not self.active:
            return _IDENTITY
        if kind not in self._made:
            pairs = [
                [(s, d) for s, d in zip(self._shared[kind], deep, strict=True)][:GROUPS] for deep in self._deep[kind]
            ]
            stretch = np.array([[1.0 + s.stretch + d.stretch for s, d in row] for row in pairs])[..., None]
            shift = np.array([[s.shift + d.shift for s, d in row] for row in pairs])[..., None]
            hit = -np.logaddexp(0.0, -(np.maximum(stretch, 0.0) * _KNOT_ODDS + shift))
            slopes = np.diff(hit) / np.diff(_KNOTS)
            made = np.stack((slopes, hit[..., :-1] - slopes * _KNOTS[:-1]))
            self._made[kind] = np.pad(made, ((0, 0),) * 3 + ((1, 1),), mode="edge").astype(np.float32)
        return self._made[kind]


def _odds(share: float) -> float:
    """Log odds, clamped to what an evaluation can measure."""
    share = min(max(share, 0.02), 0.98)
    return math.log(share / (1.0 - share))


def _features(unsure: float) -> list[Feature]:
    """The features of all ranks, and of chains."""
    ranks = [Feature(unsure, _STRETCH, _DRIFT) for _ in range(GROUPS)]
    return [*ranks, Feature(_CHAINS, 0.0, _DRIFT)]


#: Pieces that leave probabilities as they are.
_IDENTITY = np.zeros((2, DEPTHS, GROUPS, _PIECES), dtype=np.float32)
_IDENTITY[0] = 1.0


class Curves:
    """The calibration curves of some sequences, on the device where trees grow; the host writes them."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        knots = np.pad(_KNOTS, (0, _KNOTS_ROOM - len(_KNOTS)), constant_values=np.inf)
        self._knots = torch.tensor(knots, dtype=torch.float32).to(device)
        self._pieces = torch.zeros(2, DEPTHS, sequences, GROUPS * _PIECES, device=device)
        self._written: list[NDArray[np.float32] | None] = [None] * sequences

    def write(self, calibration: Calibration, kinds: Sequence[int]) -> None:
        """kinds: the way each sequence is sampled."""
        for column, kind in enumerate(kinds):
            pieces = calibration.pieces(kind)
            if self._written[column] is not pieces:
                self._written[column] = pieces
                self._pieces[:, :, column] = torch.from_numpy(pieces).flatten(2)

    def at(self, depth: int) -> Pieces:
        """The curves of a depth."""
        slopes, shifts = self._pieces[:, min(depth, DEPTHS - 1)]
        return Pieces(self._knots, slopes, shifts, _PIECES, -_ROOM)


#: A threshold that every node reaches, and one that none does.
ALWAYS, NEVER = (Bar((0.0,) * CHOICES, 0.0, level) for level in (0.0, math.inf))


class WrittenBars:
    """The thresholds that nodes must reach, for each level but the last of some trees.

    nodes: of the largest tree. counts: int64[S], how many nodes a tree may have. rows: fp32[S, nodes], the total cost
    of 0, 1, .. nodes below the root.
    """

    def __init__(self, sequences: int, levels: int, device: torch.device, nodes: int = 0) -> None:
        bars = {"bars": ((levels, sequences, CHOICES + 2), torch.float32)}
        self._staged = Staged(
            device, bars | {"counts": ((sequences,), torch.int64), "rows": ((sequences, nodes), torch.float32)}
        )
        self.counts, self.rows = self._staged.tensors["counts"], self._staged.tensors["rows"]

    def write(
        self, bars: Sequence[Sequence[Bar]], counts: Sequence[int] = (), rows: Sequence[Sequence[float]] = ()
    ) -> None:
        """Write those of the first trees; bars level by level. Nodes past the given rows are never worth it."""
        to = self._staged.writable()
        for tree, levels in enumerate(bars):
            for level, bar in enumerate(levels):
                to["bars"][level, tree] = *bar.shares, bar.row, bar.level
        to["counts"][: len(counts)] = counts
        for tree, prices in enumerate(rows):
            known = prices[: to["rows"].shape[1]]
            to["rows"][tree, : len(known)], to["rows"][tree, len(known) :] = known, math.inf
        self._staged.send()

    def below(self, depth: int) -> Tensor:
        """fp32[S, N]: the bars of the level below nodes of a depth."""
        return self._staged.tensors["bars"][depth - 1]
