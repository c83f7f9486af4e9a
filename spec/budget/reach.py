"""How far the chains of one who looks things up come, beside what their nodes' own chances say.

The chances of nodes given the one before multiply to too much of deep ones: what was found at the wrong place is wrong
all the way. How far a chain comes does not depend on how much of it was drafted, so it is followed through the text
until it ends, step after step (:class:`Pursuit`); what was drafted alone would never show that more had come.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Many

#: Depths from which on nodes come another share as often as expected, that share before anybody knows, as how many
#: nodes' worth this counts, the most it may be, and what is left of a chain after one more.
_DEPTH_EDGES, _DEPTH_GUESSES = (3, 5, 9, 17), (1.0, 0.95, 0.8, 0.6, 0.5)
_HELD, MOST_REACH, _KEPT = 4.0, 2.0, 0.98


class Reach:
    """How often nodes of chains came by their depth, as a share of what was expected of them."""

    def __init__(self) -> None:
        self._came = [_HELD * share for share in _DEPTH_GUESSES]
        self._expected = [_HELD] * len(_DEPTH_GUESSES)

    def chances(self, expected: Many[float]) -> list[float]:
        """Of each node of a chain, of what was expected of it; never more than of the one before."""
        chances, before = [], 1.0
        shares = [min(came / of, MOST_REACH) for came, of in zip(self._came, self._expected, strict=True)]
        for depth, chance in enumerate(expected, start=1):
            before = min(shares[_group(depth)] * chance, before)
            chances.append(before)
        return chances

    def saw(self, expected: Many[float], right: int) -> None:
        """Of a chain so many nodes came, and no other."""
        hits, sums = [0.0] * len(_DEPTH_GUESSES), [0.0] * len(_DEPTH_GUESSES)
        for depth, chance in enumerate(expected, start=1):
            group = _group(depth)
            hits[group] += depth <= right
            sums[group] += chance
        for group, guess in enumerate(_DEPTH_GUESSES):
            if sums[group]:
                held = _HELD * guess
                self._came[group] = held + (self._came[group] - held) * _KEPT + hits[group]
                self._expected[group] = _HELD + (self._expected[group] - _HELD) * _KEPT + sums[group]


class Pursuit:
    """Follows a chain of one sequence through what is written, from the step in which it was found until it is known
    how far it came; then the next one.

    reach: learns of it.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._tokens: Many[int] = ()
        self._expected: Many[float] = ()
        self._right = 0

    @property
    def idle(self) -> bool:
        """Whether no chain is followed."""
        return not self._tokens

    def begin(self, tokens: Many[int], expected: Many[float]) -> None:
        """Follow a chain that goes on with these tokens. expected: of each of them, as far as any was."""
        self._tokens, self._expected, self._right = tokens[: len(expected)], expected, 0

    def saw(self, emitted: Many[int]) -> None:
        """The text goes on with these tokens."""
        for token in emitted:
            if not self._tokens:
                return
            hit = self._tokens[self._right] == token
            self._right += hit
            if not hit or self._right == len(self._tokens):
                self._reach.saw(self._expected, self._right)
                self._tokens = ()


def _group(depth: int) -> int:
    return bisect.bisect_right(_DEPTH_EDGES, depth)
