"""How soon the next request will be done, judged by those before."""

from __future__ import annotations

import math

#: A client is not sent away for longer than this: the guess is rough, and OpenAI's clients ignore more than a minute.
LONGEST = 60


class Pace:
    """The mean time requests spend here, recent ones counting more."""

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self._mean: float | None = None

    def finished(self, seconds: float) -> None:
        """A request is done that was here for ``seconds``, waiting included."""
        self._mean = seconds if self._mean is None else self._mean + self._weight * (seconds - self._mean)

    def retry_after(self, present: int) -> int:
        """Whole seconds until one of the ``present`` requests is likely to be done.

        By Little's law: requests leave at the rate present / mean time here. 1 while nothing is known.
        """
        if self._mean is None or present < 1:
            return 1
        return max(1, min(LONGEST, math.ceil(self._mean / present)))
