"""The chance that a drafted token is accepted, learnt from outcomes: one estimator for all drafters.

A drafter claims a probability for each node, given its parent. The chance of such a claim is a line over it, in log
odds, to which each known feature of the node adds its part::

    log odds of acceptance = claim + sum over its features of (shift + stretch * claim)

    features   the source (a drafter, its way of sampling), the depth, the context (a salt, a text, a rank, a match)

Claims are mostly right relative to each other, and too low or too high together: so a line and not a table, since it is
learnt in a few steps. What a feature adds has a Gaussian prior. Every outcome moves the features of its node, the
uncertain ones more (a Kalman filter of the logistic); and each grows less certain again, since texts change.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from foresay.spec.tree import DraftTree

#: The initial variance of a shift and of a stretch; the share of it that returns with each outcome, and for features
#: that many texts share.
_SHIFT, _STRETCH, DRIFT, _SLOW = 1.0, 0.03, 0.005, 0.001
#: Limits of a feature: of its stretch, and of its shift.
_MOST_STRETCH, _MOST_SHIFT = 0.95, 4.0
#: Claims are clamped to these probabilities: nothing is certain.
_UNLIKELY, _SURE = 0.02, 0.98
#: Variances of what many texts share, and of a table's cell, relative to one text's own; how many salts are kept.
SHARED, CELL, _SALTS = 0.3, 0.7, 256
#: Usual tokens accepted in a row: a match at the wrong position is wrong all the way (:meth:`Claims.chances`).
_LONG = 12
#: The claim for a node whose drafter gives none.
_UNTOLD = 0.7
#: A node with a lower chance is no candidate.
LEAST = 0.04


class Feature:
    """What one fact about a node adds to its log odds. unsure: scales the initial variances, 1 for a text's own
    feature. stretch: the variance of the stretch, 0 learns only a shift. drift: the share of the initial variance that
    returns with each outcome."""

    __slots__ = ("_kept", "_of_shift", "_of_stretch", "_shift_back", "_stretch_back", "shift", "stretch")

    def __init__(self, unsure: float = 1.0, stretch: float = _STRETCH, drift: float = DRIFT) -> None:
        self.shift = self.stretch = 0.0
        self._of_shift, self._of_stretch = unsure * _SHIFT, unsure * stretch
        self._kept, self._shift_back, self._stretch_back = 1 - drift, drift * self._of_shift, drift * self._of_stretch

    def spread(self, odds: float) -> float:
        """The variance of what it adds to such a claim."""
        return self._of_shift + self._of_stretch * odds * odds

    def move(self, odds: float, off: float, whole: float) -> None:
        """Learn from an outcome. off: its error in log odds over the total variance. whole: that variance."""
        by_shift, by_stretch = self._of_shift, self._of_stretch * odds
        self.shift = min(max(self.shift + by_shift * off, -_MOST_SHIFT), _MOST_SHIFT)
        self.stretch = min(max(self.stretch + by_stretch * off, -_MOST_STRETCH), _MOST_STRETCH)
        self._of_shift = self._kept * (by_shift - by_shift * by_shift / whole) + self._shift_back
        self._of_stretch = self._kept * (self._of_stretch - by_stretch * by_stretch / whole) + self._stretch_back


def chance_of(odds: float, features: Iterable[Feature]) -> float:
    """The chance of a claim with these log odds."""
    total = odds
    for feature in features:
        total += feature.shift + feature.stretch * odds
    return 1.0 / (1.0 + math.exp(-total))


def learn(odds: float, features: Sequence[Feature], came: bool) -> None:
    """Learn whether a node with such a claim was accepted; else another token was emitted."""
    chance = chance_of(odds, features)
    noise = 1.0 / max(chance * (1.0 - chance), 1e-9)
    whole = noise + sum([feature.spread(odds) for feature in features])
    off = (came - chance) * noise / whole
    for feature in features:
        feature.move(odds, off, whole)


def odds_of(chance: float) -> float:
    """The log odds of a claim; a certain one counts as almost certain."""
    chance = min(max(chance, _UNLIKELY), _SURE)
    return math.log(chance / (1.0 - chance))


class Cells:
    """A table of claims, each corrected by its own outcomes. chances: by cell, initially and now."""

    def __init__(self, chances: Iterable[float]) -> None:
        self.chances = list(chances)
        self._features: dict[int, tuple[float, Feature]] = {}

    def saw(self, cell: int, came: bool) -> None:
        """Learn whether a candidate of this cell was accepted; else another token was emitted."""
        known = self._features.get(cell)
        if known is None:
            known = self._features[cell] = odds_of(self.chances[cell]), Feature(CELL, stretch=0.0)
        odds, feature = known
        learn(odds, (feature,), came)
        self.chances[cell] = chance_of(odds, (feature,))


class Claims:
    """The chances of one drafter's claims in one text. features: those shared with other texts, then its own. run: the
    current number of correct tokens in a row."""

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self.features, self.run = features, 0

    def chance(self, claim: float) -> float:
        """The chance of a node, given its parent."""
        return chance_of(odds_of(claim), self.features)

    def chances(self, claims: Sequence[float]) -> list[float]:
        """The chance of each node of a chain, from the claims of all, up to the last that is likely enough.

        Their product overestimates deep nodes. So the share accepted at depth d is (L + r) / (L + r + d), the rule of
        succession after r correct tokens in a row.
        """
        chances, product, long = [], 1.0, _LONG + self.run
        last, given = -1.0, 0.0
        for depth, claim in enumerate(claims, start=1):
            if claim != last:  # deep nodes mostly have the same claim
                last, given = claim, self.chance(claim)
            product *= given
            chances.append(product * long / (long + depth))
            if chances[-1] < LEAST:
                break
        return chances

    def saw(self, claim: float, came: bool) -> None:
        """Learn whether a node with this claim was accepted; else another token was emitted."""
        self.run = self.run + 1 if came else self.run // 2
        learn(odds_of(claim), self.features, came)


class Salts:
    """The features that new texts start with: one shared by all salts, and one for each of the salts used last. Salts
    are stored as hashes that only this process can compute, and of texts only how accurate claims were. shared, own:
    scale the variances of what many texts share, and of one text."""

    def __init__(self, shared: float = SHARED, own: float = 1.0) -> None:
        self._shared, self._own, self._all = shared, own, Feature(shared, drift=_SLOW)
        self._of: OrderedDict[int, Feature] = OrderedDict()

    def claims(self, salt: str) -> Claims:
        """Claims for a new text."""
        of_salt = self._of.pop(hash(salt), None) or Feature(self._shared, drift=_SLOW)
        self._of[hash(salt)] = of_salt
        if len(self._of) > _SALTS:
            self._of.popitem(last=False)
        return Claims((self._all, of_salt, Feature(self._own)))


def claimed(chain: DraftTree) -> list[float]:
    """The drafter's claim for each drafted node, given its parent."""
    if len(chain.chances) != len(chain):
        return [_UNTOLD] * (len(chain) - 1)
    return [chance / before if before else 0.0 for before, chance in pairwise(chain.chances)]
