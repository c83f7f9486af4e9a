"""The door that every request passes before it runs, whichever API it came through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from server.gateway.caller import CALLER
from spec.request import Request


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
    allowance, meter = CALLER.get().allowance, METER.get() or Meter()
    prompt_tokens = sum(len(request.prompt) for request in requests if request.fork_of is None)
    allowance.enter(len(requests), prompt_tokens)
    meter.prompt_tokens += prompt_tokens

    def spend(tokens: int) -> None:
        meter.output_tokens += tokens
        allowance.spend(tokens)

    began = time.monotonic()
    try:
        yield spend
    finally:
        allowance.leave(len(requests), time.monotonic() - began)
