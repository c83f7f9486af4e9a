"""The caller of the request that the current task serves, their rate limits, and their share of limited resources.

Of a limited resource, no key may hold more than remains free. So something is left for the next caller: of two keys
that want everything the first gets half and the second a quarter, and both a third once the first gives some back. If
there is only one key, or none, it may use everything.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from foresay.server.schemas.bounds import ID
from foresay.server.schemas.errors import ApiError, RateLimited, Unauthorized
from foresay.spec.request import Request

# -- when to retry ----------------------------------------------------------------------------


#: Longest Retry-After, in seconds: the estimate is rough, and OpenAI's clients ignore more than a minute.
LONGEST = 60
#: Weight of the latest request in the mean.
_WEIGHT = 0.2


class Pace:
    """The mean time that requests take, weighted towards recent ones."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def finished(self, seconds: float) -> None:
        """A request took ``seconds``, including waiting."""
        self._mean = seconds if self._mean is None else self._mean + _WEIGHT * (seconds - self._mean)

    def retry_after(self, present: int) -> int:
        """Whole seconds until one of the ``present`` requests is likely to finish.

        By Little's law: requests leave at the rate present / mean time. 1 while the mean is unknown.
        """
        if self._mean is None or present < 1:
            return 1
        return max(1, min(LONGEST, math.ceil(self._mean / present)))


# -- a token bucket ----------------------------------------------------------------------------------------------------


#: Tolerance for rounding: a bucket must not be short exactly when it should be full enough.
_SLACK = 1e-6


class TokenBucket:
    """Holds up to ``per_minute`` and refills by as much per minute.

    Spending may exceed the level (an answer's length is known only afterwards): the level is then negative, and nothing
    is available until it has refilled. So over any time *t* in minutes at most ``per_minute * (1 + t)`` is spent, plus
    what was in progress when it ran out.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._at = float(per_minute), clock()

    @property
    def level(self) -> float:
        """What is available now; negative if overspent."""
        passed = max(0.0, self._clock() - self._at)
        return min(float(self.per_minute), self._level + passed * self.per_minute / 60)

    def holds(self, amount: float) -> bool:
        """Whether ``amount`` is available now."""
        return self.level + _SLACK >= amount

    def spend(self, amount: float) -> None:
        """Take ``amount``, available or not."""
        self._level, self._at = self.level - amount, self._clock()

    def seconds_until(self, amount: float) -> float:
        """Seconds until ``amount``, capped at ``per_minute``, is available if nothing is spent meanwhile."""
        return max(0.0, min(amount, self.per_minute) - self.level) * 60 / self.per_minute


# -- limits of one caller -----------------------------------------------------------------------------------

Positive = Annotated[int, Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the same names; None: no limit."""

    max_requests_per_minute: Positive | None = None
    max_tokens_per_minute: Positive | None = None
    max_concurrent_requests: Positive | None = None


class RateLimiter:
    """The limits of one caller and what is used of them.

    revoked: the key was removed, though a connection opened with it may still exist. alone: there is no other caller.
    """

    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = 0
        self.revoked, self.alone = False, True
        self._clock = clock
        self._pace = Pace()
        self.change(limits or Limits())

    def change(self, limits: Limits) -> None:
        """Change the limits; running requests continue."""
        self.limits = limits
        self.requests = self._bucket(limits.max_requests_per_minute)
        self.tokens = self._bucket(limits.max_tokens_per_minute)

    def enter(self, choices: int, prompt_tokens: int) -> None:
        """Charge a request that is about to run; raises :class:`RateLimited`, charging nothing, if it may not."""
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
        """Raise :class:`RateLimited` if the request limit is used up, before reading a body."""
        self._check(self.requests, "requests")

    def refused(self) -> None:
        """Charge an invalid request: reading it has a cost, too."""
        if self.requests is not None:
            self.requests.spend(1)

    def spend(self, tokens: int) -> None:
        """Charge tokens of a running request."""
        if self.tokens is not None:
            self.tokens.spend(tokens)

    def leave(self, choices: int, seconds: float) -> None:
        """A request that entered with ``choices`` choices has ended after ``seconds``."""
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


class Caller(msgspec.Struct, frozen=True):
    """One user of the server. name: of their key, for the log. tenant: prefixes of prompts, stored responses and limits
    are shared only within one tenant. rate_limiter: their limits."""

    name: str = ""
    tenant: str = ""
    rate_limiter: RateLimiter = msgspec.field(default_factory=RateLimiter)


ANYONE = Caller()


@dataclass(slots=True)
class Meter:
    """Tokens of one HTTP request, or of all requests on one WebSocket."""

    prompt_tokens: int = 0
    output_tokens: int = 0


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP request that the current task serves, or the one that opened its WebSocket. id: empty if there is none.
    waited: seconds, for its model. body_bytes: of its body, or of the message on the WebSocket. unknown: fields of its
    body that the API does not have, each with a hint at the one meant. release: releases the model's lease.
    """

    caller: Caller = ANYONE
    id: str = ""
    meter: Meter = msgspec.field(default_factory=Meter)
    waited: float = 0.0
    body_bytes: int = 0
    unknown: tuple[tuple[str, str], ...] = ()
    release: Callable[[], None] = lambda: None


NO_REQUEST = RequestContext()
#: Set for each HTTP request; tasks that it starts inherit it.
CONTEXT: ContextVar[RequestContext] = ContextVar("request", default=NO_REQUEST)


def serve(**changes: Any) -> None:
    """Change the current task's request context."""
    CONTEXT.set(msgspec.structs.replace(CONTEXT.get(), **changes))


ID_WANTED = "1 to 128 letters, digits or _ - . : / + = @"


def usable_id(given: str) -> bool:
    """Whether a client's request id can be used."""
    return ID.fullmatch(given) is not None


# -- before a request runs, in any API --------------------------------------------------------------


@contextmanager
def admitted(requests: Sequence[Request]) -> Iterator[Callable[[int], None]]:
    """Admit the choices of one answer, charged to the caller; yields a function to call with each count of new tokens.

    Raises :class:`~foresay.server.schemas.errors.RateLimited` if the caller has used up a limit.
    """
    caller, meter = CONTEXT.get().caller, CONTEXT.get().meter
    rate_limiter = caller.rate_limiter
    prompt_tokens = sum(len(request.prompt) for request in requests if request.fork_of is None)
    rate_limiter.enter(len(requests), prompt_tokens)
    meter.prompt_tokens += prompt_tokens

    def spend(tokens: int) -> None:
        meter.output_tokens += tokens
        rate_limiter.spend(tokens)

    began = time.monotonic()
    try:
        yield spend
    finally:
        rate_limiter.leave(len(requests), time.monotonic() - began)


class Shared:
    """A limited amount of slots, bytes or the like, shared fairly. most: for all callers together."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self._held: Counter[str] = Counter()

    @property
    def own(self) -> int:
        """What the caller holds."""
        return self._held[CONTEXT.get().caller.tenant]

    def fits(self, amount: int, caller: Caller) -> bool:
        """Whether a caller may hold ``amount`` more. One that holds nothing gets whatever is free."""
        own, free = self._held[caller.tenant], self.most - self.used - amount
        fair = caller.rate_limiter.alone or not own or own + amount <= free
        return not amount or (free >= 0 and fair)

    def take(self, amount: int, refusal: Callable[[], ApiError]) -> None:
        """Let the current caller hold ``amount`` more, or raise ``refusal``."""
        if not self.fits(amount, CONTEXT.get().caller):
            raise refusal()
        self.change(CONTEXT.get().caller.tenant, amount)

    def give(self, amount: int) -> None:
        """Let the current caller hold ``amount`` less."""
        self.change(CONTEXT.get().caller.tenant, -amount)

    @contextmanager
    def holding(self, amount: int, refusal: Callable[[], ApiError]) -> Iterator[None]:
        """Hold ``amount`` within the context."""
        with self.growing(refusal) as more:
            more(amount)
            yield

    @contextmanager
    def growing(self, refusal: Callable[[], ApiError]) -> Iterator[Callable[[int], None]]:
        """Hold a growing amount within the context; yields a function that adds to it."""
        tenant, held = CONTEXT.get().caller.tenant, 0

        def more(amount: int) -> None:
            nonlocal held
            self.take(amount, refusal)
            held += amount

        try:
            yield more
        finally:
            self.change(tenant, -held)

    def change(self, tenant: str, amount: int) -> None:
        """Change what a caller holds, by a positive or negative amount."""
        self.used += amount
        self._held[tenant] += amount
        assert self._held[tenant] >= 0, "nobody gives what it does not hold"
        if not self._held[tenant]:
            del self._held[tenant]
