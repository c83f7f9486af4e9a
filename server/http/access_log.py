"""One line for each request: what it was, how it went, what it cost. Never a text, a query or a key.

Of requests that are no proper HTTP is logged that they came, and from where: aiohttp would log a traceback with the
offending line, which may be the one that holds the key; and whoever scans a network would fill the log.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from server.gateway.caller import CALLER, METER, REQUEST_ID, Meter
from server.host.models.models import MODELS
from server.http.auth import opens_socket

#: As nginx says that the client left before the answer was complete.
CLIENT_LEFT = 499
#: A socket is over when its client leaves; that is how it should be.
SOCKET_CLOSED = 101
log = logging.getLogger("foresay.access")
HTTP_LOG = logging.getLogger("foresay.http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def to_stderr() -> None:
    """Write the lines to stderr, with the time in front."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False


@web.middleware
async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the request's tokens and, when it is over, log it."""
    meter, began = Meter(), time.monotonic()
    METER.set(meter)
    status = SOCKET_CLOSED if opens_socket(request) else CLIENT_LEFT
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        request.app[MODELS].server.connections.answered(status)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", line(request, status, 1000 * (time.monotonic() - began), meter))


def line(request: web.Request, status: int, milliseconds: float, meter: Meter) -> str:
    """The line: the path as it came, so that no character of it ends the line."""
    who = CALLER.get().name or "-"
    tokens = f"in={meter.prompt_tokens} out={meter.output_tokens}"
    path = request.rel_url.raw_path
    return f"{request.method} {path} {status} {milliseconds:.0f}ms {tokens} key={who} id={REQUEST_ID.get('-')}"


class _Shortened(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg = f"a malformed request from %s ({type(error).__name__})"
            record.exc_info, record.exc_text = None, None
        return True


HTTP_LOG.addFilter(_Shortened())
