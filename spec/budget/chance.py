"""The chance that a drafted token is accepted, learnt from outcomes: one estimator for all drafters.

A drafter claims a probability for each node, given its parent. Claims are mostly right relative to each other, and too
low or too high together. So what is learnt is how many came and how many did not, over how many should have by their
claims: by that ratio the odds of the next ones are corrected. Outcomes of many texts correct a claim first, then those
of the texts of one salt, then those of the text itself; the last outcomes count most, since texts change::

    claim 0.6 ── all texts: 50 came, 40 should have ── this salt ── this text: 1 came, 4 should have ──> 0.31
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from foresay.spec.sampling import KINDS
from foresay.spec.tree import DraftTree

#: As how many outcomes claims count that nothing was learnt from, in one text and in many, and how much of an outcome's
#: weight remains after one more: a text may change within 200 tokens.
TEXT, MANY = (4.0, 0.995), (16.0, 0.999)
#: Claims are clamped to this far from 0 and 1: nothing is certain. A node with a lower chance than twice that is no
#: candidate: no row is as cheap.
_CERTAIN = 0.02
LEAST = 2 * _CERTAIN
#: By how many deviations of its log odds a model is hoped to suit a text better than known, and the deviation at which
#: it is known well enough, after some four outcomes. Measured on stories and maths in turns, at T = 0.7.
_HOPE, _KNOWN = 0.8, 0.7
#: How many salts are kept: more than one server has users.
_SALTS = 256
#: Usual tokens accepted in a row: a match at the wrong position is wrong all the way (:meth:`Claims.chances`).
_LONG = 12


class Outcomes:
    """Outcomes of claims: how many came and how many did not, over those expected. weight: outcomes that it begins
    with, all as expected, or with these log odds more. kept: what remains of an outcome's weight after one more."""

    __slots__ = ("_came", "_expected", "_expected_not", "_kept", "_not", "_weight")

    def __init__(self, weight: float = TEXT[0], kept: float = TEXT[1], shift: float = 0.0) -> None:
        self._weight, self._kept = weight / 2, kept
        self._came = self._not = self._expected = self._expected_not = self._weight
        self._came *= math.exp(shift)

    def corrected(self, chance: float) -> float:
        """The chance of a claim."""
        came = chance * self._came * self._expected_not
        return came / (came + (1.0 - chance) * self._not * self._expected)

    @property
    def shift(self) -> float:
        """The same for log odds: what it adds."""
        return math.log(self._came * self._expected_not / (self._not * self._expected))

    @property
    def unsure(self) -> float:
        """The deviation of its log odds."""
        return math.sqrt(1.0 / self._came + 1.0 / self._not)

    def saw(self, chance: float, came: bool) -> None:
        """Learn whether a node with such a claim was accepted; else another token was emitted."""
        kept, back = self._kept, (1.0 - self._kept) * self._weight
        self._came = kept * self._came + back + came
        self._not = kept * self._not + back + (not came)
        self._expected = kept * self._expected + back + chance
        self._expected_not = kept * self._expected_not + back + 1.0 - chance


def clamped(chance: float) -> float:
    """A claim; a certain one counts as almost certain."""
    return min(max(chance, _CERTAIN), 1.0 - _CERTAIN)


class Cells:
    """A table of claims, each corrected by its own outcomes. chances: by cell, initially and now."""

    def __init__(self, chances: Iterable[float]) -> None:
        self.chances = list(chances)
        self._counts: dict[int, tuple[float, Outcomes]] = {}

    def saw(self, cell: int, came: bool) -> None:
        """Learn whether a candidate of this cell was accepted; else another token was emitted."""
        if cell not in self._counts:
            self._counts[cell] = clamped(self.chances[cell]), Outcomes()
        chance, counts = self._counts[cell]
        counts.saw(chance, came)
        self.chances[cell] = counts.corrected(chance)


class Claims:
    """The chances of one drafter's claims in one text. counts: those shared with other texts, then its own. run: the
    current number of correct tokens in a row."""

    def __init__(self, counts: tuple[Outcomes, ...]) -> None:
        self._counts, self.run = counts, 0

    def chance(self, claim: float) -> float:
        """The chance of a node, given its parent."""
        chance = clamped(claim)
        for counts in self._counts:
            chance = counts.corrected(chance)
        return chance

    def hope(self, claim: float) -> float:
        """The same, more hopeful in a new text: one that suits a model better than those before it is only noticed by
        trying."""
        chance = self.chance(claim)
        odds = math.exp(_HOPE * max(0.0, self._counts[-1].unsure - _KNOWN)) * chance / (1.0 - chance)
        return odds / (1.0 + odds)

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
            if (chance := product * long / (long + depth)) < LEAST:
                break
            chances.append(chance)
        return chances

    def saw(self, claim: float, came: bool) -> None:
        """Learn whether a node with this claim was accepted; else another token was emitted."""
        self.run = self.run + 1 if came else self.run // 2
        chance = clamped(claim)
        for counts in self._counts:
            corrected = counts.corrected(chance)
            counts.saw(chance, came)
            chance = corrected


class Salts:
    """The counts that new texts start with, apart for each way of sampling: those of all salts, and those of each of
    the salts used last. Salts are stored as hashes that only this process can compute, and of texts only how accurate
    claims were. many: as how many outcomes claims count at first."""

    def __init__(self, many: float = MANY[0]) -> None:
        self._many = many, MANY[1]
        self._all = [Outcomes(*self._many) for _ in range(KINDS)]
        self._of: OrderedDict[int, Outcomes] = OrderedDict()

    def claims(self, salt: str, kind: int) -> Claims:
        """Claims for a new text."""
        of_salt = self._of.pop(hash((salt, kind)), None) or Outcomes(*self._many)
        self._of[hash((salt, kind))] = of_salt
        if len(self._of) > _SALTS:
            self._of.popitem(last=False)
        return Claims((self._all[kind], of_salt, Outcomes()))


def claimed(chain: DraftTree) -> list[float]:
    """The drafter's claim for each drafted node, given its parent; a half, if it makes none."""
    if len(chain.chances) != len(chain):
        return [0.5] * (len(chain) - 1)
    return [chance / before if before else 0.0 for before, chance in pairwise(chain.chances)]
