"""A route: what aiohttp needs to serve it and what ``/openapi.json`` says about it, declared once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
from aiohttp import web

from server.api.common.sse import Framing
from server.schemas.shared import ErrorBody

#: The modules whose routes an application serves.
ROUTE_MODULES: web.AppKey[tuple[ModuleType, ...]] = web.AppKey("modules", tuple)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: What may go wrong where a body is read and the engine is asked.
BODY_ERRORS = (400, 401, 403, 404, 413, 415, 429, 500, 503, 504)
PLAIN_ERRORS = (401, 403)


@dataclass(frozen=True)
class Stream:
    """The other answer of a route, when the request asks for a stream. chunks: the structs of its events or lines."""

    framing: Framing
    chunks: tuple[Any, ...]


@dataclass(frozen=True)
class Route(web.AbstractRouteDef):
    """One method of one path.

    body: the struct of the request; None if there is none. answer: of the response with status 200; None where there is
    no struct of it, and it is of the type ``media``. stream: of the response when a stream is asked for. errors:
    statuses besides 200 (chosen by whether there is a body). parameters: what the variables in the path mean. query:
    name, JSON type and meaning of what may follow the path. The summary is the handler's docstring.
    """

    method: str
    path: str
    handler: Handler
    body: Any = None
    answer: Any = None
    stream: Stream | None = None
    errors: tuple[int, ...] | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    query: tuple[tuple[str, str, str], ...] = ()
    media: str = "application/json"

    def register(self, router: web.UrlDispatcher) -> list[web.AbstractRoute]:
        """Add the route; a GET answers HEAD too."""
        if self.method == "GET":
            return [router.add_get(self.path, self.handler)]
        return [router.add_route(self.method, self.path, self.handler)]

    @property
    def statuses(self) -> tuple[int, ...]:
        """The errors a client may see."""
        if self.errors is not None:
            return self.errors
        return PLAIN_ERRORS if self.body is None else BODY_ERRORS


@dataclass(frozen=True, kw_only=True)
class ErrorShape:
    """How an API tells errors, where it is not OpenAI's way. prefix: of its paths. make: from the HTTP status and
    OpenAI's body. body: the struct that ``make`` returns.
    """

    prefix: str
    body: type
    make: Callable[[int, ErrorBody], Any]


def error_shape(http: web.Request) -> ErrorShape | None:
    """That of the API whose path was called; None for OpenAI's."""
    shapes: list[ErrorShape] = [module.ERRORS for module in http.app[ROUTE_MODULES] if hasattr(module, "ERRORS")]
    return next((shape for shape in shapes if http.path.startswith(shape.prefix)), None)


# -- bodies ------------------------------------------------------------------------------------------------------------


#: Numbers or short texts that are encoded in a millisecond.
_SLICE = 16_384


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """``body`` as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


async def json_slices(http: web.Request, body: dict[str, object]) -> web.StreamResponse:
    """``body`` as JSON, whose lists may be of any length: between their slices others have their turn."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(http)
    opening = b"{"
    for name, value in body.items():
        await response.write(opening + msgspec.json.encode(name) + b":")
        await _write(response, value)
        opening = b","
    await response.write(b"}")
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, value: object) -> None:
    if not isinstance(value, list) or not value:
        await response.write(msgspec.json.encode(value))
        return
    for begin in range(0, len(value), _SLICE):
        values = msgspec.json.encode(value[begin : begin + _SLICE])
        await response.write((b"," if begin else b"[") + values[1:-1])
        await asyncio.sleep(0)
    await response.write(b"]")
