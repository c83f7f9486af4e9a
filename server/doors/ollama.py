"""Ollama's API: ``/api/chat``, ``/api/generate``, and what it says about its models."""

from __future__ import annotations

import hashlib
import time

import msgspec
from aiohttp import web

import foresay
from server import validation
from server.answers.base import AnswerOptions, Origin
from server.answers.ollama import OllamaAnswer, OllamaChat, OllamaGenerate, error_shape, moment
from server.choice import Choice
from server.config import LATEST
from server.doors.body import json_response
from server.doors.leased import Answering, leased
from server.doors.route import ErrorShape, Route, Stream
from server.errors import ModelNotFound
from server.foreign import ollama
from server.foreign.words import in_words
from server.gateway.caller import REQUEST_ID
from server.models.models import MODELS, Entry, Models, tagged
from server.room import Room
from server.service import Service, Text
from server.sse import LINES
from server.turns import answered, chat_choices, completion_choices
from server.wire.about import Version
from server.wire.completions import CompletionRequest
from server.wire.ollama import (
    ModelDetails,
    OllamaAnswerMessage,
    OllamaChatLine,
    OllamaChatRequest,
    OllamaError,
    OllamaGenerateLine,
    OllamaGenerateRequest,
    OllamaModel,
    OllamaProgress,
    OllamaRequest,
    Running,
    RunningModel,
    Shown,
    ShowRequest,
    Tags,
)
from server.wire.shared import GenerationRequest
from spec.errors import InvalidRequest
from spec.request import EngineInfo

#: When a model leaves that stays for ever.
NEVER = "9999-12-31T23:59:59Z"
_chats = msgspec.json.Decoder(OllamaChatRequest)
_prompts = msgspec.json.Decoder(OllamaGenerateRequest)
_shows = msgspec.json.Decoder(ShowRequest)


async def chat(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    http.app[MODELS].check_open()
    body = validation.decoded(await http.read(), _chats)
    if not body.messages:
        done = OllamaChatLine(model=body.model, created_at=moment(), done=True, message=OllamaAnswerMessage())
        return await _nothing_said(http, body, done)
    return await _leased(http, body, lambda service: _chat(http, service, body))


async def _chat(http: web.Request, service: Service, body: OllamaChatRequest) -> web.StreamResponse:
    text, _ = service.opened()
    ollama.refuse_unsupported(body)
    with in_words(ollama.NAMES):
        request = ollama.chat_of(body, text.dialect)
        return await _answered(http, service, OllamaChat, body, request, await chat_choices(service, request))


async def generate(http: web.Request) -> web.StreamResponse:
    """Answer a prompt, or write on from it."""
    http.app[MODELS].check_open()
    body = validation.decoded(await http.read(), _prompts)
    if not body.prompt:
        done = OllamaGenerateLine(model=body.model, created_at=moment(), done=True, response="")
        return await _nothing_said(http, body, done)
    return await _leased(http, body, lambda service: _generate(http, service, body, body.prompt or ""))


async def _generate(
    http: web.Request, service: Service, body: OllamaGenerateRequest, prompt: str
) -> web.StreamResponse:
    text, _ = service.opened()
    ollama.refuse_unsupported(body)
    with in_words(ollama.NAMES | {"messages": "prompt"}):
        if not body.raw and text.tokenizer.has_template:
            request = ollama.chat_of_prompt(body, text.dialect)
            return await _answered(http, service, OllamaGenerate, body, request, await chat_choices(service, request))
        raw = await _raw(service, body, prompt)
        return await _answered(http, service, OllamaGenerate, body, raw, await completion_choices(service, raw))


async def _nothing_said(http: web.Request, body: OllamaRequest, done: OllamaProgress) -> web.StreamResponse:
    """An empty prompt loads the model, or unloads it."""
    models, keep = http.app[MODELS], ollama.keep_alive(body)
    if keep == 0.0:
        models.forget(_found(models, body.model))
        done.done_reason = "unload"
        return json_response(done)

    async def loaded(service: Service) -> web.StreamResponse:
        done.done_reason = "load"
        return json_response(done)

    return await leased(http, _found(models, body.model).name, loaded, keep=keep)


async def _leased(http: web.Request, body: OllamaRequest, answer: Answering) -> web.StreamResponse:
    """The answer of the model that the request names."""
    keep, name = ollama.keep_alive(body), _found(http.app[MODELS], body.model).name
    return await leased(http, name, answer, None if body.stream is False else LINES, keep=keep)


async def _raw(service: Service, body: OllamaGenerateRequest, prompt: str) -> CompletionRequest:
    """The completion request of a prompt as it is; unless told, it is written on for as long as there is room."""
    _, info = service.opened()
    tokens = await service.encode(prompt, add_special_tokens=True, room=Room("prompt", info.max_model_len))
    fields = ollama.fields_of_raw(body)
    if fields["max_tokens"] is None:
        fields["max_tokens"] = max(1, info.max_model_len - len(tokens))
    return validation.completion_of({"prompt": tokens, **fields})


async def _answered(
    http: web.Request,
    service: Service,
    kind: type[OllamaAnswer],
    body: OllamaRequest,
    request: GenerationRequest,
    choices: list[Choice],
) -> web.StreamResponse:
    _, info = service.opened()
    origin: Origin = msgspec.structs.replace(service.origin(REQUEST_ID.get(), info), model=body.model)
    return await answered(
        http, service, kind(origin, choices, AnswerOptions.of(request, service.options.metrics_level))
    )


def _found(models: Models, name: str) -> Entry:
    """The model that is called so, with its tag or without."""
    try:
        return models.find(name, LATEST)
    except ModelNotFound as error:
        raise ModelNotFound(
            error.message.replace(f"The model {name!r} does not exist", f"model {name!r} not found")
        ) from None


async def tags(http: web.Request) -> web.Response:
    """The models served here, loaded or not."""
    models = http.app[MODELS]
    models.check_open()
    return json_response(Tags([_described(entry) for entry in models]))


async def running(http: web.Request) -> web.Response:
    """The models that are loaded, and when each leaves if nobody asks for it."""
    models = http.app[MODELS]
    models.check_open()
    return json_response(Running([_running(entry, info) for entry in models if (info := entry.running) is not None]))


def _running(entry: Entry, info: EngineInfo) -> RunningModel:
    known, stays = msgspec.structs.asdict(_described(entry)), entry.resident.stays(time.monotonic())
    held = 0 if info.footprint is None else info.footprint.held
    return RunningModel(
        **known | {"size": held},
        expires_at=NEVER if stays is None else moment(time.time() + stays),
        size_vram=held if info.device.startswith("cuda") else 0,
        context_length=info.max_model_len,
    )


def _described(entry: Entry) -> OllamaModel:
    name, info = tagged(entry.name), entry.service.engine.info
    return OllamaModel(
        name=name,
        model=name,
        modified_at=moment(entry.service.created),
        digest=hashlib.sha256(msgspec.json.encode(entry.name if info is None else info)).hexdigest(),
        details=ModelDetails(quantization_level="" if info is None else info.dtype),
    )


async def show(http: web.Request) -> web.Response:
    """More about a model, which need not be loaded for that."""
    models = http.app[MODELS]
    models.check_open()
    body = validation.decoded(await http.read(), _shows)
    name = body.model or body.name
    if name is None:
        raise InvalidRequest("model", "model is required")
    entry = _found(models, name)
    await entry.model.peek()
    return json_response(_shown(entry))


def _shown(entry: Entry) -> Shown:
    text, info, config = entry.service.text, entry.service.engine.info, entry.service.options.config
    defaults = {} if text is None else msgspec.structs.asdict(text.defaults)
    target = info.target if info is not None else entry.name if config is None else config.target
    known: dict[str, object] = {"general.architecture": "foresay", "general.basename": target}
    if (longest := entry.model.longest) is not None:
        known["foresay.context_length"] = longest
    if info is not None:
        known |= {"foresay.vocab_size": info.vocab_size, "foresay.drafter": info.drafter}
    return Shown(
        modelfile=f"FROM {target}\n",
        parameters="\n".join(f"{name} {value}" for name, value in defaults.items() if value is not None),
        template="" if text is None else text.tokenizer.template,
        details=ModelDetails(quantization_level="" if info is None else info.dtype),
        model_info=known,
        capabilities=["completion"] if text is None else _capabilities(text),
        modified_at=moment(entry.service.created),
    )


def _capabilities(text: Text) -> list[str]:
    tools = text.dialect.calls is not None and "tools" in text.dialect.words
    known = {"completion": True, "tools": tools, "thinking": text.dialect.thinks is not None}
    return [name for name, there in known.items() if there]


async def version(http: web.Request) -> web.Response:
    """The version of Foresay."""
    return json_response(Version(version=foresay.__version__))


ERRORS = ErrorShape(prefix="/api/", body=OllamaError, make=error_shape)
ROUTES = [
    Route("POST", "/api/chat", chat, OllamaChatRequest, OllamaChatLine, Stream(LINES, (OllamaChatLine, OllamaError))),
    Route(
        "POST",
        "/api/generate",
        generate,
        OllamaGenerateRequest,
        OllamaGenerateLine,
        Stream(LINES, (OllamaGenerateLine, OllamaError)),
    ),
    Route("GET", "/api/tags", tags, answer=Tags, errors=(401, 503)),
    Route("GET", "/api/ps", running, answer=Running, errors=(401, 503)),
    Route("POST", "/api/show", show, ShowRequest, Shown),
    Route("GET", "/api/version", version, answer=Version),
]
