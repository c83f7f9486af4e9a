"""Replacing the engine of a running server: ``POST /admin/reload``.

It stops, and another starts with other engine settings or another model (docs/resumption.md). New requests wait
meanwhile; running ones go on in the next engine, or end in this one first if the next has another model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from aiohttp import web

from foresay.server.api.common.route import Route, json_response
from foresay.server.engine_process.client_base import Resumed
from foresay.server.models.model import Model
from foresay.server.models.models import MODELS, Models
from foresay.server.schemas.errors import ApiError, NotNow
from foresay.server.settings.load import changed
from foresay.spec.errors import ForesayError, InvalidRequest


class ReloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/reload``. settings: the engine settings to change, by name, as in the section ``[engine]`` of a
    settings file; without any, its files are read again. model: a model of the server (default: the first one)."""

    settings: dict[str, Any] = {}
    model: str | None = None


class Reloaded(msgspec.Struct, kw_only=True):
    """The engine was replaced. moved: running requests that continue in the new one. seconds: until it was ready;
    pause: those of them in which no engine ran; null with replicas, which are replaced one by one."""

    status: Literal["replaced"] = "replaced"
    model: str
    moved: int
    seconds: float
    pause: float | None


async def reloaded(http: web.Request, body: ReloadRequest) -> web.StreamResponse:
    """Replace the engine: with other settings, another draft, or another model."""
    models = http.app[MODELS]
    entry, began = models.chosen(body.model), time.monotonic()
    running = models.reloading.get(entry.name)
    if running is not None and not running.done():
        raise NotNow(f"the engine of {entry.name} is already being replaced")
    models.reloading[entry.name] = task = asyncio.create_task(_reload(models, entry, body.settings))
    moved, pause = await asyncio.shield(task)  # it goes on even if the client leaves
    return json_response(Reloaded(model=entry.name, moved=moved, seconds=time.monotonic() - began, pause=pause))


async def _reload(models: Models, entry: Model, settings: Mapping[str, Any]) -> Resumed:
    """Reload with these settings. Raises :class:`InvalidRequest`, which names a wrong one; the earlier ones hold."""
    try:
        return await _changed(models, entry, settings)
    except (ApiError, InvalidRequest):
        raise
    except ForesayError as error:
        raise InvalidRequest("settings", str(error)) from None


async def _changed(models: Models, entry: Model, settings: Mapping[str, Any]) -> Resumed:
    before = entry.service.config
    config = changed(before, settings)
    info = entry.info or (await entry.arrived() if entry.loaded else None)
    same = config.target == before.target
    name = "kv_tokens" if config.max_model_len is None else "max_model_len"  # of the first follows the second
    length, least = getattr(config, name), 0 if info is None else info.max_model_len
    if same and length is not None and length < least:
        raise InvalidRequest(name, f"{name} ({length}) is too small: running requests may need {least} tokens")
    if not same and config.replicas is not None:
        raise InvalidRequest("target", f": replicas cannot change their model; deploy {config.target} instead")
    return await models.reload(entry, config, same)


ROUTES = [
    Route("POST", "/admin/reload", reloaded, ReloadRequest, Reloaded, always=True),
]
