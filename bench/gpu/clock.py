"""The benchmark's clock: nothing is begun that no longer fits, and what was left out is said."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self


class Clock:
    """A time limit in seconds from now on, and the list of what did not fit into it.

    A slice is a part's own limit inside this one; it writes into the same list.
    """

    def __init__(self, limit: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun = now()
        self.end = self._begun + limit
        self.skipped: list[str] = []

    @property
    def spent(self) -> float:
        """Seconds since it was started."""
        return self._now() - self._begun

    @property
    def left(self) -> float:
        """Seconds until its end; 0 when that is past."""
        return max(0.0, self.end - self._now())

    def fits(self, what: str, seconds: float) -> bool:
        """Whether there is time for ``what``, which takes about ``seconds``; if not it is noted as left out."""
        if seconds <= self.left:
            return True
        self.skipped.append(what)
        return False

    def slice(self, limit: float) -> Self:
        """A clock of its own that ends with this one at the latest."""
        part = type(self)(min(limit, self.left), now=self._now)
        part.skipped = self.skipped
        return part
