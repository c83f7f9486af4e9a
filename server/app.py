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

import msgspec
from aiohttp import web

from server import banner
from server.config import ServeConfig
from server.endpoints import REQUEST_ID, SERVICE, chat_completions, completions
from server.engine_client import EngineClient, unavailable
from server.errors import ApiError, described
from server.openai import ErrorBody, ErrorDetail, ModelCard, ModelList
from server.service import Service, ServiceOptions, Text
from server.text import SamplingDefaults, Tokenizer
from spec.errors import ConfigurationError, InvalidRequest
from spec.request import EngineInfo

LARGEST_BODY = 64 << 20
LONGEST_REQUEST_ID = 128
CLOSING_SECONDS = 2.0
log = logging.getLogger("foresay.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(service: Service) -> web.Application:
    """The application around a service."""
    app = web.Application(middlewares=[_answer_errors], client_max_size=LARGEST_BODY)
    app[SERVICE] = service
    app.on_response_prepare.append(_name_request)
    app.add_routes(
        [
            web.get("/", _index),
            web.get("/health", _health),
            web.get("/ready", _ready),
            web.get("/v1/models", _models),
            web.get("/v1/models/{name:.+}", _model),
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
        ]
    )
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
        return _json(body, status, {} if wait is None else {"Retry-After": str(wait)})
    except web.HTTPException as error:
        detail = ErrorDetail(f"{error.reason}: {request.method} {request.path}", "invalid_request_error", None, None)
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _json(ErrorBody(detail), error.status, allow)
    except ConnectionResetError:
        raise  # the client is gone, there is nobody to tell
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        detail = ErrorDetail("The server made a mistake; its log says more", "internal_error", None, "internal_error")
        return _json(ErrorBody(detail), 500)


def _request_id(request: web.Request) -> str:
    """The client's ``X-Request-Id`` if it is short and printable, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    usable = 0 < len(given) <= LONGEST_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = REQUEST_ID.get()


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


# -- what the server says about itself -------------------------------------------------------------------------------


async def _index(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    routes = ["/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/ready"]
    return _json({"name": "foresay", "model": service.options.model, "status": _state(service), "routes": routes})


async def _health(request: web.Request) -> web.Response:
    """Whether the engine is alive, and what it is."""
    service = request.app[SERVICE]
    status, info = service.engine.status, service.engine.info
    body: dict[str, object] = {"status": _state(service), "model": service.options.model}
    if status.message:
        body["message"] = status.message
    if info is not None:
        body |= {"exact": "yes" if info.exact else "no", "exact_reason": info.exact_reason}
        body |= {"target": info.target, "drafter": info.drafter, "dtype": info.dtype, "device": info.device}
    body |= {"running": service.running, "engine_starts": status.starts}
    return _json(body, 200 if status.state == "ready" else 503)


async def _ready(request: web.Request) -> web.Response:
    """Whether new requests are taken."""
    service = request.app[SERVICE]
    refusal = service.refusal()
    if refusal is not None:
        raise refusal
    return _json({"status": "ready"})


def _state(service: Service) -> str:
    """One word for it all."""
    return "draining" if service.draining else "ok" if service.refusal() is None else service.engine.status.state


async def _models(request: web.Request) -> web.Response:
    return _json(ModelList([_card(request.app[SERVICE])]))


async def _model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_model(request.match_info["name"])
    return _json(_card(service))


def _card(service: Service) -> ModelCard:
    info = service.engine.info
    if info is None:
        raise unavailable(service.engine.status)
    return ModelCard(
        id=service.options.model, created=service.created, root=info.target, max_model_len=info.max_model_len
    )


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
