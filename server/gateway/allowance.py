"""How much one caller may ask for, and how much of it is used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from server.gateway.bucket import Bucket
from server.gateway.pace import Pace
from server.schemas.errors import RateLimited, Unauthorized

Positive = Annotated[int, Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings of the same names say; None is no limit."""

    max_requests_per_minute: Positive | None = None
    max_tokens_per_minute: Positive | None = None
    max_concurrent_requests: Positive | None = None


class Allowance:
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

    def _check(self, bucket: Bucket | None, what: str) -> None:
        if bucket is not None and not bucket.holds(1):
            wait = math.ceil(bucket.seconds_until(1))
            raise RateLimited(f"This key may use {bucket.per_minute} {what} per minute; try again in {wait} s", wait)

    def _bucket(self, per_minute: int | None) -> Bucket | None:
        return None if per_minute is None else Bucket(per_minute, self._clock)
