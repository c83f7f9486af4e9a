"""The caller of the request that the current task serves, and how many requests they may send."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec

from foresay.server.schemas.bounds import ID
from foresay.server.schemas.errors import RateLimited

MINUTE = 60.0


class RateLimiter:
    """Admits ``per_minute`` requests in any 60 seconds; None: all."""

    def __init__(self, per_minute: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._admitted = deque[float](maxlen=per_minute or 0)  # when; the oldest drops out

    def enter(self) -> None:
        """Count a request; raises :class:`RateLimited`, counting nothing, beyond the limit."""
        now = self._clock()
        if len(self._admitted) == self.per_minute and (wait := math.ceil(self._admitted[0] + MINUTE - now)) > 0:
            raise RateLimited(f"At most {self.per_minute} requests per minute are allowed; try again in {wait} s", wait)
        self._admitted.append(now)


class Caller(msgspec.Struct, frozen=True):
    """One user of the server. name: of their key, for the log. tenant: prefixes of prompts, stored responses and limits
    are shared only within one tenant. alone: there is no other key."""

    name: str = ""
    tenant: str = ""
    alone: bool = True
    rate_limiter: RateLimiter = msgspec.field(default_factory=RateLimiter)


ANYONE = Caller()


@dataclass(slots=True)
class Meter:
    """Tokens of one HTTP request, or of all requests on one WebSocket."""

    prompt_tokens: int = 0
    output_tokens: int = 0

    def wrote(self, tokens: int) -> None:
        """Count further tokens of output."""
        self.output_tokens += tokens


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP request that the current task serves, or the one that opened its WebSocket. id: empty if there is none.
    body_bytes: of its body, or of the message on the WebSocket. unknown: fields of its body that the API does not have,
    each with a hint at the one meant.
    """

    caller: Caller = ANYONE
    id: str = ""
    meter: Meter = msgspec.field(default_factory=Meter)
    body_bytes: int = 0
    unknown: tuple[tuple[str, str], ...] = ()


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
