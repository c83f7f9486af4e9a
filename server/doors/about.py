"""What the server says about itself: models, health, readiness."""

from __future__ import annotations

from aiohttp import web

from server.doors.body import json_response
from server.engine_client import unavailable
from server.service import Service
from server.turns import SERVICE
from server.wire.shared import ModelCard, ModelList


async def _index(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    routes = ["/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/ready"]
    return json_response(
        {"name": "foresay", "model": service.options.model, "status": _state(service), "routes": routes}
    )


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
    return json_response(body, 200 if status.state == "ready" else 503)


async def _ready(request: web.Request) -> web.Response:
    """Whether new requests are taken."""
    service = request.app[SERVICE]
    refusal = service.refusal()
    if refusal is not None:
        raise refusal
    return json_response({"status": "ready"})


def _state(service: Service) -> str:
    """One word for it all."""
    return "draining" if service.draining else "ok" if service.refusal() is None else service.engine.status.state


async def _models(request: web.Request) -> web.Response:
    return json_response(ModelList([_card(request.app[SERVICE])]))


async def _model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_model(request.match_info["name"])
    return json_response(_card(service))


def _card(service: Service) -> ModelCard:
    info = service.engine.info
    if info is None:
        raise unavailable(service.engine.status)
    return ModelCard(
        id=service.options.model, created=service.created, root=info.target, max_model_len=info.max_model_len
    )


ROUTES = [
    web.get("/", _index),
    web.get("/health", _health),
    web.get("/ready", _ready),
    web.get("/v1/models", _models),
    web.get("/v1/models/{name:.+}", _model),
]
