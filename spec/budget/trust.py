"""How far what one who looks things up drafted is to be trusted in one sequence.

::

    claims     its own chance of a node, given the one before: in log odds, shifted and stretched by what came of them
    reach      how far chains come, where the product of claims says too much (:mod:`spec.budget.reach`)
    runs       one that claims nothing: by how many tokens in a row it has been right by now, drafted ones included

Claims are mostly right about each other, and in one text too low or too high together (a text that is copied word by
word, one that only sounds alike). So two numbers are learnt rather than a table, which is done within a few steps: the
line of Platt (1999), as a Gaussian that every outcome narrows and moves (online Laplace approximation; an extended
Kalman filter of the logistic), and that drifts back a little, since texts change.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Sequence as Many
from hashlib import blake2b
from secrets import token_bytes

from spec.budget.rates import OwnRates, Rates
from spec.budget.reach import Reach
from spec.tree import DraftTree

#: How unsure the shift and the stretch are in the beginning, and how much of that comes back with each node.
_SHIFT, _STRETCH, _DRIFT = 1.0, 0.03, 0.005
#: By how much of how unsure it is the line is read too high: what is drafted is verified, and teaches.
_HOPE = 0.3
#: Log odds are looked at between these chances.
_UNLIKELY, _SURE = 0.02, 0.98
#: How much surer what holds for all sequences of a salt, or of all salts, is from the beginning, and how many salts are
#: remembered.
_OF_SALT, _SALTS = 0.3, 256
_LEAST_STRETCH, _MOST_STRETCH, _MOST_SHIFT = 0.05, 2.0, 3.0
_LEAST_INFORMATION = 1e-3
_RUN_EDGES = (1, 2, 3, 5, 9, 17)
_RUN_GUESSES = (0.15, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95)


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
        odds = _odds(claim)
        shifts, both, stretches = self._covariance
        spread = math.sqrt(max(0.0, shifts + 2 * both * odds + stretches * odds * odds))
        return _chance(self._shift + self._stretch * odds + _HOPE * spread)

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


class Runs:
    """Of a drafter that does not. now: tokens in a row that it has been right on by now."""

    def __init__(self, rates: Rates) -> None:
        self._rates = OwnRates(rates)
        self.now = 0

    def chance(self, before: float) -> float:
        """Of a node behind so many tokens that were right, or are if it is to come at all."""
        return self._rates.chance(_cell(before))

    def saw(self, before: float, hit: bool) -> None:
        """Such a node came, or another token did."""
        self._rates.saw(_cell(before), hit)

    def went(self, right: int, ended: bool) -> None:
        """So many more were right, up to one that was not, or to the last one."""
        self.now = 0 if ended else self.now + right


def of_runs() -> Rates:
    """What all sequences show of one who claims nothing."""
    return Rates(_RUN_GUESSES)


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


def behind(tree: DraftTree, before: int) -> list[float]:
    """How many tokens in a row were right where each drafted node comes, if it does."""
    depths: Many[int] = range(1, len(tree)) if tree.is_chain else tree.depths.tolist()[1:]
    return [float(before + depth - 1) for depth in depths]


def _cell(before: float) -> int:
    return bisect.bisect_right(_RUN_EDGES, before)


def _odds(chance: float) -> float:
    chance = min(max(chance, _UNLIKELY), _SURE)
    return math.log(chance / (1.0 - chance))


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-odds))
