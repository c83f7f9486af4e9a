"""Server-sent events: how a stream of JSON chunks looks on the wire, and the response that writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
#: A client whose connection takes no bytes for this long is gone for all practical purposes.
STALL_SECONDS = 300.0

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
#: Line ends to some clients' eyes though not to JSON's: an event must be one line for everybody.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))

_encoder = msgspec.json.Encoder()


def event(chunk: Any) -> bytes:
    """One event holding ``chunk`` as JSON on one line."""
    body = _encoder.encode(chunk)
    for line_end, escaped in _LINE_ENDS:
        if line_end in body:
            body = body.replace(line_end, escaped)
    return b"data: " + body + b"\n\n"


class EventStream:
    """One streaming response. Headers go out with the first write; nothing is ever compressed or held back."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)

    @property
    def started(self) -> bool:
        """Whether the status line is out, so that an error can only be told inside the stream."""
        return self._response.prepared

    async def send(self, chunks: Iterable[Any], last: bytes = b"") -> None:
        """Write chunks, and ``last`` behind them, in one piece. Waits while the client's connection is full."""
        await self.write(b"".join([*map(event, chunks), last]))

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
