"""From the chance a draft gives a candidate to the chance that it is hit, learnt while drafting.

A draft's own softmax is no honest chance: where target and draft both take the likeliest token, the draft's first
choice is hit far more often than its probability says, and its third less often. So each candidate's log-odds ``z`` are
mapped, by depth, rank among its siblings and way of drawing, to::

    log-odds of a hit, given that the parent was hit  =  slope * z + shift        (Platt scaling)

What verification shows are trials: below every accepted node the token that came is one of the candidates, or none.
Trials are counted in bins of ``z``, and every so many steps the lines are fitted to the counts: first one for all
depths, held near where it began, then one for each depth, held near that one. So few trials change little. The lines
begin at the identity, but for first choices, which any draft worth its time hits more often than it says. Older counts
fade, so that the chances follow the text. All of it is a guess about speed: no token depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import MAX_NODES
from foresay.verifier.ops.records import Pieces

Floats = NDArray[np.float64]

#: Ways of drawing that differ in how often drafts are hit: temperature 0, up to 0.75, above.
KINDS = 3
#: Depths and ranks that are told apart; what is deeper or lower counts as the last.
DEPTHS, GROUPS = 8, 4
#: Ranks whose hits are counted, for templates.
RANKS = 24
#: Steps between fits (fewer in the beginning), and what is left of older counts then: about 6000 steps are remembered.
FIT_EVERY, FIRST_FIT = 128, 16
KEPT = 0.98
#: How strongly the lines are held: about as many trials stand against what is seen.
_HOLD_ALL, _HOLD_DEPTH = 4.0, 40.0
_NEWTON_STEPS, _LONGEST_STEP = 4, 2.0
_MOST_SLOPE = 4.0
#: Where the lines begin, slope and shift by way of drawing and rank: about half of what drafts were measured to need.
BEGINNING = np.tile([1.0, 0.0], (KINDS, GROUPS, 1))
BEGINNING[0, 0, 1], BEGINNING[2, 0, 1] = 1.5, 0.5
#: How often candidates come, by rank, before anybody knows, as how many trials that counts, and as how many what is
#: known of all depths counts for one.
_USUAL, _HOLD_USUAL, _HOLD_USUAL_DEPTH = np.array([0.55, 0.15, 0.08, 0.05, 0.03, 0.02]), 4.0, 20.0
#: Centres of the bins.
_ODDS = np.linspace(-9.0, 9.0, 25)
#: Where the curves have their knots: log chances of a candidate. Outside the bins they go straight on.
_KNOT_ODDS = np.concatenate(([-900.0], _ODDS, [60.0]))
_KNOTS = -np.logaddexp(0.0, -_KNOT_ODDS)
_PIECES, _KNOTS_ROOM = len(_KNOTS) + 1, 32
#: A log chance that is as good as none.
_ROOM = 1000.0


#: Depth, log chances of the candidates, which one came, and whether it was one of a chain.
_Trial = tuple[int, Floats, NDArray[np.bool_], bool]


def kind_of(sampling: SamplingParams) -> int:
    """Which way of drawing this is."""
    return 0 if sampling.greedy else 1 if sampling.temperature <= 0.75 else 2


class Calibration:
    """The curves of one drafter, and the counts they are fitted to. active: False leaves chances as they are.

    trials, hits: fp64[kind, depth, rank], how often a candidate of that rank was looked at below an accepted node, and
    how often it was the token that came.
    """

    def __init__(self) -> None:
        self.active = True
        self.trials = np.zeros((KINDS, DEPTHS, RANKS))
        self.hits = np.zeros((KINDS, DEPTHS, RANKS))
        self._firsts = np.zeros((2, KINDS, DEPTHS))  # trials and hits of first choices below first choices alone
        self._binned = np.zeros((2, KINDS, DEPTHS, GROUPS, len(_ODDS)))
        self._lines = np.repeat(BEGINNING[:, None], DEPTHS + 1, axis=1)
        self._pieces = [_pieces(lines[1:]) for lines in self._lines]
        self._chains = [_chain(self._firsts[:, kind]) for kind in range(KINDS)]
        self._usual = [_usual(self.hits[kind], self.trials[kind]) for kind in range(KINDS)]
        self._seen: list[list[_Trial]] = [[] for _ in range(KINDS)]
        self._steps, self._fit_at = 0, FIRST_FIT

    def pieces(self, kind: int) -> NDArray[np.float32]:
        """fp32[2, depth, group, piece]: slope and shift of each straight piece of the curves."""
        if not self.active:
            return _IDENTITY
        return self._pieces[kind]

    def saw(self, kind: int, depth: int, chances: Floats, hit: NDArray[np.bool_], chain: bool = True) -> None:
        """A trial below an accepted node: [k] log chances of the candidates (NaN if unknown), and which one came.

        chain: whether all nodes above it were first choices.
        """
        self._seen[kind].append((min(depth, DEPTHS - 1), chances, hit, chain))

    def step(self) -> None:
        """A step is over: now and then, fit."""
        self._steps += 1
        if self._steps >= self._fit_at:
            self._steps, self._fit_at = 0, min(2 * self._fit_at, FIT_EVERY)
            self.fit()

    def chain(self, kind: int, levels: int) -> tuple[float, ...]:
        """[levels] the chance of each node of a chain to be hit, by how often first choices below such were."""
        return self._chains[kind][:levels]

    def first(self, kind: int, depth: int) -> float:
        """How often the first choice comes below a node of this depth that did."""
        return float(self._usual[kind][min(depth, DEPTHS - 1), 0])

    def accuracy(self, kind: int) -> list[list[float]]:
        """[depth][rank] how often candidates were hit: what :func:`foresay.spec.template.best_template` is made
        from."""
        trials = self.trials[kind]
        rows: list[list[float]] = (self.hits[kind] / np.maximum(trials, 1e-9)).tolist()
        return [row for row, seen in zip(rows, trials[:, 0], strict=True) if seen]

    def fit(self) -> None:
        """Take in what was seen and make new curves."""
        for kind, seen in enumerate(self._seen):
            if seen:
                self._seen[kind] = []
                self._count(kind, seen)
                self._curve(kind)

    def _curve(self, kind: int) -> None:
        """The curves of one way of sampling, from its counts."""
        (trials, hits), lines = self._binned[:, kind], self._lines[kind]
        together = trials.sum(0, keepdims=True), hits.sum(0, keepdims=True)
        lines[:1] = _fitted(*together, lines[:1], BEGINNING[kind], _HOLD_ALL)
        lines[1:] = _fitted(trials, hits, lines[1:], lines[:1], _HOLD_DEPTH)
        self._pieces[kind] = _pieces(lines[1:])

    def _count(self, kind: int, seen: Sequence[_Trial]) -> None:
        """Sort trials into the bins; what lay there fades."""
        depths, rows, hits, chains = zip(*seen, strict=True)
        lengths = np.array([len(row) for row in rows])
        depth, chance = np.repeat(depths, lengths), np.concatenate(rows)
        rank = np.arange(len(depth)) - np.repeat(lengths.cumsum() - lengths, lengths)
        hit = np.concatenate(hits)
        odds = _log_odds(np.where(chance > -_ROOM, chance, -_ROOM))
        place = np.rint((odds - _ODDS[0]) / (_ODDS[1] - _ODDS[0])).clip(0, len(_ODDS) - 1).astype(np.int64)
        group, known, ranked = np.minimum(rank, GROUPS - 1), chance > -np.inf, rank < RANKS
        binned = np.ravel_multi_index((depth, group, place), self._binned.shape[2:])
        by_rank = np.ravel_multi_index((depth, np.minimum(rank, RANKS - 1)), self.trials.shape[1:])
        for counts, cell, valid in (
            (self.trials, by_rank, ranked),
            (self.hits, by_rank, ranked & hit),
            (self._binned[0], binned, known),
            (self._binned[1], binned, known & hit),
        ):
            of_kind = counts[kind]
            of_kind *= KEPT
            of_kind += np.bincount(cell[valid], minlength=of_kind.size).reshape(of_kind.shape)
        first = np.array([came[0] for came in hits])
        of_chain = np.array(chains)
        for counts_of, valid in zip(self._firsts[:, kind], (of_chain, of_chain & first), strict=True):
            counts_of *= KEPT
            counts_of += np.bincount(np.array(depths)[valid], minlength=DEPTHS)
        self._chains[kind] = _chain(self._firsts[:, kind])
        self._usual[kind] = _usual(self.hits[kind], self.trials[kind])


def _pieces(lines: Floats) -> NDArray[np.float32]:
    """Slope and shift of the pieces between knots, [2, depth, group, piece]; the outermost go on. lines: [depth, group,
    2]."""
    odds = lines[..., :1] * _KNOT_ODDS + lines[..., 1:]
    hit = -np.logaddexp(0.0, -odds)
    slopes = np.diff(hit) / np.diff(_KNOTS)
    made = np.stack((slopes, hit[..., :-1] - slopes * _KNOTS[:-1]))
    return np.pad(made, ((0, 0),) * 3 + ((1, 1),), mode="edge").astype(np.float32)


#: Pieces that leave chances as they are.
_IDENTITY = np.zeros((2, DEPTHS, GROUPS, _PIECES), dtype=np.float32)
_IDENTITY[0] = 1.0


class Curves:
    """The curves by which the chances of some sequences are calibrated, where trees grow; the host writes them."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        knots = np.pad(_KNOTS, (0, _KNOTS_ROOM - len(_KNOTS)), constant_values=np.inf)
        self._knots = torch.tensor(knots, dtype=torch.float32).to(device)
        self._pieces = torch.zeros(2, DEPTHS, sequences, GROUPS * _PIECES, device=device)
        self._written: list[NDArray[np.float32] | None] = [None] * sequences

    def write(self, calibration: Calibration, kinds: Sequence[int]) -> None:
        """kinds: the way in which each sequence is sampled."""
        for place, kind in enumerate(kinds):
            pieces = calibration.pieces(kind)
            if self._written[place] is not pieces:
                self._written[place] = pieces
                self._pieces[:, :, place] = torch.from_numpy(pieces).flatten(2)

    def at(self, depth: int) -> Pieces:
        """Those of a depth."""
        slopes, shifts = self._pieces[:, min(depth, DEPTHS - 1)]
        return Pieces(self._knots, slopes, shifts, _PIECES, -_ROOM)


def _chain(counts: Floats) -> tuple[float, ...]:
    """The chance of each node of the longest chain. counts: [2, depth], trials and hits."""
    trials, hits = counts
    of_all = (hits.sum() + _HOLD_USUAL * _USUAL[0]) / (trials.sum() + _HOLD_USUAL)
    rates = (hits + _HOLD_USUAL * of_all) / (trials + _HOLD_USUAL)
    chances: list[float] = rates[np.minimum(np.arange(MAX_NODES), DEPTHS - 1)].cumprod().tolist()
    return tuple(chances)


def _usual(hits: Floats, trials: Floats) -> Floats:
    """How often candidates came, by depth and rank: each depth held near all of them. hits, trials: [depth, rank]."""
    hits, trials = hits[:, : len(_USUAL)], trials[:, : len(_USUAL)]
    of_all = (hits.sum(0) + _HOLD_USUAL * _USUAL) / (trials.sum(0) + _HOLD_USUAL)
    usual: Floats = (hits + _HOLD_USUAL_DEPTH * of_all) / (trials + _HOLD_USUAL_DEPTH)
    return usual


def _log_odds(chance: Floats) -> Floats:
    """Of a log chance; a certain one counts as almost certain."""
    chance = np.minimum(chance, -1e-4)
    odds: Floats = chance - np.log(-np.expm1(chance))
    return odds


def _fitted(trials: Floats, hits: Floats, lines: Floats, held: Floats, hold: float) -> Floats:
    """Slope and shift of the lines that explain the counts best, held near others.

    trials, hits: [.., bins]. lines: [.., 2], where to start. held: the same or broadcast to it. Newton's method on the
    likelihood, all lines at once.
    """
    slope, shift = lines[..., 0], lines[..., 1]
    for _ in range(_NEWTON_STEPS):
        chance = 1.0 / (1.0 + np.exp(-(slope[..., None] * _ODDS + shift[..., None])))
        missing, weight = hits - trials * chance, trials * chance * (1.0 - chance)
        down_a = missing @ _ODDS - hold * (slope - held[..., 0])
        down_b = missing.sum(-1) - hold * (shift - held[..., 1])
        aa, ab, bb = weight @ _ODDS**2 + hold, weight @ _ODDS, weight.sum(-1) + hold
        step = np.stack((bb * down_a - ab * down_b, aa * down_b - ab * down_a)) / (aa * bb - ab * ab)
        step = step.clip(-_LONGEST_STEP, _LONGEST_STEP)
        slope, shift = (slope + step[0]).clip(0.0, _MOST_SLOPE), shift + step[1]
    return np.stack((slope, shift), axis=-1)
