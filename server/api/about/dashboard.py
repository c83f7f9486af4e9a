"""The page that shows what speculation does, and its data.

The feed is one event a second with everything that changes. Each reader has a task of its own that waits for it. While
a reader does not read, no events are made for it, only its socket's buffer fills, and other readers are unaffected;
after a while it is disconnected.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from hashlib import md5
from mimetypes import guess_type
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from foresay.server.api.common.route import EVENTS, Route, json_response
from foresay.server.gateway.keys import CONTEXT
from foresay.server.metrics.report import HistoryReport, Point, RequestSummary, Snapshot
from foresay.server.metrics.telemetry import Telemetry
from foresay.server.models.model import Model
from foresay.server.models.models import MODELS, Models
from foresay.server.models.service import Service
from foresay.spec.errors import InvalidRequest

STALL_SECONDS = 20.0
#: Seconds after the full second, so that the second's counts are final.
LATE = 0.05


class State(msgspec.Struct, frozen=True):
    """``GET /dashboard/state``: the page's initial data. models: the state of each by name, if there are several."""

    snapshot: Snapshot
    history: HistoryReport
    models: dict[str, str] | UnsetType = UNSET


class Frame(msgspec.Struct, frozen=True):
    """One event. points: the seconds finished since the last event. models: as in :class:`State`."""

    snapshot: Snapshot
    points: list[Point]
    models: dict[str, str] | UnsetType = UNSET


def listed(models: Models) -> dict[str, str] | UnsetType:
    """The state of each model by name; unset if there is only one."""
    return {entry.name: entry.status for entry in models} if models.several else UNSET


class Feed:
    """All readers of one server's feed."""

    def __init__(self, stall: float = STALL_SECONDS) -> None:
        self._stall = stall
        self._closing = asyncio.Event()

    async def close(self, app: web.Application) -> None:
        """End all streams: the server shuts down."""
        self._closing.set()

    async def serve(self, http: web.Request, models: Models, service: Service, after: int) -> web.StreamResponse:
        """Write events until the reader leaves or the server shuts down. service: of the model
        whose numbers are sent. after: the last second that the reader has.
        """
        response = web.StreamResponse(headers={"Content-Type": EVENTS.content_type, "Cache-Control": "no-store"})
        await response.prepare(http)
        try:
            await self._write(response, models, service.telemetry, after)
        except (TimeoutError, ConnectionError):
            if http.transport is not None:
                http.transport.abort()  # do not wait for the rest to be read
        return response

    async def _write(self, response: web.StreamResponse, models: Models, telemetry: Telemetry, after: int) -> None:
        while not self._closing.is_set():
            points, after = telemetry.points(after)
            frame = Frame(await telemetry.snapshot(), points, listed(models))
            async with asyncio.timeout(self._stall):
                await response.write(EVENTS.encode(frame))
            await self._pause(1.0 + LATE - telemetry.clock() % 1.0)
        await response.write_eof()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()


# -- the files of the page ---------------------------------------------------------------------------------------------


STATIC = Path(__file__).parent / "static"
#: Nothing from other origins, nothing inline, and no framing by other pages.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    "Cache-Control": "no-cache",  # cached, but revalidated: an upgraded server has another page
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
}


# -- routes ------------------------------------------------------------------------------------------------------------

FEED: web.AppKey[Feed] = web.AppKey("feed", Feed)


def _chosen(http: web.Request) -> Model:
    """The model to report on."""
    return http.app[MODELS].chosen(http.query.get("model"))


async def page(http: web.Request) -> web.Response:
    """The page or one of its files, unless the client has it. It asks for a key itself if the server wants one."""
    name = http.match_info.get("name", "index.html")
    if name not in os.listdir(STATIC):  # whatever else a name may mean to a file system
        raise web.HTTPNotFound
    body = (STATIC / name).read_bytes()  # aiohttp's FileResponse leaves it open if the client leaves in that moment
    tag = md5(body, usedforsecurity=False).hexdigest()
    if any(each.value == tag for each in http.if_none_match or ()):
        return web.Response(status=304, headers=HEADERS | {"ETag": f'"{tag}"'})
    headers = HEADERS | {"ETag": f'"{tag}"', "Content-Type": f"{guess_type(name)[0]}; charset=utf-8"}
    return web.Response(body=body, headers=headers)


async def state(http: web.Request) -> web.Response:
    """The numbers of the dashboard and their history, of all keys together, without text; of the given model."""
    telemetry = _chosen(http).service.telemetry
    return json_response(State(await telemetry.snapshot(), telemetry.history(), listed(http.app[MODELS])))


async def feed(http: web.Request) -> web.StreamResponse:
    """The same as it changes, an event per second. ``since``: the first second to report."""
    given = http.query.get("since", "0")
    if not given.isdecimal() or len(given) > 12:
        raise InvalidRequest("since", f" must be a number of seconds since 1970, got {given!r}")
    return await http.app[FEED].serve(http, http.app[MODELS], _chosen(http).service, int(given) - 1)


async def requests(http: web.Request) -> web.Response:
    """The last requests of the caller's key, the newest first."""
    return json_response(_chosen(http).service.telemetry.requests(CONTEXT.get().caller.tenant))


READ_ERRORS = (401, 403, 404)
QUERY = (("model", "string", "the model to report on, if there are several (default: the first)"),)
ROUTES = [
    web.get("/dashboard", page),
    web.get("/dashboard/static/{name}", page),
    web.get("/dashboard/feed", feed, allow_head=False),
    Route("GET", "/dashboard/state", state, answer=State, errors=READ_ERRORS, query=QUERY),
    Route("GET", "/dashboard/requests", requests, answer=list[RequestSummary], errors=READ_ERRORS, query=QUERY),
]
