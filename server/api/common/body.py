"""A JSON body as an HTTP response."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

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
