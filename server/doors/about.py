"""What the server says about itself: models, health, readiness, load, settings."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

import foresay
from server.answers.ollama import moment
from server.config import ServeConfig
from server.dashboard.assets import PAGE, served, wants_page
from server.doors.body import json_response
from server.doors.route import Route
from server.engine_status import unavailable
from server.service import Service
from server.settings import settings_of
from server.turns import SERVICE
from server.wire.about import Health, Index, Load, Readiness, ServerInfo, Version
from server.wire.shared import ModelCard, ModelList

HIDDEN = "(hidden)"


async def index(request: web.Request) -> web.Response:
    """What this is and where things are. Browsers get the dashboard."""
    if wants_page(request):
        return served(request, PAGE)
    service = request.app[SERVICE]
    routes = sorted({route.resource.canonical for route in request.app.router.routes() if route.resource})
    model, status = service.options.model, _state(service)
    return json_response(Index(version=foresay.__version__, model=model, status=status, routes=routes))


async def health(request: web.Request) -> web.Response:
    """Whether the engine is alive, and what it is."""
    service = request.app[SERVICE]
    status, info = service.engine.status, service.engine.info
    body = Health(
        status=_state(service),
        model=service.options.model,
        message=status.message or msgspec.UNSET,
        running=service.running,
        engine_starts=status.starts,
    )
    if info is not None:
        body.exact, body.exact_reason = "yes" if info.exact else "no", info.exact_reason
        body.target, body.drafter, body.draft = info.target, info.drafter, info.draft
        body.dtype, body.device = info.dtype, info.device
    return json_response(body, 200 if status.state == "ready" else 503)


async def ready(request: web.Request) -> web.Response:
    """Whether new requests are taken."""
    service = request.app[SERVICE]
    refusal = service.refusal()
    if refusal is not None:
        raise refusal
    return json_response(Readiness(status="ready"))


def _state(service: Service) -> str:
    """One word for it all."""
    return "draining" if service.draining else "ok" if service.refusal() is None else service.engine.status.state


async def load(request: web.Request) -> web.Response:
    """How busy the engine is."""
    service = request.app[SERVICE]
    places = service.engine.info.max_seqs if service.engine.info else 0
    running = min(service.running, places)
    return json_response(Load(running=running, waiting=service.running - running))


async def version(request: web.Request) -> web.Response:
    """The version of Foresay."""
    return json_response(Version(version=foresay.__version__))


async def server_info(request: web.Request) -> web.Response:
    """The settings in effect and the engine that runs."""
    service = request.app[SERVICE]
    config = service.options.config
    body = ServerInfo(
        version=foresay.__version__,
        model=service.options.model,
        status=_state(service),
        started=service.created,
        config={} if config is None else settings_shown(config),
        engine=service.engine.info,
    )
    return json_response(body)


def settings_shown(config: ServeConfig) -> dict[str, Any]:
    """The settings by name; the value of one that holds a key is not told."""
    settings = msgspec.structs.asdict(config)
    known = settings_of(ServeConfig)
    return {name: HIDDEN if value and known[name].is_secret else value for name, value in settings.items()}


async def models(request: web.Request) -> web.Response:
    """The model served here, as a list: once for each of its names."""
    service = request.app[SERVICE]
    cards = [_card(service, name) for name in service.options.names.known]
    return json_response(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


async def model(request: web.Request) -> web.Response:
    """The model, if it is the one served here."""
    service = request.app[SERVICE]
    name = request.match_info["name"]
    service.check_model(name)
    return json_response(_card(service, name if name in service.options.names.known else service.options.model))


def _card(service: Service, name: str) -> ModelCard:
    info = service.engine.info
    if info is None:
        raise unavailable(service.engine.status)
    return ModelCard(
        id=name,
        created=service.created,
        root=info.target,
        max_model_len=info.max_model_len,
        display_name=name,
        created_at=moment(service.created),
    )


ROUTES = [
    Route("GET", "/", index, answer=Index),
    Route("GET", "/health", health, answer=Health, errors=(503,)),
    Route("GET", "/ping", health, answer=Health, errors=(503,)),
    Route("GET", "/ready", ready, answer=Readiness, errors=(503,)),
    Route("GET", "/load", load, answer=Load),
    Route("GET", "/version", version, answer=Version),
    Route("GET", "/server_info", server_info, answer=ServerInfo),
    Route("GET", "/v1/models", models, answer=ModelList, errors=(401, 503)),
    Route(
        "GET",
        r"/v1/models/{name:[\s\S]+}",
        model,
        answer=ModelCard,
        errors=(401, 404, 503),
        parameters=(("name", "what clients call the model"),),
    ),
]
