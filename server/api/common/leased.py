"""A request and the model that it names: held while it is answered, waited for if it has to be loaded first.

Who asked for a stream is not left in silence meanwhile: after a second the stream begins, with a comment now and then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from server.api.common.route import error_shape
from server.api.common.sse import EventStream, Framing
from server.api.common.streaming import HEADERS_AFTER_SECONDS
from server.host.models.models import MODELS
from server.host.models.resident import Keep, Patience
from server.host.service import Service
from server.schemas.errors import ApiError, described
from server.schemas.shared import ErrorBody
from spec.errors import InvalidRequest

#: Answers a request with the service of its model.
Answering = Callable[[Service], Awaitable[web.StreamResponse]]


async def leased(
    http: web.Request,
    name: str | None,
    answer: Answering,
    framing: Framing | None = None,
    broken: Callable[[int, ErrorBody], msgspec.Struct] | None = None,
    keep: Keep = "usual",
) -> web.StreamResponse:
    """What ``answer`` returns, with the model called ``name``.

    framing: of the stream, if one was asked for. broken: how it tells an error before there is an answer, from the HTTP
    status and OpenAI's body; as the API's error bodies unless it is given. keep: see :meth:`Models.lease`.
    """
    models = http.app[MODELS]
    if framing is None:
        async with models.lease(name, keep=keep) as service:
            return await answer(service)
    events = EventStream.of(http, framing)
    ping = models.find(name).service.options.ping_seconds
    patience = Patience(lambda: events.write(framing.ping), min(ping, HEADERS_AFTER_SECONDS), ping)
    try:
        async with models.lease(name, patience, keep) as service:
            return await answer(service)
    except (ApiError, InvalidRequest) as error:
        if not events.started:
            raise
        await events.send([_told(http, error, broken)])
        return await events.end()


def _told(
    http: web.Request,
    error: ApiError | InvalidRequest,
    broken: Callable[[int, ErrorBody], msgspec.Struct] | None,
) -> msgspec.Struct:
    """The error in the middle of a stream."""
    status, body = described(error)
    if broken is not None:
        return broken(status, body)
    shape = error_shape(http)
    told: msgspec.Struct = body if shape is None else shape.make(status, body)
    return told
