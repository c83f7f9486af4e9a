"""How a stream of JSON chunks looks on the wire (:class:`Framing`), and the response that writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

#: Chunks above this go out alone, so that other streams have their turn between them.
LARGE_BYTES = 1 << 18
#: A client whose connection takes no bytes for this long is gone for all practical purposes.
STALL_SECONDS = 300.0

#: Line ends to some clients' eyes though not to JSON's: an event must be one line for everybody.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))

_encoder = msgspec.json.Encoder()


def one_line(chunk: Any) -> bytes:
    """``chunk`` as JSON that is one line for everybody."""
    body = _encoder.encode(chunk)
    for line_end, escaped in _LINE_ENDS:
        if line_end in body:
            body = body.replace(line_end, escaped)
    return body


def event(chunk: Any) -> bytes:
    """An event without a name, as OpenAI's completions send it."""
    return b"data: " + one_line(chunk) + b"\n\n"


def named_event(chunk: Any) -> bytes:
    """An event named by the chunk's ``type``, as OpenAI's Responses and Anthropic send it."""
    name: str = chunk.type
    return b"event: " + name.encode() + b"\ndata: " + one_line(chunk) + b"\n\n"


def line(chunk: Any) -> bytes:
    """A line of JSON, as Ollama sends it."""
    return one_line(chunk) + b"\n"


class Framing(msgspec.Struct, frozen=True):
    """How chunks become bytes. done: behind the last chunk. ping: while there is nothing to say."""

    content_type: str
    encode: Callable[[Any], bytes]
    done: bytes = b""
    ping: bytes = b""


EVENTS = Framing("text/event-stream; charset=utf-8", event, b"data: [DONE]\n\n", b": ping\n\n")
NAMED_EVENTS = Framing("text/event-stream; charset=utf-8", named_event, b"", b": ping\n\n")
LINES = Framing("application/x-ndjson", line)


class EventStream:
    """One streaming response. Headers go out with the first write; nothing is ever compressed or held back.

    A request has one: whoever makes the stream while another is there already goes on with that (:meth:`of`).
    """

    def __init__(self, request: web.Request, framing: Framing) -> None:
        self._request, self._framing = request, framing
        headers = {"Content-Type": framing.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._response = web.StreamResponse(headers=headers)

    @classmethod
    def of(cls, request: web.Request, framing: Framing, more: Mapping[str, str] | None = None) -> EventStream:
        """The stream of the request, which may have begun while it waited for its model. more: headers besides those of
        every stream, unless they are out already."""
        begun = request.get(_STREAM)
        if begun is None:
            begun = request[_STREAM] = cls(request, framing)
        if not begun.started:
            begun._response.headers.update(more or {})
        return begun

    @property
    def started(self) -> bool:
        """Whether the status line is out, so that an error can only be told inside the stream."""
        return self._response.prepared

    async def send(self, chunks: Iterable[Any], last: bytes = b"") -> None:
        """Write chunks, and ``last`` behind them, in one piece unless they are large. Waits while the client's
        connection is full."""
        data: list[bytes] = []
        for chunk in chunks:
            data.append(self._framing.encode(chunk))
            if len(data[-1]) > LARGE_BYTES:
                await self.write(b"".join(data))
                data = []
                await asyncio.sleep(0)
        await self.write(b"".join([*data, last]))

    async def write(self, data: bytes) -> None:
        """Write bytes as they are. ConnectionResetError if the client is gone or stalled."""
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
            raise ConnectionResetError("the client's connection took no bytes any more") from None

    async def end(self) -> web.StreamResponse:
        """The stream is complete."""
        await self._response.write_eof()
        return self._response


_STREAM = web.RequestKey("stream", EventStream)
