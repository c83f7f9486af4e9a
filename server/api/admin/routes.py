"""Replacing the engine of a running server: ``POST /admin/reload``."""

from __future__ import annotations

import asyncio
import time

import msgspec
from aiohttp import web

from server.api.admin.schemas import Reloaded, ReloadError, Reloading, ReloadRequest
from server.api.common import validation
from server.api.common.route import BODY_ERRORS, LINES, EventStream, Route, Stream, json_response
from server.host.models.models import MODELS
from server.host.models.reload import reload
from server.schemas.errors import ApiError, described
from spec.errors import InvalidRequest

_reloads = msgspec.json.Decoder(ReloadRequest)


async def reloaded(http: web.Request) -> web.StreamResponse:
    """Go on in another engine: with other settings, another draft, other weights, or another model."""
    body = validation.decoded(await http.read(), _reloads)
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
    )
]
