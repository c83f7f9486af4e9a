"""The page's feed: one event a second with everything that changes, to whoever reads it.

Each reader has a task of its own that waits for it. While a reader does not read, nothing is made for it, nothing piles
up but what its socket holds, and nobody else notices; after a while it is hung up on.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from server.api.common.sse import EVENTS
from server.gateway.caller import CALLER
from server.gateway.share import Shared
from server.host.models.models import Models
from server.host.service import Service
from server.observe.telemetry.report import HistoryReport, Point, Snapshot
from server.observe.telemetry.telemetry import Telemetry
from server.schemas.errors import Busy

MOST_READERS = 64
STALL_SECONDS = 20.0
#: After the full second, so that the second is over for whoever counts.
LATE = 0.05


class State(msgspec.Struct, frozen=True):
    """``GET /dashboard/state``: what the page begins with. models: by name how each is, if there are several."""

    snapshot: Snapshot
    history: HistoryReport
    models: dict[str, str] | UnsetType = UNSET


class Frame(msgspec.Struct, frozen=True):
    """One event. points: the seconds that are over since the last one. models: as in :class:`State`."""

    snapshot: msgspec.Raw
    points: list[Point]
    models: dict[str, str] | UnsetType = UNSET


def listed(models: Models) -> dict[str, str] | UnsetType:
    """By name how each is; nothing where there is one alone."""
    return {entry.name: entry.state for entry in models} if models.several else UNSET


class TooManyReaders(Busy):
    """No more pages."""

    code = "too_many_readers"


class Feed:
    """All readers of one server's feed."""

    def __init__(self, stall: float = STALL_SECONDS) -> None:
        self.readers = Shared(MOST_READERS)
        self._stall = stall
        self._closing = asyncio.Event()
        self._making: dict[str, tuple[int, asyncio.Task[msgspec.Raw]]] = {}

    async def close(self, app: web.Application) -> None:
        """End all streams: the server goes away."""
        self._closing.set()

    async def serve(self, http: web.Request, models: Models, service: Service, after: int) -> web.StreamResponse:
        """Write events until the reader leaves, its key is taken away, or the server goes. service: of the model whose
        numbers they are. after: the last second it knows.
        """
        with self.readers.holding(1, self._full):
            return await self._served(http, models, service.telemetry, after)

    def _full(self) -> TooManyReaders:
        message = f"{self.readers.used} pages are open already, {self.readers.own} of them yours"
        return TooManyReaders(message, retry_after=10)

    async def _served(self, http: web.Request, models: Models, telemetry: Telemetry, after: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": EVENTS.content_type, "Cache-Control": "no-store"})
        await response.prepare(http)
        try:
            await self._write(response, models, telemetry, after)
        except (TimeoutError, ConnectionError):
            if http.transport is not None:
                http.transport.abort()  # what it has not read by now it never will
        return response

    async def _write(self, response: web.StreamResponse, models: Models, telemetry: Telemetry, after: int) -> None:
        rate_limiter = CALLER.get().rate_limiter
        while not self._closing.is_set() and not rate_limiter.revoked:
            points, after = await telemetry.points(after)
            frame = Frame(await self._snapshot(telemetry), points, listed(models))
            async with asyncio.timeout(self._stall):
                await response.write(EVENTS.encode(frame))
            await self._pause(1.0 + LATE - telemetry.clock() % 1.0)
        await response.write_eof()

    async def _snapshot(self, telemetry: Telemetry) -> msgspec.Raw:
        """Everything but the points, as JSON: made once for all readers of a second."""
        second = int(telemetry.clock())
        making = self._making.get(telemetry.model)
        if making is None or making[0] != second:
            making = self._making[telemetry.model] = second, asyncio.create_task(_encoded(telemetry))
        return await asyncio.shield(making[1])  # others wait for it too

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return


async def _encoded(telemetry: Telemetry) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(await telemetry.snapshot()))
