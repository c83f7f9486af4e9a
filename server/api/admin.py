"""Replacing the engine of a running server: ``POST /admin/reload``.

It stops, and another starts with other engine settings, other weights, or another model (docs/resumption.md). New
requests wait meanwhile; running ones go on in the next engine, or end in this one first if the next has another model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web

from foresay.server.api.common.route import BODY_ERRORS, LINES, EventStream, Route, Stream, json_response
from foresay.server.engine_process.client_base import Progress, Resumed
from foresay.server.models.model import Model
from foresay.server.models.models import MODELS, Models
from foresay.server.schemas.errors import ApiError, NotNow, described
from foresay.server.schemas.shared import ErrorDetail
from foresay.server.settings.config import EngineConfig, ServeConfig
from foresay.server.settings.load import changed
from foresay.server.settings.resolved import cached_target, target_directory
from foresay.server.text.tokenizer import tokenizer_file
from foresay.spec.errors import ForesayError, InvalidRequest

log = logging.getLogger("foresay.server")


class ReloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /admin/reload``. settings: the engine settings to change, by name, as in the section ``[engine]`` of a
    settings file; without any, its files are read again. model: a model of the server (default: the first one).
    stream: report progress as lines of JSON; the last line is the result or an error."""

    settings: dict[str, Any] = {}
    model: str | None = None
    stream: bool | None = None


class Reloading(msgspec.Struct, kw_only=True):
    """Progress. share: of the phase, from 0 to 1; null if unknown."""

    status: Literal["loading"] = "loading"
    phase: str
    share: float | None


class Reloaded(msgspec.Struct, kw_only=True):
    """The engine was replaced. moved: running requests that continue in the new one. seconds: until it was ready;
    pause: those of them in which no engine ran; null with replicas, which are replaced one by one."""

    status: Literal["replaced"] = "replaced"
    model: str
    moved: int
    seconds: float
    pause: float | None


class ReloadError(msgspec.Struct, kw_only=True):
    """The last line of a stream if the previous engine keeps serving."""

    status: Literal["error"] = "error"
    error: ErrorDetail


async def reloaded(http: web.Request, body: ReloadRequest) -> web.StreamResponse:
    """Replace the engine: with other settings, another draft, other weights, or another model."""
    models = http.app[MODELS]
    entry, began = models.chosen(body.model), time.monotonic()
    events = EventStream.of(http, LINES)
    updates: asyncio.Queue[Reloading | None] = asyncio.Queue()
    reloading = begin(
        models, entry, body.settings, lambda phase, share: updates.put_nowait(Reloading(phase=phase, share=share))
    )
    reloading.add_done_callback(lambda _: updates.put_nowait(None))
    try:
        if body.stream:
            while (line := await updates.get()) is not None:
                await events.send([line])
        moved, pause = await asyncio.shield(reloading)
        answer = Reloaded(model=entry.name, moved=moved, seconds=time.monotonic() - began, pause=pause)
    except (ApiError, InvalidRequest) as error:
        if not events.started:
            raise
        await events.send([ReloadError(error=described(error)[1].error)])
        return await events.end()
    finally:
        if not reloading.done():  # the client left
            reloading.add_done_callback(partial(_log_failure, entry.name))
    if not body.stream:
        return json_response(answer)
    await events.send([answer])
    return await events.end()


def _log_failure(name: str, reloading: asyncio.Task[Resumed]) -> None:
    """Log the error that the client would have got."""
    error = None if reloading.cancelled() else reloading.exception()
    if error is not None:
        log.error("%s: the engine was not replaced: %s", name, error)


# -- reloading ------------------------------------------------------------------------------------------------------


#: Fields of config.json that do not affect the model's shape.
_LOOSE = frozenset(
    {"_name_or_path", "torch_dtype", "dtype", "transformers_version", "quantization_config", "use_cache"}
)


def begin(models: Models, entry: Model, settings: Mapping[str, Any], progress: Progress) -> asyncio.Task[Resumed]:
    """Reload the model with these settings. Continues even if the client leaves.

    Raises :class:`InvalidRequest` naming a wrong setting; then the earlier settings hold.
    """
    running = models.reloading.get(entry.name)
    if running is not None and not running.done():
        raise NotNow(f"the engine of {entry.name} is already being replaced")
    models.reloading[entry.name] = task = asyncio.create_task(_reload(models, entry, settings, progress))
    return task


async def _reload(models: Models, entry: Model, settings: Mapping[str, Any], progress: Progress) -> Resumed:
    try:
        return await _changed(models, entry, settings, progress)
    except (ApiError, InvalidRequest):
        raise
    except ForesayError as error:
        raise InvalidRequest(_field(str(error), settings), str(error)) from None


async def _changed(models: Models, entry: Model, settings: Mapping[str, Any], progress: Progress) -> Resumed:
    before = entry.service.config
    config = changed(before, settings)
    info = entry.info or (await entry.arrived() if entry.loaded else None)
    same = config.target == before.target
    if not same:  # also of one that is not loaded: it may be before its turn to be reloaded
        progress("checking the files", None)
        same = await asyncio.to_thread(_the_same, before, config)
    name = "kv_tokens" if config.max_model_len is None else "max_model_len"  # of the first follows the second
    length, least = getattr(config, name), 0 if info is None else info.max_model_len
    if same and length is not None and length < least:
        raise InvalidRequest(name, f"{name} ({length}) is too small: running requests may need {least} tokens")
    if not same and config.replicas is not None:
        raise InvalidRequest("target", f": replicas cannot change their model; deploy {config.target} instead")
    return await models.reload(entry, config, same, progress)


def _the_same(before: ServeConfig, after: ServeConfig) -> bool:
    """Whether two targets are the same model, possibly with other weights: equal shape and tokenizer."""
    wanted, there = target_directory(after), cached_target(before)
    try:
        return there is not None and _what_it_is(there) == _what_it_is(wanted)
    except (OSError, ValueError):  # one is a GGUF file, or is gone
        return False


def _what_it_is(directory: Path) -> tuple[dict[str, Any], bytes]:
    fields = json.loads((directory / "config.json").read_bytes())
    shape = {name: value for name, value in fields.items() if name not in _LOOSE}
    return shape, (tokenizer_file(directory) or directory / "tokenizer.json").read_bytes()


def _field(message: str, settings: Mapping[str, Any]) -> str:
    """The setting that an error message mentions, by its name or its flag."""
    words: list[str] = [word.strip("_") for word in re.findall(r"[a-z_]+", message.replace("-", "_"))]
    known = [word for word in words if word in settings or word in EngineConfig.__struct_fields__]
    return next((word for word in known if word in settings), (known or ["settings"])[0])


_STREAM, _ERRORS = Stream(LINES, (Reloading, Reloaded, ReloadError)), (*BODY_ERRORS, 409)
ROUTES = [Route("POST", "/admin/reload", reloaded, ReloadRequest, Reloaded, _STREAM, _ERRORS, always=True)]
