"""The page that shows what speculation does, and its data.

The feed is one event a second with everything that changes. Each reader has a task of its own that waits for it. While
a reader does not read, no events are made for it, only its socket's buffer fills, and other readers are unaffected;
after a while it is disconnected.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from mimetypes import guess_type
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from foresay.server.api.common.route import EVENTS, Route, json_response
from foresay.server.gateway.keys import CONTEXT
from foresay.server.metrics.report import HistoryReport, Point, RequestSummary, Snapshot
from foresay.server.models.model import Model
from foresay.server.models.models import MODELS, Models
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


# -- the files of the page ---------------------------------------------------------------------------------------------


STATIC = Path(__file__).parent / "static"
#: Nothing from other origins, nothing inline, and no framing by other pages.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    "Cache-Control": "no-cache",  # cached, but revalidated: an upgraded server has another page
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
}


def served(name: str) -> web.FileResponse:
    """The file of this name. Raises 404 if there is none."""
    if name not in os.listdir(STATIC):  # whatever else a name may mean to a file system
        raise web.HTTPNotFound
    return web.FileResponse(STATIC / name, headers=HEADERS | {"Content-Type": f"{guess_type(name)[0]}; charset=utf-8"})


# -- routes ------------------------------------------------------------------------------------------------------------

#: Set when the server shuts down, which ends all feeds.
CLOSING: web.AppKey[asyncio.Event] = web.AppKey("closing", asyncio.Event)


async def close(app: web.Application) -> None:
    """End all feeds."""
    app[CLOSING].set()


def _chosen(http: web.Request) -> Model:
    """The model to report on."""
    return http.app[MODELS].chosen(http.query.get("model"))


async def page(http: web.Request) -> web.FileResponse:
    """The page. It asks for a key itself if the server wants one."""
    return served("index.html")


async def static(http: web.Request) -> web.FileResponse:
    """What the page is made of."""
    return served(http.match_info["name"])


async def state(http: web.Request) -> web.Response:
    """The numbers of the dashboard and their history, of all keys together, without text; of the given model."""
    telemetry = _chosen(http).service.telemetry
    return json_response(State(await telemetry.snapshot(), telemetry.history(), listed(http.app[MODELS])))


async def feed(http: web.Request) -> web.StreamResponse:
    """The same as it changes, an event per second. ``since``: the first second to report."""
    given = http.query.get("since", "0")
    if not given.isdecimal() or len(given) > 12:
        raise InvalidRequest("since", f" must be a number of seconds since 1970, got {given!r}")
    telemetry, after, closing = _chosen(http).service.telemetry, int(given) - 1, http.app[CLOSING]
    response = web.StreamResponse(headers={"Content-Type": EVENTS.content_type, "Cache-Control": "no-store"})
    await response.prepare(http)
    try:
        while not closing.is_set():
            points, after = telemetry.points(after)
            frame = Frame(await telemetry.snapshot(), points, listed(http.app[MODELS]))
            async with asyncio.timeout(STALL_SECONDS):
                await response.write(EVENTS.encode(frame))
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0 + LATE - telemetry.clock() % 1.0):
                    await closing.wait()
        await response.write_eof()
    except (TimeoutError, ConnectionError):
        if http.transport is not None:
            http.transport.abort()  # do not wait for the rest to be read
    return response


async def requests(http: web.Request) -> web.Response:
    """The last requests of the caller's key, the newest first."""
    return json_response(_chosen(http).service.telemetry.requests(CONTEXT.get().caller.tenant))


QUERY = (("model", "string", "the model to report on, if there are several (default: the first)"),)
ROUTES = [
    web.get("/dashboard", page),
    web.get("/dashboard/static/{name}", static),
    web.get("/dashboard/feed", feed, allow_head=False),
    Route("GET", "/dashboard/state", state, answer=State, query=QUERY),
    Route("GET", "/dashboard/requests", requests, answer=list[RequestSummary], query=QUERY),
]
