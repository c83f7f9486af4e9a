"""How far what one who looks things up drafted is to be trusted in one sequence.

A claim is its own chance of a node, given the one before; what it is worth is, in log odds, that shifted and stretched.
Claims are mostly right about each other, and in one text too low or too high together (a text that is copied word by
word, one that only sounds alike). So two numbers are learnt rather than a table, which is done within a few steps: the
line of Platt (1999), as a Gaussian that every outcome narrows and moves (online Laplace approximation; an extended
Kalman filter of the logistic), and that widens a little, since texts change.

Their product says too much of deep nodes, as what was found at the wrong place is wrong all the way. So the share of
those at depth d that come is (L + r) / (L + r + d), the rule of succession behind r tokens in a row that were right.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from foresay.spec.tree import DraftTree

#: How unsure the shift and the stretch are in the beginning, and how much of that comes back with each node.
_SHIFT, _STRETCH, _DRIFT = 1.0, 0.03, 0.005
#: How far they may go: the stretch, and the shift.
_LEAST_STRETCH, _MOST_STRETCH, _MOST_SHIFT = 0.05, 2.0, 3.0
#: Log odds are looked at between these chances.
_UNLIKELY, _SURE = 0.02, 0.98
#: How much surer what holds for all sequences of a salt, or of all salts, is from the beginning, and how many salts are
#: remembered.
_OF_SALT, _SALTS = 0.3, 256
#: How many tokens come in a row as a rule, L above.
_LONG = 12
#: What is claimed of a node by one who says nothing.
_UNTOLD = 0.7
#: What is less likely than this is no candidate.
LEAST = 0.04


class Claims:
    """Of one sequence. before: what earlier sequences of the same salt showed, and for a new salt those of all; a new
    one begins there. unsure: how far from there it may be: less of many sequences than of one. run: tokens in a row
    that were right by now."""

    def __init__(self, before: Claims | None = None, unsure: float = 1.0) -> None:
        self.before, self._unsure, self.run = before, unsure, 0
        self._shift: float = 0.0 if before is None else before._shift
        self._stretch: float = 1.0 if before is None else before._stretch
        # The covariance of both: of the shift, between them, of the stretch.
        self._covariance = (unsure * _SHIFT, 0.0, unsure * _STRETCH)

    def chance(self, claim: float) -> float:
        """What a claim is worth here, given the node before it."""
        return _chance(self._shift + self._stretch * _odds(claim))

    def chances(self, claims: Sequence[float]) -> list[float]:
        """The chance of each node of a chain, by the claims of all, as far as any is likely enough."""
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

    def saw(self, claim: float, hit: bool) -> None:
        """A node of this claim came, or another token did."""
        self.run = self.run + 1 if hit else self.run // 2
        odds = _odds(claim)
        claims: Claims | None = self
        while claims is not None:
            claims._move(odds, hit)
            claims = claims.before

    def _move(self, odds: float, hit: bool) -> None:
        chance = _chance(self._shift + self._stretch * odds)
        shifts, both, stretches = self._covariance
        of_shift, of_stretch = shifts + both * odds, both + stretches * odds
        information = chance * (1.0 - chance)
        whole = 1.0 / information + of_shift + of_stretch * odds
        off = (hit - chance) / information / whole
        self._shift = min(max(self._shift + of_shift * off, -_MOST_SHIFT), _MOST_SHIFT)
        self._stretch = min(max(self._stretch + of_stretch * off, _LEAST_STRETCH), _MOST_STRETCH)
        kept, back = 1.0 - _DRIFT, _DRIFT * self._unsure
        self._covariance = (
            kept * (shifts - of_shift * of_shift / whole) + back * _SHIFT,
            kept * (both - of_shift * of_stretch / whole),
            kept * (stretches - of_stretch * of_stretch / whole) + back * _STRETCH,
        )


class Salts:
    """What the sequences of each salt showed, of those seen last, and those of all. Salts are kept as hashes that
    another process does not have; of texts nothing is kept but how far claims were right."""

    def __init__(self) -> None:
        self._all = Claims(unsure=_OF_SALT)
        self._of: OrderedDict[int, Claims] = OrderedDict()

    def claims(self, salt: str) -> Claims:
        """For a new sequence."""
        of_salt = self._of.pop(hash(salt), None) or Claims(self._all, _OF_SALT)
        self._of[hash(salt)] = of_salt
        if len(self._of) > _SALTS:
            self._of.popitem(last=False)
        return Claims(of_salt)


def claimed(chain: DraftTree) -> list[float]:
    """What the drafter says of each drafted node, given its parent."""
    if len(chain.chances) != len(chain):
        return [_UNTOLD] * (len(chain) - 1)
    return [chance / before if before else 0.0 for before, chance in pairwise(chain.chances)]


def _odds(chance: float) -> float:
    chance = min(max(chance, _UNLIKELY), _SURE)
    return math.log(chance / (1.0 - chance))


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-odds))
