"""Models, health, readiness, load, metrics and settings of the server; and the page, with its data.

The page's feed is one event a second with everything that changes. While a reader does not read, no events are made for
it, only its socket's buffer fills, and other readers are unaffected; after a while it is disconnected.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from hashlib import md5
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

import foresay
from foresay.server.api.common.route import EVENTS, Route, json_response
from foresay.server.catalog.catalog import find_target
from foresay.server.gateway.keys import CONTEXT
from foresay.server.metrics.exposition import CONTENT_TYPE
from foresay.server.metrics.records import Replica
from foresay.server.metrics.report import HistoryReport, Point, RequestSummary, Snapshot
from foresay.server.models.model import Model
from foresay.server.models.models import MODELS, Models
from foresay.server.schemas.shared import ModelCard, ModelList, UsualSampling
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.fields import settings_of
from foresay.server.settings.units import moment
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import EngineInfo

# -- schemas ------------------------------------------------------------------------------------------------------


class Health(msgspec.Struct, kw_only=True):
    """``GET /health``: the engine's state, and whether speculation changes its tokens. drafter: its name; draft: the
    same as a value of ``--draft``. running: requests running and waiting.

    status: ok, unloaded (after a time without requests; the next one waits until it is loaded), loading, down, failed
    or draining. models: the status of each by name, if there are several.
    """

    status: str
    model: str
    message: str | UnsetType = UNSET
    exact: str | UnsetType = UNSET
    exact_reason: str | UnsetType = UNSET
    target: str | UnsetType = UNSET
    drafter: str | UnsetType = UNSET
    draft: str | UnsetType = UNSET
    dtype: str | UnsetType = UNSET
    device: str | UnsetType = UNSET
    running: int
    engine_starts: int
    models: dict[str, str] | UnsetType = UNSET


class Load(msgspec.Struct, kw_only=True):
    """``GET /load``. running: sequences that have a slot in the engine; waiting: those that have none yet. server_load:
    both together, as in vLLM. replicas: each engine, if there are several."""

    running: int
    waiting: int
    server_load: int
    replicas: list[Replica] | UnsetType = UNSET


class ServerInfo(msgspec.Struct, kw_only=True):
    """``GET /server_info``. started: in seconds since 1970. config: the settings in effect, without secrets. engine:
    null until it was first ready. models: the engine of each model, if there are several; ``engine`` is the first
    one's."""

    version: str
    model: str
    status: str
    started: int
    config: dict[str, Any]
    engine: EngineInfo | None
    models: dict[str, EngineInfo | None] | UnsetType = UNSET


class State(msgspec.Struct, frozen=True):
    """``GET /dashboard/state``: the page's initial data. models: the state of each by name, if there are several."""

    snapshot: Snapshot
    history: HistoryReport
    models: dict[str, str] | UnsetType = UNSET


class Frame(msgspec.Struct, frozen=True):
    """One event. points: the seconds finished since the last event. models: as in :class:`State`."""

    snapshot: Snapshot
    points: list[Point]
    models: dict[str, str] | UnsetType = UNSET


def listed(models: Models) -> dict[str, str] | UnsetType:
    """The state of each model by name; unset if there is only one."""
    return {entry.name: entry.status for entry in models} if models.several else UNSET


# -- routes ------------------------------------------------------------------------------------------------------------

HIDDEN = "(hidden)"


async def index(request: web.Request) -> web.StreamResponse:
    """The server's name, version and routes. Browsers get the dashboard."""
    if "text/html" in request.headers.get("Accept", ""):
        return await page(request)
    if request.headers.get("User-Agent", "").lower().startswith("ollama"):
        return web.Response(text="Ollama is running")  # which its clients check for
    models = request.app[MODELS]
    routes = sorted({route.resource.canonical for route in request.app.router.routes() if route.resource})
    known = {"name": "foresay", "version": foresay.__version__, "model": models.first.name, "status": _state(models)}
    return json_response({**known, "routes": routes})


async def health(request: web.Request) -> web.Response:
    """The engine's state and configuration."""
    models = request.app[MODELS]
    first = models.first
    info = first.service.engine.info
    body = Health(
        status=_state(models),
        model=first.name,
        message=first.message or msgspec.UNSET,
        running=sum(entry.service.running for entry in models),
        engine_starts=sum(entry.service.engine.status.starts for entry in models),
    )
    if models.several:
        body.message, body.models = msgspec.UNSET, {entry.name: entry.status for entry in models}
        return json_response(body)
    if info is not None:
        body.exact, body.exact_reason = "yes" if info.exact else "no", info.exact_reason
        body.target, body.drafter, body.draft = info.target, info.drafter, info.draft
        body.dtype, body.device = info.dtype, info.device
    return json_response(body, 200 if first.is_well else 503)


async def ready(request: web.Request) -> web.Response:
    """Whether new requests are accepted."""
    request.app[MODELS].check_open()
    return json_response({"status": "ready"})


def _state(models: Models) -> str:
    """The server's state in one word: several models are loaded on request, so the server is ok while requests are
    taken."""
    if not models.several:
        return models.first.status
    return "draining" if models.server.draining else "ok"


async def load(request: web.Request) -> web.Response:
    """The engine's load."""
    services = [entry.service for entry in request.app[MODELS]]
    running = sum(min(one.running, one.engine.info.max_seqs if one.engine.info else 0) for one in services)
    replicas = [replica for one in services for replica in one.telemetry.replicas()]
    everything = sum(one.running for one in services)
    waiting = everything - running
    return json_response(Load(running=running, waiting=waiting, server_load=everything, replicas=replicas or UNSET))


async def version(request: web.Request) -> web.Response:
    """The version of Foresay."""
    return json_response({"version": foresay.__version__})


async def server_info(request: web.Request) -> web.Response:
    """The settings in effect and the running engine."""
    models = request.app[MODELS]
    first = models.first
    body = ServerInfo(
        version=foresay.__version__,
        model=first.name,
        status=_state(models),
        started=models.server.created,
        config=settings_shown(first.service.config),
        engine=first.service.engine.info,
    )
    if models.several:
        body.models = {entry.name: entry.service.engine.info for entry in models}
    return json_response(body)


def settings_shown(config: ServeConfig) -> dict[str, Any]:
    """The settings by name; values that hold a key are hidden."""
    known = settings_of(ServeConfig)
    settings = {name: getattr(config, name) for name in known}
    return {name: HIDDEN if value and known[name].is_secret else value for name, value in settings.items()}


async def models(request: web.Request) -> web.Response:
    """The served models, one entry per name."""
    served = request.app[MODELS]
    cards = [_card(served, entry, name) for entry in served for name in entry.service.names.known]
    return json_response(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


async def model(request: web.Request) -> web.Response:
    """One served model."""
    served, name = request.app[MODELS], request.match_info["name"]
    entry = served.find(name)
    return json_response(_card(served, entry, name if name in entry.service.names.known else entry.name))


def _card(served: Models, entry: Model, name: str) -> ModelCard:
    info, created, known = entry.info, served.server.created, find_target(entry.target)
    longest = (entry.service.longest if info is None else info.max_model_len) or UNSET
    return ModelCard(
        id=name,
        created=created,
        root=entry.target,
        max_model_len=longest,
        context_length=longest,
        max_input_tokens=longest,
        max_tokens=entry.service.config.max_output_tokens or UNSET,
        rarely_calls_tools=UNSET if known is None else known.rarely_calls_tools or UNSET,
        meta=UNSET if info is None else _meta(info),
        loaded=entry.loaded if served.several else msgspec.UNSET,
        sampling=_sampling(entry),
        display_name=name,
        created_at=moment(created),
    )


def _meta(info: EngineInfo) -> dict[str, int]:
    sizes = {"n_ctx": info.max_model_len, "n_ctx_train": info.trained_length, "n_vocab": info.vocab_size}
    return sizes | {"n_embd": info.hidden_size, "n_params": info.parameters, "size": info.weight_bytes}


def _sampling(entry: Model) -> UsualSampling | UnsetType:
    text = entry.service.text
    if text is None:
        return UNSET
    names = ("temperature", "top_k", "top_p")
    usual, recommended = text.defaults.for_people(), [one for one in names if getattr(text.defaults, one) is not None]
    return UsualSampling(**{name: getattr(usual, name) for name in names}, recommended=recommended)


async def metrics(request: web.Request) -> web.Response:
    """Counters, gauges and histograms, for Prometheus."""
    return web.Response(body=await request.app[MODELS].exposition.text(), headers={"Content-Type": CONTENT_TYPE})


# -- the page ----------------------------------------------------------------------------------------------------------


#: Of a reader that does not read.
STALL_SECONDS = 20.0
#: Seconds after the full second, so that the second's counts are final.
LATE = 0.05
STATIC = Path(__file__).parent / "static"
#: Nothing from other origins, nothing inline, and no framing by other pages.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    "Cache-Control": "no-cache",  # cached, but revalidated: an upgraded server has another page
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
}


#: Set when the server shuts down, which ends all feeds.
CLOSING: web.AppKey[asyncio.Event] = web.AppKey("closing", asyncio.Event)


async def close(app: web.Application) -> None:
    """End all feeds."""
    app[CLOSING].set()


def _chosen(http: web.Request) -> Model:
    """The model to report on."""
    return http.app[MODELS].chosen(http.query.get("model"))


async def page(http: web.Request) -> web.Response:
    """The page or one of its files, unless the client has it. It asks for a key itself if the server wants one."""
    name = http.match_info.get("name", "index.html")
    if name not in os.listdir(STATIC):  # whatever else a name may mean to a file system
        raise web.HTTPNotFound
    body = (STATIC / name).read_bytes()  # aiohttp's FileResponse leaves it open if the client leaves in that moment
    tag = md5(body, usedforsecurity=False).hexdigest()
    if any(each.value == tag for each in http.if_none_match or ()):
        return web.Response(status=304, headers=HEADERS | {"ETag": f'"{tag}"'})
    headers = HEADERS | {"ETag": f'"{tag}"', "Content-Type": f"{guess_type(name)[0]}; charset=utf-8"}
    return web.Response(body=body, headers=headers)


async def state(http: web.Request) -> web.Response:
    """The numbers of the dashboard and their history, of all keys together, without text; of the given model."""
    telemetry = _chosen(http).service.telemetry
    return json_response(State(await telemetry.snapshot(), telemetry.history(), listed(http.app[MODELS])))


async def feed(http: web.Request) -> web.StreamResponse:
    """The same as it changes, an event per second. ``since``: the first second to report."""
    given = http.query.get("since", "0")
    if not given.isdecimal() or len(given) > 12:
        raise InvalidRequest("since", f" must be a number of seconds since 1970, got {given!r}")
    telemetry, after, closing = _chosen(http).service.telemetry, int(given) - 1, http.app[CLOSING]
    response = web.StreamResponse(headers={"Content-Type": EVENTS.content_type, "Cache-Control": "no-store"})
    await response.prepare(http)
    try:
        while not closing.is_set():
            points, after = telemetry.points(after)
            frame = Frame(await telemetry.snapshot(), points, listed(http.app[MODELS]))
            async with asyncio.timeout(STALL_SECONDS):
                await response.write(EVENTS.encode(frame))
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0 + LATE - telemetry.clock() % 1.0):
                    await closing.wait()
        await response.write_eof()
    except (TimeoutError, ConnectionError):
        if http.transport is not None:
            http.transport.abort()  # do not wait for the rest to be read
    return response


async def requests(http: web.Request) -> web.Response:
    """The last requests of the caller's key, the newest first."""
    return json_response(_chosen(http).service.telemetry.requests(CONTEXT.get().caller.tenant))


QUERY = (("model", "string", "the model to report on, if there are several (default: the first)"),)
ROUTES = [
    Route("GET", "/", index, answer=dict[str, Any]),
    Route("GET", "/health", health, answer=Health),
    Route("GET", "/ping", health, answer=Health),
    Route("GET", "/ready", ready, answer=dict[str, str]),
    Route("GET", "/load", load, answer=Load),
    Route("GET", "/metrics", metrics, media="text/plain"),
    Route("GET", "/version", version, answer=dict[str, str]),
    Route("GET", "/server_info", server_info, answer=ServerInfo),
    Route("GET", "/v1/models", models, answer=ModelList),
    Route("GET", r"/v1/models/{name:[\s\S]+}", model, answer=ModelCard),
    web.get("/dashboard", page),
    web.get("/dashboard/static/{name}", page),
    web.get("/dashboard/feed", feed, allow_head=False),
    Route("GET", "/dashboard/state", state, answer=State, query=QUERY),
    Route("GET", "/dashboard/requests", requests, answer=list[RequestSummary], query=QUERY),
]
