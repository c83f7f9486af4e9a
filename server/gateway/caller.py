"""Who sent the request that the running task serves, and their share of what there is only so much of.

Of what there is only so much of, no key holds more than stays free. So whoever comes next finds something: of two keys
that want everything the first gets half and the second a quarter, and both a third as soon as the first gives some
back. The only key there is, or a server without keys, may use all.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from server.gateway.rate_limiter import RateLimiter
from server.schemas.errors import ApiError
from spec.request import Request


class Caller(msgspec.Struct, frozen=True):
    """One user of the server. name: of their key, for the log. tenant: prefixes of prompts, stored responses and limits
    are shared only within one tenant. rate_limiter: how much they may ask for."""

    name: str = ""
    tenant: str = ""
    rate_limiter: RateLimiter = msgspec.field(default_factory=RateLimiter)


ANYONE = Caller()
#: Set by the gateway for each HTTP request and each WebSocket connection.
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
#: The id of the HTTP request, or of the one that opened the WebSocket, that the running task serves.
REQUEST_ID: ContextVar[str] = ContextVar("request_id")
#: Ids stand in headers, in lines of logs and in every event of a stream.
ID_WANTED = "1 to 128 letters, digits or _ - . : / + = @"
ID = re.compile(r"[A-Za-z0-9_.:/+=@-]{1,128}")


def usable_id(given: str) -> bool:
    """Whether a client's id for its request can be taken over."""
    return ID.fullmatch(given) is not None


# -- before a request runs, whichever API it came through --------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """Tokens of one HTTP request, or of everything that came over one WebSocket."""

    prompt_tokens: int = 0
    output_tokens: int = 0


#: Set for each HTTP request; tasks that it starts inherit it.
METER: ContextVar[Meter | None] = ContextVar("meter", default=None)


@contextmanager
def admitted(requests: Sequence[Request]) -> Iterator[Callable[[int], None]]:
    """Let the choices of one answer run, at the caller's charge; yields what to call with each count of new tokens.

    Raises :class:`~server.schemas.errors.RateLimited` if the caller has used up what it may.
    """
    rate_limiter, meter = CALLER.get().rate_limiter, METER.get() or Meter()
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
    """So many places, bytes or the like. most: of all callers together."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self._held: Counter[str] = Counter()

    @property
    def own(self) -> int:
        """What the caller holds."""
        return self._held[CALLER.get().tenant]

    def fits(self, amount: int, caller: Caller) -> bool:
        """Whether a caller may hold so much more. One that holds nothing gets whatever is free."""
        own, free = self._held[caller.tenant], self.most - self.used - amount
        fair = caller.rate_limiter.alone or not own or own + amount <= free
        return not amount or (free >= 0 and fair)

    def take(self, amount: int, refusal: Callable[[], ApiError]) -> None:
        """Let the caller of this context hold so much more, or raise."""
        if not self.fits(amount, CALLER.get()):
            raise refusal()
        self.change(CALLER.get().tenant, amount)

    def give(self, amount: int) -> None:
        """The caller holds so much less."""
        self.change(CALLER.get().tenant, -amount)

    @contextmanager
    def holding(self, amount: int, refusal: Callable[[], ApiError]) -> Iterator[None]:
        """Hold so much for a while."""
        self.take(amount, refusal)
        tenant = CALLER.get().tenant
        try:
            yield
        finally:
            self.change(tenant, -amount)

    def change(self, tenant: str, amount: int) -> None:
        """A caller holds so much more, or less."""
        self.used += amount
        self._held[tenant] += amount
        assert self._held[tenant] >= 0, "nobody gives what it does not hold"
        if not self._held[tenant]:
            del self._held[tenant]
