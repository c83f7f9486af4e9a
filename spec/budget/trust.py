"""How far what one who looks things up drafted is to be trusted in one sequence.

::

    claims     its own chance of a node, given the one before: in log odds, shifted and stretched by what came of them
    reach      their product is too much of deep nodes: what was found at the wrong place is wrong all the way
    runs       one that claims nothing: by how many tokens in a row it has been right by now, drafted ones included

Claims are mostly right about each other, and in one text too low or too high together (a text that is copied word by
word, one that only sounds alike). So two numbers are learnt rather than a table, which is done within a few steps:
the line of Platt (1999), by gradients of the log loss.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Sequence as Many
from hashlib import blake2b
from secrets import token_bytes

from spec.budget.rates import OwnRates, Rates
from spec.tree import DraftTree

#: How far one node moves the shift and the stretch, and how many nodes' worth farther in the beginning.
_SHIFTED, _STRETCHED, _EAGER = 0.2, 0.05, 4.0
#: Log odds are looked at between these chances.
_UNLIKELY, _SURE = 0.02, 0.98
#: How much more slowly what holds for all sequences of a salt moves, and how many salts are remembered.
_OF_SALT, _SALTS = 0.2, 256
_LEAST_STRETCH, _MOST_STRETCH, _MOST_SHIFT = 0.1, 1.5, 2.0
#: Depths from which on nodes come another share as often as expected, that share before anybody knows, as how many
#: nodes' worth this counts, the most it may be, and what is left of a draft after one more.
_DEPTH_EDGES, _DEPTH_GUESSES = (3, 5, 9, 17), (1.0, 1.0, 0.8, 0.5, 0.4)
_REACH_HELD, _MOST_REACH, _REACH_KEPT = 4.0, 2.0, 0.99
_RUN_EDGES = (1, 2, 3, 5, 9, 17)
_RUN_GUESSES = (0.15, 0.4, 0.55, 0.7, 0.8, 0.9, 0.95)


class Claims:
    """Of a drafter that says how likely each node is. of_salt: what earlier sequences of the same salt showed, where a
    new one begins; None for that itself, which learns more slowly. reach: of all sequences of the salt."""

    def __init__(self, of_salt: Claims | None = None) -> None:
        self.reach: Reach = Reach() if of_salt is None else of_salt.reach
        self._of_salt, self._seen = of_salt, 0
        self._shift: float = 0.0 if of_salt is None else of_salt._shift
        self._stretch: float = 1.0 if of_salt is None else of_salt._stretch
        self._pace = _OF_SALT if of_salt is None else 1.0

    def chance(self, claim: float) -> float:
        """What a claim is worth here, given the node before it."""
        return 1.0 / (1.0 + math.exp(-self._shift - self._stretch * _odds(claim)))

    def saw(self, claim: float, hit: bool) -> None:
        """A node of this claim came, or another token did."""
        self._seen += 1
        off = self._pace * (hit - self.chance(claim)) * (1.0 + _EAGER / self._seen)
        self._shift = min(max(self._shift + _SHIFTED * off, -_MOST_SHIFT), _MOST_SHIFT)
        stretch = self._stretch + _STRETCHED * off * _odds(claim)
        self._stretch = min(max(stretch, _LEAST_STRETCH), _MOST_STRETCH)
        if self._of_salt is not None:
            self._of_salt.saw(claim, hit)


class Reach:
    """How often nodes came by their depth, as a share of what was expected of them."""

    def __init__(self) -> None:
        self._came = [_REACH_HELD * share for share in _DEPTH_GUESSES]
        self._expected = [_REACH_HELD] * len(_DEPTH_GUESSES)

    def chances(self, expected: Many[float], tree: DraftTree) -> list[float]:
        """Of each drafted node, of what was expected of it; never more than of its parent."""
        chances = [1.0]
        shares = [min(came / of, _MOST_REACH) for came, of in zip(self._came, self._expected, strict=True)]
        for chance, (parent, depth) in zip(expected, _places(tree), strict=True):
            chances.append(min(shares[_group(depth)] * chance, chances[parent]))
        return chances[1:]

    def saw(self, expected: Many[float], tree: DraftTree, came: Many[int], known: int) -> None:
        """The nodes ``came`` came, and of those no deeper than ``known`` no other did."""
        hits, sums = [0.0] * len(_DEPTH_GUESSES), [0.0] * len(_DEPTH_GUESSES)
        for node, (chance, (_, depth)) in enumerate(zip(expected, _places(tree), strict=True), start=1):
            if depth <= known:
                hits[_group(depth)] += node in came
                sums[_group(depth)] += chance
        for group, guess in enumerate(_DEPTH_GUESSES):
            if sums[group]:
                held = _REACH_HELD * guess
                self._came[group] = held + (self._came[group] - held) * _REACH_KEPT + hits[group]
                self._expected[group] = _REACH_HELD + (self._expected[group] - _REACH_HELD) * _REACH_KEPT + sums[group]


def _places(tree: DraftTree) -> list[tuple[int, int]]:
    """Parent and depth of each drafted node."""
    if tree.is_chain:
        return [(depth - 1, depth) for depth in range(1, len(tree))]
    return list(zip(tree.parents.tolist()[1:], tree.depths.tolist()[1:], strict=True))


def _group(depth: int) -> int:
    return bisect.bisect_right(_DEPTH_EDGES, depth)


class Salts:
    """What the sequences of each salt showed, of those seen last. Salts are kept as hashes."""

    def __init__(self) -> None:
        self._of: OrderedDict[bytes, Claims] = OrderedDict()
        self._key = token_bytes(16)

    def claims(self, salt: str) -> Claims:
        """For a new sequence."""
        hashed = blake2b(salt.encode(), digest_size=16, key=self._key).digest()
        known = self._of.get(hashed)
        if known is None:
            known = self._of[hashed] = Claims()
            if len(self._of) > _SALTS:
                self._of.popitem(last=False)
        self._of.move_to_end(hashed)
        return Claims(known)


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
