"""What a model's trees bring that grow by their chances.

Which of its nodes come is mostly luck, while what their chances add up to says nearly the same with less of it. So
that is remembered, and how much of it is kept: as a share, of each sequence, held near that of all.
"""

from __future__ import annotations

import math

from spec.budget.weigh import Grove

#: What is expected of a tree before anybody knows, and as many trees as that counts: bad luck in the first ones should
#: not put a model to rest.
_GUESS, _TREES = Grove(1.0, 4.0, 2.0), 4
#: How far one tree moves what is expected of the next; farther in the beginning.
_STEP = 0.02
#: As many promised tokens as the first guess of a share counts, and as many as that of all does for one sequence.
_GUESSED, _HELD = 8.0, 12.0
#: What is left of earlier trees in a share after one more: of one sequence, of all.
_OWN_KEPT, _KEPT = 0.95, 0.995
#: By how much of how unsure it is the share is read too high: what is not asked shows nothing.
_HOPE = 0.5


class Share:
    """Tokens that came, of those that were promised; as ``guess`` says, as long as few were."""

    __slots__ = ("_came", "_kept", "_promised", "_weight", "guess")

    def __init__(self, guess: float, weight: float, kept: float = _KEPT) -> None:
        self.guess, self._weight, self._kept = guess, weight, kept
        self._came = self._promised = 0.0

    @property
    def kept(self) -> float:
        """Of what is promised, what comes."""
        return (self._came + self._weight * self.guess) / (self._promised + self._weight)

    @property
    def hope(self) -> float:
        """The same, read hopefully."""
        return self.kept + _HOPE / math.sqrt(self._promised + self._weight)

    def saw(self, came: float, promised: float) -> None:
        """A tree promised so many tokens, and so many came."""
        self._came = self._kept * self._came + came
        self._promised = self._kept * self._promised + promised


class Promises:
    """Of all sequences."""

    def __init__(self) -> None:
        self.brings, self._trees = _GUESS, 0
        self.share = Share(1.0, _GUESSED)

    def own(self) -> Share:
        """How far one sequence keeps them, before anything is known of it."""
        return Share(1.0, _HELD, _OWN_KEPT)

    def expected(self, own: Share, levels: int) -> Grove:
        """Of the next tree of a sequence, if it may have so many levels."""
        own.guess = self.share.hope
        tokens, nodes, deep = self.brings
        return Grove(min(own.kept * tokens, levels), nodes, min(deep, levels))

    def saw(self, own: Share, grove: Grove, came: int) -> None:
        """A tree was drafted whose nodes' chances add up to these tokens, and so many of them came."""
        self._trees += 1
        step = max(_STEP, 1.0 / (_TREES + self._trees))
        self.brings = Grove(*(old + step * (new - old) for old, new in zip(self.brings, grove, strict=True)))
        self.share.saw(came, grove.tokens)
        own.saw(came, grove.tokens)
