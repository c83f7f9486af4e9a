"""Where in a prediction a text is, and where it may be after it went its own way.

::

    prediction   the cat sat on | the  mat  and slept        text: the cat sat on | a
    in step                                                  every token was the one at the cursor
    replaced     the cat sat on   the [mat                   one token for another: go on one further
    inserted     the cat sat on  [the  mat                   a token more: go on where it was left
    matched      ... a [red  hat                             what the text ends with occurs there too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: How a place was found: where the text should be by what it ends with, elsewhere by the same, by guess.
NEAR, FAR, REPLACED, INSERTED = range(4)
KINDS = 4
#: More tokens in common, or tokens since the prediction was left, are not told apart.
MOST = 8
#: So many tokens in common are no accident, near and far: where they are is where the text is.
SURE = (3, 6)
#: Tokens that are made searchable at once, so that no step waits long: well below a millisecond.
_SLICE = 4096
#: As far ahead of where the text should be, a place is near.
_REACH = 64


class Place(NamedTuple):
    """A place of the prediction whose token may come next. length: tokens before it that the text ends with; for a
    guess, tokens since the prediction was left."""

    at: int
    kind: int
    length: int

    @property
    def sure(self) -> bool:
        """Whether the text is here for certain."""
        return self.kind <= FAR and self.length >= SURE[self.kind]

    def cell(self, depth: int) -> int:
        """Under which number the chances of its token and those behind it are kept; each that came is one in common."""
        if depth and self.kind > FAR:
            return cell_of(NEAR, depth)
        return cell_of(self.kind, self.length + depth)


def cell_of(kind: int, length: int) -> int:
    """The number of a kind and length."""
    return kind * (MOST + 1) + min(length, MOST)


class Alignment:
    """Follows a text along its prediction. begins: tokens of the text that come before what is predicted.

    places: where the text may be now, the likeliest first: one if that is certain, none if it went on behind the end.
    """

    def __init__(self, prediction: Sequence[int], begins: int) -> None:
        self.tokens = prediction
        self.places: list[Place] = []
        self._known = np.empty(0, dtype=np.int32)
        self._read = begins
        self._at = Place(0, NEAR, 0)
        #: Where the text was for certain, and how long it was then.
        self._left, self._length = 0, begins

    def follow(self, text: Sequence[int], chances: Sequence[float]) -> None:
        """Read on. chances: of a place to be right, by :meth:`Place.cell`.

        What is found depends on the text and the chances alone, not on how often it is asked for, once all of the
        prediction can be searched: of a long one a slice more each time.
        """
        taken = len(self._known)
        if taken < len(self.tokens):
            more = np.array(self.tokens[taken : taken + _SLICE], dtype=np.int32)
            self._known = np.concatenate((self._known, more))
        for length in range(self._read, len(text)):
            at, kind, common = self._at
            came = at < len(self.tokens) and self.tokens[at] == text[length]
            self._at = Place(at + 1, kind, common + 1) if came else Place(at, NEAR, 0)
            self._read = length + 1
            if not self._at.sure:
                self._find(text, chances)
            if self._at.sure:
                self._at = self._at._replace(kind=NEAR)
                self._left, self._length = self._at.at, self._read
                self.places = [self._at] if self._at.at < len(self.tokens) else []

    def _find(self, text: Sequence[int], chances: Sequence[float]) -> None:
        """Look for the end of the text, as far as it is read, and go on from the likeliest place."""
        self.places = sorted(self._places(text), key=lambda place: -chances[place.cell(0)])
        if self.places:
            first = self.places[0]
            self._at = first if first.kind <= FAR else Place(first.at, NEAR, 0)

    def _places(self, text: Sequence[int]) -> list[Place]:
        """Of each number of tokens in common the nearest place ahead (behind, if none is), then the guesses."""
        end, since, found = self._read - 1, self._read - self._length, dict[int, Place]()
        ends = np.flatnonzero(self._known[:-1] == text[end]) + 1
        for length in range(1, MOST + 1):
            if not len(ends):
                break
            at = int(ends[min(int(np.searchsorted(ends, self._left)), len(ends) - 1)])
            found[at] = Place(at, NEAR if 0 <= at - self._left <= since + _REACH else FAR, length)
            ends = ends[ends > length]
            ends = ends[self._known[ends - length - 1] == text[end - length]] if length <= end else ends[:0]
        for at, kind in ((self._left + since, REPLACED), (self._left, INSERTED)):
            if 0 < since <= MOST and at < len(self.tokens):
                found.setdefault(at, Place(at, kind, since))
        return list(found.values())
