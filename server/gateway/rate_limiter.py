"""How much one caller may ask for, and how much of it is used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from server.schemas.errors import RateLimited, Unauthorized

# -- how soon the next request will be done ----------------------------------------------------------------------------


#: A client is not sent away for longer than this: the guess is rough, and OpenAI's clients ignore more than a minute.
LONGEST = 60
#: How much the latest request counts for the mean.
_WEIGHT = 0.2


class Pace:
    """The mean time requests spend here, recent ones counting more."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def finished(self, seconds: float) -> None:
        """A request is done that was here for ``seconds``, waiting included."""
        self._mean = seconds if self._mean is None else self._mean + _WEIGHT * (seconds - self._mean)

    def retry_after(self, present: int) -> int:
        """Whole seconds until one of the ``present`` requests is likely to be done.

        By Little's law: requests leave at the rate present / mean time here. 1 while nothing is known.
        """
        if self._mean is None or present < 1:
            return 1
        return max(1, min(LONGEST, math.ceil(self._mean / present)))


# -- a token bucket ----------------------------------------------------------------------------------------------------


#: Time is a float: a bucket asked exactly when it should be full enough must not be a rounding error short.
_SLACK = 1e-6


class TokenBucket:
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


# -- how much one caller may ask for -----------------------------------------------------------------------------------

Positive = Annotated[int, Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings of the same names say; None is no limit."""

    max_requests_per_minute: Positive | None = None
    max_tokens_per_minute: Positive | None = None
    max_concurrent_requests: Positive | None = None


class RateLimiter:
    """The limits of one caller and what is used of them.

    revoked: the key is gone, though a connection that was opened with it may live on. alone: there is no other caller.
    """

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = 0
        self.revoked, self.alone = False, True
        self._clock = clock
        self._pace = Pace()
        self.change(limits or Limits())

    def change(self, limits: Limits) -> None:
        """Other limits from now on; what runs goes on."""
        self.limits = limits
        self.requests = self._bucket(limits.max_requests_per_minute)
        self.tokens = self._bucket(limits.max_tokens_per_minute)

    def enter(self, choices: int, prompt_tokens: int) -> None:
        """Charge a request that is about to run; :class:`RateLimited` and nothing charged if it may not."""
        if self.revoked:
            raise Unauthorized("This API key is no longer valid")
        self._check_running(choices)
        self._check(self.requests, "requests")
        self._check(self.tokens, "tokens")
        self.running += choices
        if self.requests is not None:
            self.requests.spend(1)
        self.spend(prompt_tokens)

    def check(self) -> None:
        """Raise :class:`RateLimited` if not even a wrong request may be looked at."""
        self._check(self.requests, "requests")

    def refused(self) -> None:
        """Charge a request that was looked at and is wrong: reading it costs, too."""
        if self.requests is not None:
            self.requests.spend(1)

    def spend(self, tokens: int) -> None:
        """Charge tokens of a running request."""
        if self.tokens is not None:
            self.tokens.spend(tokens)

    def leave(self, choices: int, seconds: float) -> None:
        """A request that entered with as many choices is over, ``seconds`` later."""
        self.running -= choices
        self._pace.finished(seconds)

    def _check_running(self, choices: int) -> None:
        most = self.limits.max_concurrent_requests
        if most is None or self.running + choices <= most:
            return
        if choices > most:
            message = f"This request asks for {choices} choices at once; this key may run {most}"
            raise RateLimited(message, retry_after=None)
        message = f"{self.running} requests of this key are running or waiting; it may have {most} at once"
        raise RateLimited(message, self._pace.retry_after(self.running))

    def _check(self, bucket: TokenBucket | None, what: str) -> None:
        if bucket is not None and not bucket.holds(1):
            wait = math.ceil(bucket.seconds_until(1))
            raise RateLimited(f"This key may use {bucket.per_minute} {what} per minute; try again in {wait} s", wait)

    def _bucket(self, per_minute: int | None) -> TokenBucket | None:
        return None if per_minute is None else TokenBucket(per_minute, self._clock)
