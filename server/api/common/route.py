"""A route: its handler for aiohttp and its description for ``/openapi.json``; framing of streams; reading of bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from foresay.server.api.common.validation import decoded, unknown_fields
from foresay.server.gateway.keys import CONTEXT, serve
from foresay.server.models.models import MODELS
from foresay.server.schemas.errors import ApiError, Mistake, NotJson, SlowBody, TooLarge, described
from foresay.server.schemas.shared import ErrorBody
from foresay.spec.errors import InvalidRequest

#: A client whose connection accepts no bytes for this long is considered gone.
STALL_SECONDS = 300.0

#: Characters that some clients treat as line ends, though JSON does not: an event must be one line for all clients.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))

_encoder = msgspec.json.Encoder()


def one_line(chunk: Any) -> bytes:
    """``chunk`` as JSON that is one line for all clients."""
    body = _encoder.encode(chunk)
    for line_end, escaped in _LINE_ENDS:
        if line_end in body:
            body = body.replace(line_end, escaped)
    return body


def event(chunk: Any) -> bytes:
    """An event without a name."""
    return b"data: " + one_line(chunk) + b"\n\n"


class Framing(msgspec.Struct, frozen=True):
    """How chunks become bytes. done: sent after the last chunk. ping: sent while idle. broken: sent after an error that
    ends a stream."""

    content_type: str
    encode: Callable[[Any], bytes]
    done: bytes = b""
    ping: bytes = b""
    broken: bytes = b""


#: Events without names, as OpenAI's completions send them; named by their ``type``, as Responses and Anthropic do; and
#: lines of JSON, as Ollama sends them.
EVENTS = Framing("text/event-stream; charset=utf-8", event, b"data: [DONE]\n\n", b": ping\n\n")
NAMED_EVENTS = replace(EVENTS, encode=lambda chunk: f"event: {chunk.type}\n".encode() + event(chunk), done=b"")
LINES = Framing("application/x-ndjson", lambda chunk: one_line(chunk) + b"\n")


class EventStream:
    """One streaming response. Headers go out with the first write; nothing is ever compressed or held back.

    A request has only one: :meth:`of` returns it if it exists. over: the stream is complete, or has reported its
    failure.
    """

    def __init__(self, request: web.Request, framing: Framing) -> None:
        self._request, self._framing = request, framing
        headers = {"Content-Type": framing.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._response = web.StreamResponse(headers=headers)
        self.over = False

    @classmethod
    def of(cls, request: web.Request, framing: Framing) -> EventStream:
        """The stream of the request, which may have started while it waited for its model."""
        if STREAM not in request:
            request[STREAM] = cls(request, framing)
        return request[STREAM]

    @property
    def started(self) -> bool:
        """Whether the status line has been sent, so that an error can only be reported in the stream."""
        return self._response.prepared

    async def send(self, chunks: Iterable[Any], last: bytes = b"") -> None:
        """Write chunks, then ``last``, at once. Waits while the client's connection is full."""
        await self.write(b"".join([*map(self._framing.encode, chunks), last]))

    async def break_off(self, chunk: Any) -> None:
        """Write an error as the last chunk."""
        await self.send([chunk], self._framing.broken)

    async def write(self, data: bytes) -> None:
        """Write bytes unchanged. Raises ConnectionResetError if the client is gone or stalled."""
        if not self.started:
            await self._response.prepare(self._request)
        if not data:
            return
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from None

    async def end(self) -> web.StreamResponse:
        """The stream is complete."""
        await self._response.write_eof()
        self.over = True
        return self._response

    async def fail(self, chunk: Any) -> None:
        """Report an internal error as the last chunk, unless the stream is complete; then the connection closes."""
        if not self.over:
            self.over = True
            self._response.force_close()
            await self.break_off(chunk)


STREAM = web.RequestKey("stream", EventStream)
#: The response of a request whose headers are about to be sent, or were.
BEGUN = web.RequestKey("begun", web.StreamResponse)


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """Record the response whose headers are about to be sent."""
    request[BEGUN] = response


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """As :func:`described`; for unexpected errors, only a reference to the log."""
    if not isinstance(error, ApiError | InvalidRequest):
        error = Mistake(f"Internal server error; the server's log says more about request {CONTEXT.get().id}")
    return described(error)


#: The modules whose routes an application serves.
ROUTE_MODULES: web.AppKey[tuple[ModuleType, ...]] = web.AppKey("modules", tuple)

#: Content types accepted for JSON: the right one, the default without a header, and curl's.
JSON_TYPES = ("application/json", "application/octet-stream", "application/x-www-form-urlencoded")

#: Called with the request, and its decoded body if there is one.
Handler = Callable[..., Awaitable[web.StreamResponse]]

#: Error statuses of routes, and of those that read a body.
PLAIN_ERRORS = (400, 401, 403, 404, 503)
BODY_ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503, 504)


#: Paths that many clients request without /v1, if their base URL lacks it.
_UNVERSIONED = tuple(f"/v1/{name}" for name in ("chat/completions", "responses", "messages", "models"))


def spellings(path: str) -> tuple[str, ...]:
    """A path, and the same one without ``/v1`` where it is served so too."""
    return (path, path.removeprefix("/v1")) if path.startswith(_UNVERSIONED) else (path,)


@dataclass(frozen=True)
class Stream:
    """A route's streamed response. chunks: the structs of its events or lines."""

    framing: Framing
    chunks: tuple[Any, ...]


@dataclass(frozen=True)
class Route(web.AbstractRouteDef):
    """One method of one path.

    body: the struct of the request, passed to the handler; None if there is no body. answer: the struct of the response
    with status 200; None if it has none, and the type ``media``. stream: the response when a stream is requested.
    query: name, JSON type and meaning of query parameters. always: its body is read even when no requests are taken.
    The summary is the handler's docstring.
    """

    method: str
    path: str
    handler: Handler
    body: Any = None
    answer: Any = None
    stream: Stream | None = None
    query: tuple[tuple[str, str, str], ...] = ()
    media: str = "application/json"
    always: bool = False

    def register(self, router: web.UrlDispatcher) -> list[web.AbstractRoute]:
        """Add the route; a GET answers HEAD too."""
        if self.method == "GET":
            return [router.add_get(self.path, self.handler)]
        return [router.add_route(self.method, self.path, self.handler if self.body is None else self._with_body)]

    async def _with_body(self, http: web.Request) -> web.StreamResponse:
        if not self.always:
            http.app[MODELS].check_open()
        if http.content_type not in JSON_TYPES and not http.content_type.endswith("+json"):
            raise NotJson(http.content_type)
        body = await received(http, http.app[MODELS].server.body_timeout)
        request = decoded(body, self.body)
        serve(unknown=unknown_fields(body, self.body))
        return await self.handler(http, request)


@dataclass(frozen=True, kw_only=True)
class ErrorShape:
    """An API's own error format. prefix: of its paths. make: converts the HTTP status and OpenAI's body. body: the
    struct that ``make`` returns.
    """

    prefix: str
    body: type
    make: Callable[[int, ErrorBody], Any]


def error_shape(http: web.Request) -> ErrorShape | None:
    """The error format of the API whose path was called; None for OpenAI's."""
    shapes: list[ErrorShape] = [module.ERRORS for module in http.app[ROUTE_MODULES] if hasattr(module, "ERRORS")]
    return next((shape for shape in shapes if http.path.startswith(spellings(shape.prefix))), None)


# -- bodies ------------------------------------------------------------------------------------------------------------


#: Most bytes of a request's body, or of a message on its WebSocket.
MOST_BYTES = web.RequestKey("most_bytes", int)


async def received(http: web.Request, seconds: float) -> bytes:
    """Read the body. Raises :class:`TooLarge`, and :class:`SlowBody` if it takes longer than ``seconds``."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while part := await http.content.readany():
                body += part
                if len(body) > http[MOST_BYTES]:
                    raise TooLarge(http[MOST_BYTES])
    except TimeoutError:
        raise SlowBody(len(body), seconds) from None
    return bytes(body)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """``body`` as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")
