"""Ends of patience: for the first token, and for the whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.engine.generation import Generation
from server.schemas.errors import TookTooLong, WaitedTooLong


@contextmanager
def deadlines(
    generation: Generation, first_token: float | None, whole: float | None, retry_after: Callable[[], int]
) -> Iterator[None]:
    """End ``generation`` with an error if it has no token after ``first_token`` seconds, or runs for ``whole``."""

    def waited() -> None:
        if not generation.begun:
            message = f"No token in {first_token:g} s, the longest that a request may wait here; the server is busy"
            generation.abort(WaitedTooLong(message, retry_after()))

    def took() -> None:
        generation.abort(TookTooLong(f"The request took longer than {whole:g} s, the limit of this server"))

    loop = asyncio.get_running_loop()
    timers = [loop.call_later(after, end) for after, end in ((first_token, waited), (whole, took)) if after is not None]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
