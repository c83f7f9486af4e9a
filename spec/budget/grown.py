"""What a model's tree brings that grows by its chances.

Which of its nodes come is mostly luck, while what their chances add up to says nearly the same with less of it. So
that is remembered, and how far it is right: as a share, of each sequence, held near that of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

from spec.budget.ways import Grove

#: After so many drafts of the model that were no trees nothing is known of these any more.
_FORGOTTEN = 8
#: A level of a chain that is as likely as this is taken to be drafted.
_DEEP = 0.3
#: How far one tree moves what is expected of the next, of its sequence and of all; of all farther in the beginning.
_OWN_STEP, _STEP = 0.1, 0.02
#: As many tokens as the first guess of the share counts, and as many as the share of all counts for one sequence.
_GUESSED, _HELD = 4.0, 12.0
#: What is left of earlier trees in the share after one more: of one sequence, of all.
_KEPT, _KEPT_OF_ALL = 0.95, 0.995
#: By how much of how unsure it is the share is read too high, since what is not asked shows nothing.
_HOPE = 0.3
#: The most that the share may be.
_MOST = 1.5


@dataclass(slots=True)
class _Share:
    """Tokens that came, of those that were expected."""

    came: float = 0.0
    expected: float = 0.0

    def saw(self, came: float, expected: float, kept: float) -> None:
        self.came = kept * self.came + came
        self.expected = kept * self.expected + expected

    def near(self, guess: float, weight: float) -> float:
        return (self.came + weight * guess) / (self.expected + weight)


class Grown:
    """Of all sequences.

    Of what was long not asked for nothing is known any more: then what the model's chains do is its guess. times: that
    it became known.
    """

    def __init__(self) -> None:
        self.brings = Grove()
        self.times = self._trees = self._unasked = 0
        self._share = _Share()

    @property
    def known(self) -> bool:
        """Whether trees were drafted lately."""
        return self._trees > 0 and self._unasked < _FORGOTTEN

    def missed(self) -> None:
        """The model drafted something else."""
        self._unasked += 1

    @property
    def share(self) -> float:
        """Of the tokens that chances promise, those that come."""
        return self._share.near(1.0, _GUESSED)

    @property
    def hope(self) -> float:
        """What is added to the share as long as little is known of it."""
        return _HOPE / math.sqrt(self._share.expected + _GUESSED)

    def saw(self, grove: Grove, came: int) -> None:
        """A tree was drafted."""
        if not self.known:
            self.times, self._trees, self._share = self.times + 1, 0, _Share()
        self._trees, self._unasked = self._trees + 1, 0
        self.brings = _moved(self.brings, grove, max(_STEP, 1.0 / self._trees))
        self._share.saw(came, grove.tokens, _KEPT_OF_ALL)


class OwnGrown:
    """Of one sequence."""

    def __init__(self, all: Grown) -> None:
        self._all = all
        self._times = 0
        self._brings: Grove | None = None
        self._share = _Share()

    @property
    def share(self) -> float:
        """Of the tokens that chances promise, those that come."""
        return min(_MOST, self._share.near(self._all.share, _HELD))

    def expected(self, chain: Many[float]) -> Grove:
        """Of the next tree. chain: the chance of each node of a chain."""
        if not self._all.known:
            levels = 1.0 + sum(chance > _DEEP for chance in chain)
            return Grove(sum(chain), 2.0 * levels, levels)
        self._forget()
        brings = self._brings or self._all.brings
        return brings._replace(tokens=(self.share + self._all.hope) * brings.tokens)

    def saw(self, grove: Grove, came: int) -> None:
        """A tree was drafted whose nodes' chances add up to these tokens, and so many of them came."""
        self._all.saw(grove, came)
        self._forget()
        self._share.saw(came, grove.tokens, _KEPT)
        self._brings = _moved(self._brings or self._all.brings, grove, _OWN_STEP)

    def _forget(self) -> None:
        """What was seen before all was forgotten."""
        if self._times != self._all.times:
            self._times, self._brings, self._share = self._all.times, None, _Share()


def _moved(brings: Grove, grove: Grove, step: float) -> Grove:
    return Grove(*(old + step * (new - old) for old, new in zip(brings, grove, strict=True)))
