"""Who sent the request that the running task serves, how much they may ask for, and their share of what there
is only so much of.

Of what there is only so much of, no key holds more than stays free. So whoever comes next finds something: of two keys
that want everything the first gets half and the second a quarter, and both a third as soon as the first gives some
back. The only key there is, or a server without keys, may use all.
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


class CallerUsage(msgspec.Struct, eq=False):
    """What one caller has used since the server started, or since the key was added. requests: those that ran.
    last_request: when the last of them began. Times are in seconds since 1970."""

    since: int = msgspec.field(default_factory=lambda: int(time.time()))
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_request: int | None = None


class Caller(msgspec.Struct, frozen=True):
    """One user of the server. name: of their key, for the log. tenant: prefixes of prompts, stored responses and limits
    are shared only within one tenant. rate_limiter: how much they may ask for. usage: how much they have used."""

    name: str = ""
    tenant: str = ""
    rate_limiter: RateLimiter = msgspec.field(default_factory=RateLimiter)
    usage: CallerUsage = msgspec.field(default_factory=CallerUsage)


ANYONE = Caller()


@dataclass(slots=True)
class Meter:
    """Tokens of one HTTP request, or of everything that came over one WebSocket."""

    prompt_tokens: int = 0
    output_tokens: int = 0


def _nothing() -> None:
    """There is nothing to give back."""


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP request that the running task serves, or the one that opened its WebSocket. id: empty where there is
    none. waited: seconds, for its model. release: gives the model back.
    """

    caller: Caller = ANYONE
    id: str = ""
    meter: Meter = msgspec.field(default_factory=Meter)
    waited: float = 0.0
    release: Callable[[], None] = _nothing


NO_REQUEST = RequestContext()
#: Set anew for each HTTP request; tasks that it starts inherit it.
CONTEXT: ContextVar[RequestContext] = ContextVar("request", default=NO_REQUEST)


def serve(**changes: Any) -> None:
    """From here on the running task serves a request with these changes."""
    CONTEXT.set(msgspec.structs.replace(CONTEXT.get(), **changes))


ID_WANTED = "1 to 128 letters, digits or _ - . : / + = @"


def usable_id(given: str) -> bool:
    """Whether a client's id for its request can be taken over."""
    return ID.fullmatch(given) is not None


# -- before a request runs, whichever API it came through --------------------------------------------------------------


@contextmanager
def admitted(requests: Sequence[Request]) -> Iterator[Callable[[int], None]]:
    """Let the choices of one answer run, at the caller's charge; yields what to call with each count of new tokens.

    Raises :class:`~foresay.server.schemas.errors.RateLimited` if the caller has used up what it may.
    """
    caller, meter = CONTEXT.get().caller, CONTEXT.get().meter
    rate_limiter, usage = caller.rate_limiter, caller.usage
    prompt_tokens = sum(len(request.prompt) for request in requests if request.fork_of is None)
    rate_limiter.enter(len(requests), prompt_tokens)
    meter.prompt_tokens += prompt_tokens
    usage.requests += 1
    usage.prompt_tokens += prompt_tokens
    usage.last_request = int(time.time())

    def spend(tokens: int) -> None:
        meter.output_tokens += tokens
        usage.completion_tokens += tokens
        rate_limiter.spend(tokens)

    began = time.monotonic()
    try:
        yield spend
    finally:
        rate_limiter.leave(len(requests), time.monotonic() - began)


class Shared:
    """So many places, bytes or the like. most: of all callers together."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self._held: Counter[str] = Counter()

    @property
    def own(self) -> int:
        """What the caller holds."""
        return self._held[CONTEXT.get().caller.tenant]

    def fits(self, amount: int, caller: Caller) -> bool:
        """Whether a caller may hold so much more. One that holds nothing gets whatever is free."""
        own, free = self._held[caller.tenant], self.most - self.used - amount
        fair = caller.rate_limiter.alone or not own or own + amount <= free
        return not amount or (free >= 0 and fair)

    def take(self, amount: int, refusal: Callable[[], ApiError]) -> None:
        """Let the caller of this context hold so much more, or raise."""
        if not self.fits(amount, CONTEXT.get().caller):
            raise refusal()
        self.change(CONTEXT.get().caller.tenant, amount)

    def give(self, amount: int) -> None:
        """The caller holds so much less."""
        self.change(CONTEXT.get().caller.tenant, -amount)

    @contextmanager
    def holding(self, amount: int, refusal: Callable[[], ApiError]) -> Iterator[None]:
        """Hold so much for a while."""
        self.take(amount, refusal)
        tenant = CONTEXT.get().caller.tenant
        try:
            yield
        finally:
            self.change(tenant, -amount)

    @contextmanager
    def growing(self, refusal: Callable[[], ApiError]) -> Iterator[Callable[[int], None]]:
        """Hold for a while what becomes more and more; yields what to call with each part of it."""
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
        """A caller holds so much more, or less."""
        self.used += amount
        self._held[tenant] += amount
        assert self._held[tenant] >= 0, "nobody gives what it does not hold"
        if not self._held[tenant]:
            del self._held[tenant]
