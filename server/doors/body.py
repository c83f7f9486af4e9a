"""A JSON body as an HTTP response."""

from __future__ import annotations

import msgspec
from aiohttp import web


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """``body`` as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")
