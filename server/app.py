"""The HTTP application: routes, error bodies, request ids, and its life from the first connection to SIGTERM.

::

    listen ── 503 loading ──> engine and tokenizer ready ── banner, 200 ──> SIGTERM ── 503 draining ──> exit 0
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import ssl
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from aiohttp import web

from server import banner, files
from server.child import Spawned, spawn
from server.commands.command import told
from server.commands.stages import Stages
from server.config import ServeConfig
from server.dashboard.feed import Feed
from server.doors import (
    about,
    chat,
    completions,
    dashboard,
    messages,
    metrics,
    ollama,
    openapi,
    responses,
    route,
    tokens,
)
from server.doors.body import json_response
from server.engine_status import EngineStatus
from server.errors import ApiError, described
from server.gateway import access_log, malformed
from server.gateway.caller import REQUEST_ID, usable_id
from server.gateway.gate import Gate
from server.gateway.threads import SharedThreads
from server.gateway.tls import context
from server.models import residency
from server.models.models import MODELS, Models
from server.names import model_names
from server.service import Service
from server.telemetry import log as speculation_log
from server.telemetry.log import Reporter
from server.wire.shared import ErrorBody, ErrorDetail
from spec.errors import ForesayError, InvalidRequest
from spec.request import EngineInfo

CLOSING_SECONDS = 2.0
_BESIDE = "beside the event loop"
log = logging.getLogger("foresay.server")

#: Each has ``ROUTES``; those with errors of their own shape have ``ERRORS``.
DOORS: tuple[ModuleType, ...] = (
    about,
    completions,
    chat,
    responses,
    tokens,
    messages,
    ollama,
    dashboard,
    metrics,
    openapi,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(served: Service | Models, gate: Gate | None = None) -> web.Application:
    """The application around a service, or around several models. gate: who may use it; without one everybody on this
    machine."""
    models = served if isinstance(served, Models) else Models.alone(served)
    gate = gate or Gate()
    middlewares = [access_log.record, _answer_errors, gate.admit]
    app = web.Application(middlewares=middlewares)
    app[MODELS] = models
    app[dashboard.FEED] = feed = Feed()
    app.on_shutdown.append(feed.close)
    app.cleanup_ctx.extend([gate.life, models.life])
    for entry in models:
        reporter = Reporter(entry.service.telemetry, entry.name if models.several else "")
        app.cleanup_ctx.extend([reporter.life, entry.service.self_check.life])
    app[route.DOORS] = DOORS
    app.on_response_prepare.extend([_name_request, gate.mark])
    for door in DOORS:
        app.add_routes(door.ROUTES)
    return app


# -- every request ---------------------------------------------------------------------------------------------------


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, and every error the body its door gives it."""
    REQUEST_ID.set(_request_id(request))
    try:
        return await handler(request)
    except (ApiError, InvalidRequest) as error:
        status, body = described(error)
        return _told(request, status, body, error.headers if isinstance(error, ApiError) else {})
    except web.HTTPException as error:
        detail = ErrorDetail(f"{error.reason}: {request.method} {request.path}", "invalid_request_error", None, None)
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _told(request, error.status, ErrorBody(detail), allow)
    except web.RequestPayloadError:
        detail = ErrorDetail("The body is not what its headers say", "invalid_request_error", None, None)
        response = _told(request, 400, ErrorBody(detail))
        response.force_close()  # where the next request begins is anybody's guess
        return response
    except ConnectionResetError as error:
        # The client is gone, there is nobody to tell. If aiohttp notices first it ends the handler in the same way; it
        # would log anything else as a mistake.
        raise asyncio.CancelledError from error
    except Exception:
        id = REQUEST_ID.get()
        log.exception("%s %s failed (request %s)", request.method, request.rel_url.raw_path, id)
        message = f"The server made a mistake; its log says more about request {id}"
        detail = ErrorDetail(message, "internal_error", None, "internal_error")
        return _told(request, 500, ErrorBody(detail))


def _told(request: web.Request, status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> web.Response:
    """An error in the shape of the API whose path was called; OpenAI's where no other claims it."""
    shape = route.error_shape(request)
    return json_response(body if shape is None else shape.make(status, body), status, headers)


def _request_id(request: web.Request) -> str:
    """The client's ``X-Request-Id`` if it is usable, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if usable_id(given) else uuid.uuid4().hex


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    # Without one where aiohttp itself refuses the request, for what it expects.
    response.headers["X-Request-Id"] = REQUEST_ID.get("") or _request_id(request)


# -- life ------------------------------------------------------------------------------------------------------------


def serve(config: ServeConfig, stages: Stages, spawn: Callable[[], Spawned] = spawn) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit status. Raises what :func:`run_server` raises.

    stages: told of what goes on until the engine is ready. spawn: starts an engine process.
    """

    def ready(info: EngineInfo | None, port: int) -> None:
        stages.close()
        if info is None:
            banner.show_models(config, port)
        else:
            banner.show(info, config, model_names(config)[0], port, stages.summary())

    def changed(status: EngineStatus) -> None:
        if status.state == "loading":
            stages(status.message, status.share)

    try:
        with stages:
            return asyncio.run(run_server(config, ready, changed, spawn))
    finally:
        _leave_the_busy()


async def run_server(
    config: ServeConfig,
    on_ready: Callable[[EngineInfo | None, int], None],
    on_status: Callable[[EngineStatus], None],
    spawn: Callable[[], Spawned] = spawn,
) -> int:
    """Listen at once, load, call ``on_ready`` with the engine (None where models are loaded when they are asked for)
    and the port, serve until told to stop, drain.

    on_status: told of every change of an engine's status. spawn: starts an engine process.
    Raises :class:`ForesayError` if the port is taken or the engine can never start.
    """
    asyncio.get_running_loop().set_exception_handler(files.Refusals())
    threads = SharedThreads(thread_name_prefix=_BESIDE)
    asyncio.get_running_loop().set_default_executor(threads)
    models = Models.of(config, on_status, spawn)
    gate, tls = Gate.of(config), context(config)
    if config.access_log:
        access_log.to_stderr()
    speculation_log.to_stderr(residency.log)
    if config.log_stats:
        speculation_log.to_stderr()
    # Without handler_cancellation a client that leaves during a long prefill would be noticed at the first write only.
    runner = web.AppRunner(
        create_app(models, gate),
        handler_cancellation=True,
        auto_decompress=False,  # aiohttp would do it before anybody has looked at the key
        logger=malformed.log,
        access_log=None,
        shutdown_timeout=CLOSING_SECONDS,
    )
    await runner.setup()
    try:
        port = await _listen(runner, config, tls)
        signals = StopSignals()
        await models.start()
        await _until_stopped(models, lambda info: on_ready(info, port), signals)
        await _drain(models, config.drain_seconds, signals)
    finally:
        await models.stop()
        await runner.cleanup()
        threads.shutdown(wait=False, cancel_futures=True)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())  # which the loop waits for at its end
    return 0


def _leave_the_busy() -> None:
    """End the process if a thread will not end, such as one that renders an endless template: Python waits for all."""
    deadline = time.monotonic() + CLOSING_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith(_BESIDE):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                error = sys.exception()
                status = 0 if error is None else told("serve", error)
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)


class StopSignals:
    """SIGTERM and SIGINT: the first asks to stop, the second to hurry."""

    def __init__(self) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _until_stopped(models: Models, on_ready: Callable[[EngineInfo | None], None], signals: StopSignals) -> None:
    """Load, then wait for the signal; the signal may come first. Raises what ends the supervision of the models."""
    waits: tuple[Coroutine[None, None, Any], ...] = (models.arrived(), signals.stop.wait(), models.until_ended())
    loading, stopped, ended = tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done() and not ended.done():
            on_ready(loading.result())
            await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(models: Models, seconds: float, signals: StopSignals) -> None:
    """Let running requests finish; a second signal ends the patience."""
    draining, hurry = asyncio.create_task(models.drain(seconds)), asyncio.create_task(signals.hurry.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not draining.done():
        draining.cancel()
        await models.drain(0.0)


async def _listen(runner: web.AppRunner, config: ServeConfig, tls: ssl.SSLContext | None) -> int:
    """Open the port; returns its number."""
    try:
        await web.TCPSite(runner, config.host, config.port, ssl_context=tls).start()
    except OSError as error:
        raise ForesayError(_unheard(config, error)) from error
    return int(runner.addresses[0][1])


def _unheard(config: ServeConfig, error: OSError) -> str:
    """Why nobody can be heard on the port, and what to do."""
    where = f"port {config.port} on {config.host}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use: end what listens there, or choose another with --port (0 takes a free one)"
    return f"cannot listen on {where} ({error.strerror}): choose others with --host and --port"
