"""The time of a step that taking in and giving back may have; what does not fit waits for the next step."""

from __future__ import annotations

import time

from foresay.drafters.suffix.contexts import Contexts

#: Seconds of each step. Half a millisecond below what is promised, for the piece that was begun in time.
SLICE = 0.5e-3
#: Tokens taken in, or entries given back, between two looks at the clock.
PIECE = 16


class Slices:
    """Hands out one slice a step. seconds: how long it is. One piece is taken in however late it is."""

    def __init__(self, seconds: float = SLICE) -> None:
        self._seconds, self._until = seconds, 0.0
        self._owed = True
        self._seen: set[str] = set()

    def begin(self) -> None:
        """A step begins: drafts are asked for."""
        self._until = time.perf_counter() + self._seconds
        self._owed = True
        self._seen.clear()

    def extend(self, id: str) -> None:
        """A chunk of a prompt was computed, in the same step or, if it is the second one of its sequence, the next."""
        if id in self._seen:
            self.begin()
        self._seen.add(id)

    def take(self, text: Contexts) -> bool:
        """Take in of a text as much as there is time for; whether that is all of it."""
        while (behind := text.behind) > 0 and (self._owed or time.perf_counter() < self._until):
            text.take(PIECE)
            self._owed = False
        return behind <= 0

    def dispose(self, text: Contexts) -> bool:
        """Give back of its memory as much as there is time for; whether that is all of it."""
        while not text.disposed and time.perf_counter() < self._until:
            text.dispose(PIECE)
        return text.disposed
