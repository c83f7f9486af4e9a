"""The HTTP application: routes, error bodies, request ids, and its life from the first connection to SIGTERM.

::

    listen ── 503 loading ──> engine and tokenizer ready ── banner, 200 ──> SIGTERM ── 503 draining ──> exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
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
from server.doors.route import ErrorShape
from server.engine_client import EngineClient
from server.engine_status import EngineStatus
from server.errors import ApiError, described
from server.gateway import access_log, malformed
from server.gateway.caller import REQUEST_ID, usable_id
from server.gateway.gate import Gate
from server.gateway.threads import SharedThreads
from server.gateway.tls import context
from server.names import model_names
from server.parsers.dialect import Dialect
from server.service import MOST_BODIES, Service, ServiceOptions, Text
from server.telemetry import log as speculation_log
from server.telemetry.log import Reporter
from server.text import SamplingDefaults, Tokenizer
from server.turns import SERVICE
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


def create_app(service: Service, gate: Gate | None = None) -> web.Application:
    """The application around a service. gate: who may use it; without one everybody on this machine."""
    gate = gate or Gate()
    middlewares = [access_log.record, _answer_errors, gate.admit]
    app = web.Application(middlewares=middlewares)
    app[SERVICE] = service
    app[dashboard.FEED] = feed = Feed()
    app.on_shutdown.append(feed.close)
    app.cleanup_ctx.extend([gate.life, Reporter(service.telemetry).life, service.self_check.life])
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
    except ConnectionResetError:
        raise  # the client is gone, there is nobody to tell
    except Exception:
        id = REQUEST_ID.get()
        log.exception("%s %s failed (request %s)", request.method, request.rel_url.raw_path, id)
        message = f"The server made a mistake; its log says more about request {id}"
        detail = ErrorDetail(message, "internal_error", None, "internal_error")
        return _told(request, 500, ErrorBody(detail))


def _told(request: web.Request, status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> web.Response:
    """An error in the shape of the API whose path was called; OpenAI's where no other claims it."""
    shapes: list[ErrorShape] = [door.ERRORS for door in DOORS if hasattr(door, "ERRORS")]
    shape = next((shape for shape in shapes if request.path.startswith(shape.prefix)), None)
    return json_response(body if shape is None else shape.make(status, body), status, headers)


def _request_id(request: web.Request) -> str:
    """The client's ``X-Request-Id`` if it is usable, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if usable_id(given) else uuid.uuid4().hex


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    # Without one where aiohttp itself refuses the request, for what it expects.
    response.headers["X-Request-Id"] = REQUEST_ID.get("") or _request_id(request)


# -- life ------------------------------------------------------------------------------------------------------------


def serve(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit status. Raises what :func:`run_server` raises."""
    stages = Stages(lines=True)

    def ready(info: EngineInfo, port: int) -> None:
        stages.close()
        banner.show(info, config, model_names(config)[0], port, stages.summary())

    def changed(status: EngineStatus) -> None:
        if status.state == "loading":
            stages(status.message, status.share)

    try:
        with stages:
            return asyncio.run(run_server(config, ready, changed))
    finally:
        _leave_the_busy()


async def run_server(
    config: ServeConfig, on_ready: Callable[[EngineInfo, int], None], on_status: Callable[[EngineStatus], None]
) -> int:
    """Listen at once, load, call ``on_ready`` with the engine and the port, serve until told to stop, drain.

    on_status: told of every change of the engine's status.
    Raises :class:`ForesayError` if the port is taken or the engine can never start.
    """
    files.allow_most()
    asyncio.get_running_loop().set_exception_handler(files.Refusals())
    threads = SharedThreads(thread_name_prefix=_BESIDE)
    asyncio.get_running_loop().set_default_executor(threads)
    engine = EngineClient(config)
    service = Service(engine, ServiceOptions.of(config, model_names(config)))
    engine.observe, engine.observe_status = service.telemetry.step, [service.telemetry.startup.see, on_status]
    engine.observe_shadow = service.telemetry.shadowed
    gate, tls = Gate.of(config), context(config)
    if config.access_log:
        access_log.to_stderr()
    if config.log_stats:
        speculation_log.to_stderr()
    # Without handler_cancellation a client that leaves during a long prefill would be noticed at the first write only.
    runner = web.AppRunner(
        create_app(service, gate),
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
        await engine.start()
        await _until_stopped(engine, _load(service, engine, config), lambda info: on_ready(info, port), signals)
        await _drain(service, config.drain_seconds, signals)
    finally:
        await engine.stop()
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


async def _until_stopped(
    engine: EngineClient,
    load: Coroutine[None, None, EngineInfo],
    on_ready: Callable[[EngineInfo], None],
    signals: StopSignals,
) -> None:
    """Load, then wait for the signal; the signal may come first. Raises what ends the supervision of the engine."""
    waits: tuple[Coroutine[None, None, Any], ...] = (load, signals.stop.wait(), engine.until_ended())
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


async def _drain(service: Service, seconds: float, signals: StopSignals) -> None:
    """Let running requests finish; a second signal ends the patience."""
    draining, hurry = asyncio.create_task(service.drain(seconds)), asyncio.create_task(signals.hurry.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not draining.done():
        draining.cancel()
        await service.drain(0.0)


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


async def _load(service: Service, engine: EngineClient, config: ServeConfig) -> EngineInfo:
    """Load the tokenizer while the engine process loads the models."""
    text, info = await asyncio.gather(asyncio.to_thread(load_text, config), engine.until_ready())
    service.text = text
    service.bodies.most = MOST_BODIES * service.largest_body
    gc.collect()
    gc.freeze()  # what was loaded stays; a full collection would look through all of it while streams wait
    return info


def load_text(config: ServeConfig) -> Text:
    """The tokenizer and the sampling defaults of the target."""
    from server.build import target_directory

    directory = target_directory(config)
    tokenizer = Tokenizer.load(directory)
    dialect = Dialect.of(tokenizer, config.tool_parser, config.reasoning_parser)
    text = Text(tokenizer, SamplingDefaults.read(directory), dialect)
    if text.tokenizer.has_template:  # compiled now rather than while the first chat request waits
        with contextlib.suppress(InvalidRequest):
            text.tokenizer.render([{"role": "user", "content": ""}])
    return text
