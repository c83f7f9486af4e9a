"""Waiting for a model: how long a request may, and what is told to its client meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

#: Seconds that the request which the running task serves waited for its model.
WAITED: ContextVar[float] = ContextVar("waited", default=0.0)


class Patience:
    """beat: called every ``seconds`` while a request waits, the first time after ``first``; nothing is, without one."""

    def __init__(
        self, beat: Callable[[], Awaitable[None]] | None = None, first: float = 1.0, seconds: float = 15.0
    ) -> None:
        self._beat, self._next, self._seconds = beat, first, seconds

    @property
    def seconds(self) -> float | None:
        """Until the next beat."""
        return None if self._beat is None else self._next

    async def beat(self) -> None:
        """Tell the client that it is not forgotten."""
        assert self._beat is not None, "without a beat nobody calls this"
        self._next = self._seconds
        await self._beat()


async def patiently(awaited: asyncio.Future[T], patience: Patience) -> T:
    """The result of ``awaited``, which is left alone if the task that waits is cancelled: others may wait for it."""
    while not awaited.done():
        done, _ = await asyncio.wait({awaited}, timeout=patience.seconds)
        if not done:
            await patience.beat()
    return awaited.result()
