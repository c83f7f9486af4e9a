"""How far what one who looks things up drafted is to be trusted in one sequence.

A claim is its own chance of a node, given the one before; what it is worth is, in log odds, that shifted and stretched.
How far chains come, where the product of these says too much, is learnt beside (:mod:`spec.budget.reach`).

Claims are mostly right about each other, and in one text too low or too high together (a text that is copied word by
word, one that only sounds alike). So two numbers are learnt rather than a table, which is done within a few steps: the
line of Platt (1999), as a Gaussian that every outcome narrows and moves (online Laplace approximation; an extended
Kalman filter of the logistic), and that drifts back a little, since texts change.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence as Many
from hashlib import blake2b
from secrets import token_bytes

from spec.budget.reach import MOST_REACH, Reach
from spec.tree import DraftTree

#: How unsure the shift and the stretch are in the beginning, and how much of that comes back with each node.
_SHIFT, _STRETCH, _DRIFT = 1.0, 0.03, 0.005
#: Log odds are looked at between these chances.
_UNLIKELY, _SURE = 0.02, 0.98
#: How much surer what holds for all sequences of a salt, or of all salts, is from the beginning, and how many salts are
#: remembered.
_OF_SALT, _SALTS = 0.3, 256
_LEAST_STRETCH, _MOST_STRETCH, _MOST_SHIFT = 0.05, 2.0, 3.0
_LEAST_INFORMATION = 1e-3
#: What is less likely than this is no candidate.
LEAST = 0.04


class Claims:
    """Of a drafter that says how likely each node is. before: what earlier sequences of the same salt showed, and for a
    new salt those of all; a new one begins there. unsure: how far from there it may be: less of many sequences than of
    one. reach: of all sequences of the salt."""

    def __init__(self, before: Claims | None = None, reach: Reach | None = None, unsure: float = 1.0) -> None:
        self.reach = Reach() if reach is None else reach
        self._before = before
        self._shift: float = 0.0 if before is None else before._shift
        self._stretch: float = 1.0 if before is None else before._stretch
        self._unsure = unsure
        # The covariance of both: of the shift, between them, of the stretch.
        self._covariance = (self._unsure * _SHIFT, 0.0, self._unsure * _STRETCH)

    def chance(self, claim: float) -> float:
        """What a claim is worth here, given the node before it."""
        return _chance(self._shift + self._stretch * _odds(claim))

    def chances(self, tree: DraftTree, claims: Many[float]) -> list[float]:
        """The chance of each drafted node, by the claims of all; of a chain, as far as any is likely enough."""
        chances, parents = [1.0], range(len(claims)) if tree.is_chain else tree.parents.tolist()[1:]
        last, given = -1.0, 0.0
        for parent, claim in zip(parents, claims, strict=True):
            if claim != last:  # deep nodes mostly have the same claim
                last, given = claim, self.chance(claim)
            chances.append(chances[parent] * given)
            if tree.is_chain and chances[-1] < LEAST / MOST_REACH:
                break
        return chances[1:]

    def saw(self, claim: float, hit: bool) -> None:
        """A node of this claim came, or another token did."""
        odds = _odds(claim)
        claims: Claims | None = self
        while claims is not None:
            claims._move(odds, hit)
            claims = claims._before

    def _move(self, odds: float, hit: bool) -> None:
        chance = _chance(self._shift + self._stretch * odds)
        information = max(chance * (1.0 - chance), _LEAST_INFORMATION)
        shifts, both, stretches = self._covariance
        of_shift, of_stretch = shifts + both * odds, both + stretches * odds
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
    """What the sequences of each salt showed, of those seen last, and those of all. Salts are kept as hashes; of texts
    nothing is kept but how far claims were right."""

    def __init__(self) -> None:
        self._all = Claims(unsure=_OF_SALT)
        self._of: OrderedDict[bytes, Claims] = OrderedDict()
        self._key = token_bytes(16)

    def claims(self, salt: str) -> Claims:
        """For a new sequence."""
        hashed = blake2b(salt.encode(), digest_size=16, key=self._key).digest()
        known = self._of.get(hashed)
        if known is None:
            known = self._of[hashed] = Claims(self._all, unsure=_OF_SALT)
            if len(self._of) > _SALTS:
                self._of.popitem(last=False)
        self._of.move_to_end(hashed)
        return Claims(known, known.reach)


def claimed(tree: DraftTree) -> list[float]:
    """What the drafter says of each drafted node, given its parent; empty if it says nothing."""
    chances = tree.chances
    if len(chances) != len(tree):
        return []
    parents = range(len(chances) - 1) if tree.is_chain else tree.parents.tolist()[1:]
    return [
        chance / chances[parent] if chances[parent] else 0.0
        for chance, parent in zip(chances[1:], parents, strict=True)
    ]


def _odds(chance: float) -> float:
    chance = min(max(chance, _UNLIKELY), _SURE)
    return math.log(chance / (1.0 - chance))


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-odds))
