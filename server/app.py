"""The HTTP application: routes, error bodies, request ids, and its life from the first connection to SIGTERM.

::

    listen ── 503 loading ──> engine and tokenizer ready ── banner, 200 ──> SIGTERM ── 503 draining ──> exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import uuid
from collections.abc import Awaitable, Callable, Coroutine

from aiohttp import web

from server import banner
from server.config import ServeConfig
from server.doors import about, chat, completions
from server.doors.body import json_response
from server.engine_client import EngineClient
from server.errors import ApiError, described
from server.service import Service, ServiceOptions, Text
from server.text import SamplingDefaults, Tokenizer
from server.turns import REQUEST_ID, SERVICE
from server.wire.shared import ErrorBody, ErrorDetail
from spec.errors import ConfigurationError, InvalidRequest
from spec.request import EngineInfo

LARGEST_BODY = 64 << 20
LONGEST_REQUEST_ID = 128
CLOSING_SECONDS = 2.0
log = logging.getLogger("foresay.server")

DOORS = (about, completions, chat)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(service: Service) -> web.Application:
    """The application around a service."""
    app = web.Application(middlewares=[_answer_errors], client_max_size=LARGEST_BODY)
    app[SERVICE] = service
    app.on_response_prepare.append(_name_request)
    for door in DOORS:
        app.add_routes(door.ROUTES)
    return app


# -- every request ---------------------------------------------------------------------------------------------------


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, and every error OpenAI's body."""
    REQUEST_ID.set(_request_id(request))
    try:
        return await handler(request)
    except (ApiError, InvalidRequest) as error:
        status, body = described(error)
        wait = getattr(error, "retry_after", None)
        return json_response(body, status, {} if wait is None else {"Retry-After": str(wait)})
    except web.HTTPException as error:
        detail = ErrorDetail(f"{error.reason}: {request.method} {request.path}", "invalid_request_error", None, None)
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return json_response(ErrorBody(detail), error.status, allow)
    except ConnectionResetError:
        raise  # the client is gone, there is nobody to tell
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        detail = ErrorDetail("The server made a mistake; its log says more", "internal_error", None, "internal_error")
        return json_response(ErrorBody(detail), 500)


def _request_id(request: web.Request) -> str:
    """The client's ``X-Request-Id`` if it is short and printable, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    usable = 0 < len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = REQUEST_ID.get()


# -- life ------------------------------------------------------------------------------------------------------------


def serve(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit status. Raises what :func:`run_server` raises."""
    return asyncio.run(run_server(config, lambda info, port: banner.show(info, config, model_name(config), port)))


def model_name(config: ServeConfig) -> str:
    """What clients call the model."""
    return config.served_model_name or config.target


async def run_server(config: ServeConfig, on_ready: Callable[[EngineInfo, int], None]) -> int:
    """Listen at once, load, call ``on_ready`` with the engine and the port, serve until told to stop, drain.

    Raises :class:`ForesayError` if the port is taken or the engine can never start.
    """
    engine = EngineClient(config)
    most_running = config.max_seqs + config.max_queue
    service = Service(engine, ServiceOptions(model=model_name(config), most_running=most_running, seed=config.seed))
    # Without handler_cancellation a client that leaves during a long prefill would be noticed at the first write only.
    runner = web.AppRunner(
        create_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=CLOSING_SECONDS
    )
    await runner.setup()
    try:
        port = await _listen(runner, config)
        signals = StopSignals()
        await engine.start()
        await _until_stopped(_load(service, engine, config), lambda info: on_ready(info, port), signals)
        await _drain(service, config.drain_seconds, signals)
    finally:
        await engine.stop()
        await runner.cleanup()
    return 0


class StopSignals:
    """SIGTERM and SIGINT: the first asks to stop, the second to hurry."""

    def __init__(self) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _until_stopped(
    load: Coroutine[None, None, EngineInfo], on_ready: Callable[[EngineInfo], None], signals: StopSignals
) -> None:
    """Load, then wait for the signal; the signal may come first."""
    loading, stopped = asyncio.create_task(load), asyncio.create_task(signals.stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return
    try:
        on_ready(loading.result())
        await stopped
    finally:
        stopped.cancel()


async def _drain(service: Service, seconds: float, signals: StopSignals) -> None:
    """Let running requests finish; a second signal ends the patience."""
    draining, hurry = asyncio.create_task(service.drain(seconds)), asyncio.create_task(signals.hurry.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not draining.done():
        draining.cancel()
        await service.drain(0.0)


async def _listen(runner: web.AppRunner, config: ServeConfig) -> int:
    """Open the port; returns its number."""
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {config.host} port {config.port}: {error.strerror}") from error
    return int(runner.addresses[0][1])


async def _load(service: Service, engine: EngineClient, config: ServeConfig) -> EngineInfo:
    """Load the tokenizer while the engine process loads the models."""
    text, info = await asyncio.gather(asyncio.to_thread(load_text, config), engine.until_ready())
    service.text = text
    return info


def load_text(config: ServeConfig) -> Text:
    """The tokenizer and the sampling defaults of the target."""
    from server.build import target_directory

    directory = target_directory(config)
    text = Text(Tokenizer.load(directory), SamplingDefaults.read(directory))
    if text.tokenizer.has_template:  # compiled now rather than while the first chat request waits
        with contextlib.suppress(InvalidRequest):
            text.tokenizer.render([{"role": "user", "content": ""}])
    return text
