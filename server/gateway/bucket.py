"""A token bucket: so much a minute, with a minute's worth at once."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Time is a float: a bucket asked exactly when it should be full enough must not be a rounding error short.
_SLACK = 1e-6


class Bucket:
    """Holds up to ``per_minute`` and fills by as much a minute.

    What is spent may be more than what is left (the length of an answer is known when it has been given): the bucket
    then owes, and nothing can be had until it has filled up again. So over any time *t* in minutes no more than
    ``per_minute * (1 + t)`` is spent, and what was under way when it ran dry.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._at = float(per_minute), clock()

    @property
    def level(self) -> float:
        """What can be had now; below zero what is owed."""
        passed = max(0.0, self._clock() - self._at)
        return min(float(self.per_minute), self._level + passed * self.per_minute / 60)

    def holds(self, amount: float) -> bool:
        """Whether ``amount`` can be had now."""
        return self.level + _SLACK >= amount

    def spend(self, amount: float) -> None:
        """Take ``amount``, held or not."""
        self._level, self._at = self.level - amount, self._clock()

    def seconds_until(self, amount: float) -> float:
        """How long until ``amount`` can be had if nothing is spent meanwhile; no more than ``per_minute`` ever can."""
        return max(0.0, min(amount, self.per_minute) - self.level) * 60 / self.per_minute
