"""Ollama's API: ``/api/chat``, ``/api/generate``, and its models."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from aiohttp import web

import foresay
from foresay.server.api.common import validation
from foresay.server.api.common.route import LINES, ErrorShape, EventStream, Route, Stream, json_response
from foresay.server.api.common.turns import answered, chat_choices, completion_choices, leasing
from foresay.server.api.ollama import chats as ollama
from foresay.server.api.ollama import schemas
from foresay.server.catalog.catalog import of_short_name
from foresay.server.gateway.keys import CONTEXT
from foresay.server.models.model import Model
from foresay.server.models.models import MODELS
from foresay.server.models.service import AnswerOrigin, Service, Text
from foresay.server.schemas.chat import CompletionRequest
from foresay.server.schemas.errors import Forbidden, ModelNotFound
from foresay.server.schemas.shared import GenerationRequest
from foresay.server.settings.units import moment
from foresay.server.text.prompt import Room
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import EngineInfo

# -- models that are fetched -------------------------------------------------------------------------------------------

#: Seconds that a download has to remove what it began.
CLEAN_SECONDS = 2.0


@asynccontextmanager
async def fetching(name: str) -> AsyncIterator[asyncio.Task[None]]:
    """Fetch a model by ``foresay pull`` in a process of its own, which ends with this context. The task raises
    ModelNotFound if that cannot be."""
    task = asyncio.create_task(_fetch(name))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _fetch(name: str) -> None:
    words = [sys.executable, "-P", "-m", "foresay.server.cli", "pull", name]
    environment = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    process = await asyncio.create_subprocess_exec(
        *words, env=environment, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
    )
    try:
        said = (await process.communicate())[1].decode(errors="replace").strip()
    finally:
        await _end(process)
    if process.returncode:
        last = said.rpartition("\n")[2].removeprefix("foresay pull: ").removeprefix("NAME ")
        raise ModelNotFound(last or f"{name}: the download ended with status {process.returncode}")


async def _end(process: Process) -> None:
    """End a process that still runs, with its own."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError, TimeoutError):
            if process.returncode is None:
                os.killpg(process.pid, number)
            async with asyncio.timeout(CLEAN_SECONDS):
                await process.wait()


# -- routes ------------------------------------------------------------------------------------------------------------

#: The version of Ollama's API: the one that added log-probabilities. Clients that check need at least 0.6.4.
OLLAMA_VERSION = "0.12.11"
#: Seconds between two lines of progress while a model is fetched.
PULL_SECONDS = 1.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
#: The expiry of a model that stays for ever.
NEVER = "9999-12-31T23:59:59Z"


async def chat(http: web.Request, body: schemas.OllamaChatRequest) -> web.StreamResponse:
    """Answer a conversation."""
    if body.messages:
        return await _chat(http, body)
    message = schemas.OllamaAnswerMessage()
    done = schemas.OllamaChatLine(model=body.model, created_at=moment(), done=True, message=message)
    return await _load_only(http, body, done)


@leasing(LINES, keep=ollama.keep_alive)
async def _chat(http: web.Request, service: Service, body: schemas.OllamaChatRequest) -> web.StreamResponse:
    text, _ = service.opened()
    ollama.refuse_unsupported(body)
    with ollama.NAMES as names:
        request = ollama.chat_of(body, text.chat_format)
        choices = names.warned(await chat_choices(service, request))
        return await answered(http, service, request, choices, ollama.OllamaChat, _origin(service, body))


async def generate(http: web.Request, body: schemas.OllamaGenerateRequest) -> web.StreamResponse:
    """Answer or continue a prompt."""
    if body.prompt:
        return await _generate(http, body)
    done = schemas.OllamaGenerateLine(model=body.model, created_at=moment(), done=True, response="")
    return await _load_only(http, body, done)


@leasing(LINES, keep=ollama.keep_alive)
async def _generate(http: web.Request, service: Service, body: schemas.OllamaGenerateRequest) -> web.StreamResponse:
    text, _ = service.opened()
    ollama.refuse_unsupported(body)
    with ollama.NAMES_OF_PROMPT as names:
        request: GenerationRequest
        if not body.raw and text.tokenizer.has_template:
            request = chat = ollama.chat_of(body, text.chat_format)
            choices = await chat_choices(service, chat)
        else:
            request = raw = await _raw(service, body, body.prompt or "")
            choices = await completion_choices(service, raw, validation.prompts(raw))
        warned = names.warned(choices)
        return await answered(http, service, request, warned, ollama.OllamaGenerate, _origin(service, body))


async def _load_only(
    http: web.Request, body: schemas.OllamaRequest, done: schemas.OllamaProgress
) -> web.StreamResponse:
    """An empty prompt loads the model, or unloads it."""
    models, keep = http.app[MODELS], ollama.keep_alive(body)
    done.done_reason = "load"
    if keep == 0.0:
        models.forget(models.find(body.model))
        done.done_reason = "unload"
    else:
        async with models.lease(body.model, keep):
            pass
    return json_response(done)


async def _raw(service: Service, body: schemas.OllamaGenerateRequest, prompt: str) -> CompletionRequest:
    """The completion request of a raw prompt; max_tokens defaults to all that the context leaves."""
    _, info = service.opened()
    tokens = await service.encode(prompt, add_special_tokens=True, room=Room("prompt", info.max_model_len))
    fields = ollama.fields_of_raw(body)
    if fields["max_tokens"] is None:
        left = info.max_model_len - len(tokens)
        fields["max_tokens"] = max(1, min(left, service.config.max_output_tokens or left))
    return validation.converted({"prompt": tokens, **fields}, CompletionRequest)


def _origin(service: Service, body: schemas.OllamaRequest) -> AnswerOrigin:
    """The origin of an answer, which calls the model as the request does."""
    return msgspec.structs.replace(service.origin(CONTEXT.get().id, body.model), model=body.model)


async def tags(http: web.Request) -> web.Response:
    """The served models, loaded or not, one entry per name."""
    models = http.app[MODELS]
    models.check_open()
    names = [(entry, name) for entry in models for name in entry.service.names.known]
    return json_response(
        schemas.Tags([ollama.described(name, models.server.created, entry.info) for entry, name in names])
    )


async def running(http: web.Request) -> web.Response:
    """The loaded models, and when each is unloaded without further requests."""
    models = http.app[MODELS]
    models.check_open()
    return json_response(
        schemas.Running([_running(entry, info) for entry in models if (info := entry.running) is not None])
    )


def _running(entry: Model, info: EngineInfo) -> schemas.RunningModel:
    known = msgspec.structs.asdict(ollama.described(entry.name, entry.service.server.created, info))
    held, stays = 0 if info.footprint is None else info.footprint.held, entry.stays(time.monotonic())
    return schemas.RunningModel(
        **known | {"size": held},
        expires_at=NEVER if stays is None else moment(time.time() + stays),
        size_vram=held if info.device.startswith("cuda") else 0,
        context_length=info.max_model_len,
    )


async def show(http: web.Request, body: schemas.ShowRequest) -> web.Response:
    """Details of a model, which need not be loaded."""
    name = body.model or body.name
    if name is None:
        raise InvalidRequest("model", " is required")
    entry = http.app[MODELS].find(name)
    await entry.peek()
    return json_response(_shown(entry))


def _shown(entry: Model) -> schemas.Shown:
    text, target = entry.service.text, entry.target
    defaults = {} if text is None else msgspec.structs.asdict(text.defaults)
    return schemas.Shown(
        modelfile=f"FROM {target}\n",
        parameters="\n".join(f"{name} {value}" for name, value in defaults.items() if value is not None),
        template="" if text is None else text.tokenizer.template,
        details=ollama.details(entry.info),
        model_info=ollama.model_info(entry.name, target, entry.info, entry.service.longest),
        capabilities=["completion"] if text is None else _capabilities(text),
        modified_at=moment(entry.service.server.created),
    )


def _capabilities(text: Text) -> list[str]:
    tools = text.chat_format.calls is not None and text.chat_format.lists_tools
    known = {"completion": True, "tools": tools, "thinking": text.chat_format.thinks is not None}
    return [name for name, there in known.items() if there]


async def pull(http: web.Request, body: schemas.PullRequest) -> web.StreamResponse:
    """Download a model as ``foresay pull`` does; it is served after the next start of the server."""
    name = (body.model or body.name or "").removesuffix(":latest")
    lines = EventStream.of(http, LINES)
    if not any(entry.service.names.has(name) for entry in http.app[MODELS]):
        if of_short_name(name) is None and not _HUB_ID.fullmatch(name):  # do not reveal local paths
            raise ModelNotFound(f"The model {name[:100]!r} was not found: it is neither of the catalog nor OWNER/NAME")
        if not CONTEXT.get().caller.alone:
            raise Forbidden("With several API keys models are fetched on the server only: foresay pull")
        async with fetching(name) as fetched:
            silent = body.stream is False
            while not (await asyncio.wait([fetched], timeout=None if silent else PULL_SECONDS))[0]:
                await lines.send([schemas.PullStatus(f"pulling {name}")])
        try:
            fetched.result()
        except ModelNotFound as error:
            if not lines.started:
                raise
            await lines.send([schemas.OllamaError(str(error))])
            return await lines.end()
    if body.stream is False:
        return json_response(schemas.PullStatus("success"))
    await lines.send([schemas.PullStatus("success")])
    return await lines.end()


async def version(http: web.Request) -> web.Response:
    """The implemented version of Ollama's API, and the version of Foresay."""
    return json_response(schemas.OllamaVersion(version=OLLAMA_VERSION, foresay=foresay.__version__))


ERRORS = ErrorShape(prefix="/api/", body=schemas.OllamaError, make=ollama.error_shape)
_CHAT, _GENERATE, _PULL = (
    Stream(LINES, (line, schemas.OllamaError))
    for line in (schemas.OllamaChatLine, schemas.OllamaGenerateLine, schemas.PullStatus)
)
ROUTES = [
    Route("POST", "/api/chat", chat, schemas.OllamaChatRequest, schemas.OllamaChatLine, _CHAT),
    Route("POST", "/api/generate", generate, schemas.OllamaGenerateRequest, schemas.OllamaGenerateLine, _GENERATE),
    Route("POST", "/api/pull", pull, schemas.PullRequest, schemas.PullStatus, _PULL),
    Route("GET", "/api/tags", tags, answer=schemas.Tags),
    Route("GET", "/api/ps", running, answer=schemas.Running),
    Route("POST", "/api/show", show, schemas.ShowRequest, schemas.Shown),
    Route("GET", "/api/version", version, answer=schemas.OllamaVersion),
]
