"""The HTTP application: routes, error bodies, request ids, and a line in the log for each request.

::

    listen ── 503 loading ──> engine and tokenizer ready ── banner, 200 ──> SIGTERM ── 503 draining ──> exit 0
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import ModuleType

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from foresay.server.api import admin, llamacpp
from foresay.server.api.about import routes as about
from foresay.server.api.anthropic import messages
from foresay.server.api.common import route
from foresay.server.api.common.route import Route, json_response, spellings
from foresay.server.api.ollama import routes as ollama
from foresay.server.api.openai import chat, completions, tokens
from foresay.server.api.responses import routes as responses
from foresay.server.gateway.keys import CONTEXT, RequestContext, serve, usable_id
from foresay.server.http import openapi
from foresay.server.http.auth import AuthMiddleware, opens_socket
from foresay.server.metrics.log import Reporter
from foresay.server.models.models import MODELS, Models
from foresay.server.schemas.errors import ApiError, SlowBody
from foresay.server.schemas.shared import ErrorBody, ErrorDetail
from foresay.spec.errors import InvalidRequest

log = logging.getLogger("foresay.server")

#: Each has ``ROUTES``; those with errors of their own shape have ``ERRORS``.
ROUTE_MODULES: tuple[ModuleType, ...] = (
    about,
    completions,
    chat,
    responses,
    tokens,
    messages,
    ollama,
    llamacpp,
    openapi,
    admin,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(models: Models, auth: AuthMiddleware | None = None) -> web.Application:
    """The application that serves the models. auth: who may use it; by default anyone on this machine."""
    auth = auth or AuthMiddleware()
    middlewares = [record, _answer_errors, auth.admit]
    app = web.Application(middlewares=middlewares)
    app[MODELS] = models
    app[about.CLOSING] = asyncio.Event()
    app.on_shutdown.append(about.close)
    app.cleanup_ctx.append(models.life)
    for entry in models:
        reporter = Reporter(entry.service.telemetry, entry.name if models.several else "")
        app.cleanup_ctx.append(reporter.life)
        if entry.service.self_check is not None:
            app.cleanup_ctx.append(entry.service.self_check.life)
    app[route.ROUTE_MODULES] = ROUTE_MODULES
    app.on_response_prepare.extend([route.begin, _name_request, auth.mark])
    for module in ROUTE_MODULES:
        app.add_routes(module.ROUTES)
        own = [one for one in module.ROUTES if isinstance(one, Route)]
        app.add_routes([replace(one, path=path) for one in own for path in spellings(one.path)[1:]])
    return app


# -- every request ---------------------------------------------------------------------------------------------------


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, and turn every error into a response in its API's shape."""
    serve(id=_request_id(request))
    try:
        return await handler(request)
    except (ApiError, InvalidRequest) as error:
        headers = error.headers if isinstance(error, ApiError) else {}
        response = _shaped(request, *route.error_body(error), headers)
        if isinstance(error, SlowBody):
            response.force_close()  # the rest is not read
        return response
    except web.HTTPException as error:
        message = f"{error.reason}: {request.method} {request.path}"
        detail = ErrorDetail(message, "invalid_request_error", None, None)
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _shaped(request, error.status, ErrorBody(detail), allow)
    except web.RequestPayloadError:
        detail = ErrorDetail("The body does not match its headers", "invalid_request_error", None, None)
        response = _shaped(request, 400, ErrorBody(detail))
        response.force_close()  # it is unknown where the next request begins
        return response
    except ConnectionResetError as error:
        # The client is gone. If aiohttp notices first it ends the handler in the same way; it would log any other
        # exception as an error.
        raise asyncio.CancelledError from error
    except Exception as error:
        log.exception("%s %s failed (request %s)", request.method, request.rel_url.raw_path, CONTEXT.get().id)
        if route.BEGUN not in request:
            return _shaped(request, *route.error_body(error))
        complete = route.STREAM in request and request[route.STREAM].over
        if not complete and request.transport is not None:
            request.transport.close()  # so that what was sent is not taken for complete
        return request[route.BEGUN]


def _shaped(request: web.Request, status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> web.Response:
    """An error in the shape of the API whose path was called; OpenAI's by default."""
    shape = route.error_shape(request)
    return json_response(body if shape is None else shape.make(status, body), status, headers)


def _request_id(request: web.Request) -> str:
    """The client's ``X-Request-Id`` if it is usable, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if usable_id(given) else uuid.uuid4().hex


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    # There is no id yet if aiohttp itself refuses the request for its Expect header.
    response.headers["X-Request-Id"] = CONTEXT.get().id or _request_id(request)


# -- the access log ----------------------------------------------------------------------------------------------------
# One line per request: method and path, outcome, cost. Never a text, a query or a key. Malformed requests are logged
# with their address only: aiohttp would log a traceback with the offending line, which may hold the key; and network
# scanners would fill the log.


#: nginx's status for a client that left before the response was complete.
CLIENT_LEFT = 499
#: For WebSockets, which normally end when the client leaves.
SOCKET_CLOSED = 101
ACCESS_LOG = logging.getLogger("foresay.access")
HTTP_LOG = logging.getLogger("foresay.http")


@web.middleware
async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the request's tokens and log it when it ends."""
    CONTEXT.set(RequestContext())
    began = time.monotonic()
    status = SOCKET_CLOSED if opens_socket(request) else CLIENT_LEFT
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        request.app[MODELS].server.connections.answered(status)
        if ACCESS_LOG.isEnabledFor(logging.INFO):
            ACCESS_LOG.info("%s", access_line(request, status, 1000 * (time.monotonic() - began)))


def access_line(request: web.Request, status: int, milliseconds: float) -> str:
    """The log line; the path is still percent-encoded, so that it holds no line breaks."""
    context = CONTEXT.get()
    who, id, meter = context.caller.name or "-", context.id or "-", context.meter
    tokens = f"in={meter.prompt_tokens} out={meter.output_tokens}"
    path = request.rel_url.raw_path
    return f"{request.method} {path} {status} {milliseconds:.0f}ms {tokens} key={who} id={id}"


class _Shortened(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg = f"a malformed request from %s ({type(error).__name__})"
            record.exc_info, record.exc_text = None, None
        return True


HTTP_LOG.addFilter(_Shortened())


if __name__ == "__main__":
    sys.stdout.buffer.write(openapi.encoded(ROUTE_MODULES))
