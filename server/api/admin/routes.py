"""Replacing the engine of a running server: ``POST /admin/reload``."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import msgspec
from aiohttp import web

from server.api.common.route import BODY_ERRORS, LINES, EventStream, Route, Stream, json_response
from server.host.models.models import MODELS
from server.host.models.reload import reload
from server.schemas.errors import ApiError, described
from server.schemas.shared import ErrorDetail
from spec.errors import InvalidRequest


class ReloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/reload``. settings: those of the engine that become others, by name, as in the section ``[engine]``
    of a file; the rest stays. Without any its files are read again. model: one of the server's, the first one unless it
    has several. stream: tell what goes on, a line of JSON each, the last one as the answer without it or an error.
    """

    settings: dict[str, Any] = {}
    model: str | None = None
    stream: bool | None = None


class Reloading(msgspec.Struct, kw_only=True):
    """What goes on. share: how much of it is done (0 to 1), null if nobody knows."""

    status: Literal["loading"] = "loading"
    phase: str
    share: float | None


class Reloaded(msgspec.Struct, kw_only=True):
    """Another engine serves. moved: requests that were running and go on in it. seconds: until it was ready."""

    status: Literal["replaced"] = "replaced"
    model: str
    moved: int
    seconds: float


class ReloadError(msgspec.Struct, kw_only=True):
    """The last line of a stream, if the engine before serves on."""

    status: Literal["error"] = "error"
    error: ErrorDetail


async def reloaded(http: web.Request, body: ReloadRequest) -> web.StreamResponse:
    """Go on in another engine: with other settings, another draft, other weights, or another model."""
    models = http.app[MODELS]
    entry, began = models.chosen(body.model), time.monotonic()
    events = EventStream.of(http, LINES)
    told: asyncio.Queue[Reloading] = asyncio.Queue()
    reloading = asyncio.create_task(
        reload(models, entry, body.settings, lambda phase, share: told.put_nowait(Reloading(phase=phase, share=share)))
    )
    try:
        if body.stream:
            await _progress(events, told, reloading)
        moved = await reloading
        answer = Reloaded(model=entry.name, moved=moved, seconds=time.monotonic() - began)
    except (ApiError, InvalidRequest) as error:
        if not events.started:
            raise
        await events.send([ReloadError(error=described(error)[1].error)])
        return await events.end()
    finally:
        reloading.cancel()
    if not body.stream:
        return json_response(answer)
    await events.send([answer])
    return await events.end()


async def _progress(events: EventStream, told: asyncio.Queue[Reloading], reloading: asyncio.Task[int]) -> None:
    """Tell what goes on until it is over; what is refused before anything went on is no stream."""
    while not (reloading.done() and told.empty()):
        hearing = asyncio.create_task(told.get())
        await asyncio.wait({hearing, reloading}, return_when=asyncio.FIRST_COMPLETED)
        if hearing.done():
            await events.send([hearing.result()])
        else:
            hearing.cancel()


ROUTES = [
    Route(
        "POST",
        "/admin/reload",
        reloaded,
        ReloadRequest,
        Reloaded,
        Stream(LINES, (Reloading, Reloaded, ReloadError)),
        (*BODY_ERRORS, 409),
        always=True,
    )
]
