"""The chance that a drafted token comes, learnt from those that came: one estimator, whoever drafted.

A drafter claims a chance for each node, given the node before it. What the claim is worth is a line over it, in log
odds, to which everything known of the node adds its part::

    log odds of coming = claim + sum over its features of (shift + stretch * claim)

    features   the source (a drafter, its way of sampling), the depth, the context (a salt, a text, a rank, a match)

Claims are mostly right relative to each other, and too low or too high together: so a line and not a table, which takes
a few steps to learn. What a feature adds is believed to be Gaussian. Every outcome moves the features that had a part
in it, the ones that are less sure more (a Kalman filter of the logistic); and each grows less sure again, since texts
change.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from foresay.spec.tree import DraftTree

#: The variance of a shift and of a stretch at first; the share of it that returns with each outcome, and of what many
#: texts share.
_SHIFT, _STRETCH, DRIFT, _SLOW = 1.0, 0.03, 0.005, 0.001
#: How far a feature may go: its stretch, and its shift.
_MOST_STRETCH, _MOST_SHIFT = 0.95, 4.0
#: Claims are read between these chances: nothing is certain.
_UNLIKELY, _SURE = 0.02, 0.98
#: How unsure what many texts share is, and a cell of a table, beside one text's own; salts that are remembered.
SHARED, CELL, _SALTS = 0.3, 0.7, 256
#: Tokens that come in a row as a rule: a match in the wrong place is wrong all the way (:meth:`Claims.chances`).
_LONG = 12
#: What is claimed for a node whose drafter says nothing.
_UNTOLD = 0.7
#: What is less likely than this is no candidate.
LEAST = 0.04


class Feature:
    """What one fact about a node adds to its log odds. unsure: how far off it may be at first, beside a text's own.
    stretch: the variance of that, 0 learns a shift alone. drift: the share of the doubt that returns with each outcome.
    """

    __slots__ = ("_kept", "_of_shift", "_of_stretch", "_shift_back", "_stretch_back", "shift", "stretch")

    def __init__(self, unsure: float = 1.0, stretch: float = _STRETCH, drift: float = DRIFT) -> None:
        self.shift = self.stretch = 0.0
        self._of_shift, self._of_stretch = unsure * _SHIFT, unsure * stretch
        self._kept, self._shift_back, self._stretch_back = 1 - drift, drift * self._of_shift, drift * self._of_stretch

    def spread(self, odds: float) -> float:
        """The variance of what it adds to such a claim."""
        return self._of_shift + self._of_stretch * odds * odds

    def move(self, odds: float, off: float, whole: float) -> None:
        """An outcome was this far off, as a share of all spread."""
        by_shift, by_stretch = self._of_shift, self._of_stretch * odds
        self.shift = min(max(self.shift + by_shift * off, -_MOST_SHIFT), _MOST_SHIFT)
        self.stretch = min(max(self.stretch + by_stretch * off, -_MOST_STRETCH), _MOST_STRETCH)
        self._of_shift = self._kept * (by_shift - by_shift * by_shift / whole) + self._shift_back
        self._of_stretch = self._kept * (self._of_stretch - by_stretch * by_stretch / whole) + self._stretch_back


def chance_of(odds: float, features: Iterable[Feature]) -> float:
    """What a claim with these log odds is worth."""
    total = odds
    for feature in features:
        total += feature.shift + feature.stretch * odds
    return 1.0 / (1.0 + math.exp(-total))


def learn(odds: float, features: Sequence[Feature], came: bool) -> None:
    """A node with such a claim came, or another token did."""
    chance = chance_of(odds, features)
    noise = 1.0 / max(chance * (1.0 - chance), 1e-9)
    whole = noise + sum([feature.spread(odds) for feature in features])
    off = (came - chance) * noise / whole
    for feature in features:
        feature.move(odds, off, whole)


def odds_of(chance: float) -> float:
    """The log odds of a claim; one that is certain counts as almost certain."""
    chance = min(max(chance, _UNLIKELY), _SURE)
    return math.log(chance / (1.0 - chance))


class Cells:
    """A table of claims, each corrected by its own outcomes. chances: by cell, as believed at first and by now."""

    def __init__(self, chances: Iterable[float]) -> None:
        self.chances = list(chances)
        self._features: dict[int, tuple[float, Feature]] = {}

    def saw(self, cell: int, came: bool) -> None:
        """A candidate of this cell came, or another token did."""
        known = self._features.get(cell)
        if known is None:
            known = self._features[cell] = odds_of(self.chances[cell]), Feature(CELL, stretch=0.0)
        odds, feature = known
        learn(odds, (feature,), came)
        self.chances[cell] = chance_of(odds, (feature,))


class Claims:
    """What one drafter's claims are worth in one text. features: what it shares with others, then its own. run: tokens
    in a row that were right by now."""

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self.features, self.run = features, 0

    def chance(self, claim: float) -> float:
        """Of a node, given the one before it."""
        return chance_of(odds_of(claim), self.features)

    def chances(self, claims: Sequence[float]) -> list[float]:
        """Of each node of a chain, by the claims of all, as far as any is likely enough.

        Their product says too much of deep nodes. So the share of those at depth d that comes is (L + r) / (L + r + d),
        the rule of succession after r tokens in a row that were right.
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
        """A node with this claim came, or another token did."""
        self.run = self.run + 1 if came else self.run // 2
        learn(odds_of(claim), self.features, came)


class Salts:
    """Where new texts begin: what those of all salts showed, and of each of the salts seen last. Salts are kept as
    hashes that no other process has, and nothing of texts but how far claims were right. shared, own: how unsure what
    many texts share is, and one text.
    """

    def __init__(self, shared: float = SHARED, own: float = 1.0) -> None:
        self._shared, self._own, self._all = shared, own, Feature(shared, drift=_SLOW)
        self._of: OrderedDict[int, Feature] = OrderedDict()

    def claims(self, salt: str) -> Claims:
        """For a new text."""
        of_salt = self._of.pop(hash(salt), None) or Feature(self._shared, drift=_SLOW)
        self._of[hash(salt)] = of_salt
        if len(self._of) > _SALTS:
            self._of.popitem(last=False)
        return Claims((self._all, of_salt, Feature(self._own)))


def claimed(chain: DraftTree) -> list[float]:
    """What the drafter says of each drafted node, given its parent."""
    if len(chain.chances) != len(chain):
        return [_UNTOLD] * (len(chain) - 1)
    return [chance / before if before else 0.0 for before, chance in pairwise(chain.chances)]
