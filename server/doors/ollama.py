"""Ollama's API: ``/api/chat``, ``/api/generate``, and what it says about its models."""

from __future__ import annotations

import hashlib

import msgspec
from aiohttp import web

import foresay
from server import validation
from server.answers.base import AnswerOptions, Origin
from server.answers.ollama import OllamaAnswer, OllamaChat, OllamaGenerate, error_shape, moment
from server.choice import Choice
from server.doors.body import json_response
from server.doors.route import ErrorShape, Route, Stream
from server.errors import ModelNotFound
from server.foreign import ollama
from server.foreign.words import in_words
from server.gateway.caller import REQUEST_ID
from server.room import Room
from server.service import Service, Text
from server.sse import LINES
from server.turns import SERVICE, answered, chat_choices, completion_choices
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

LATEST = ":latest"
#: Ollama unloads idle models; this one stays.
NEVER = "9999-12-31T23:59:59Z"
_chats = msgspec.json.Decoder(OllamaChatRequest)
_prompts = msgspec.json.Decoder(OllamaGenerateRequest)
_shows = msgspec.json.Decoder(ShowRequest)


async def chat(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = http.app[SERVICE]
    text, _ = service.opened()
    body = validation.decoded(await http.read(), _chats)
    check_model(service, body.model)
    if not body.messages:
        done = OllamaChatLine(model=body.model, created_at=moment(), done=True, message=OllamaAnswerMessage())
        done.done_reason = "load"
        return json_response(done)
    ollama.refuse_unsupported(body)
    with in_words(ollama.NAMES):
        request = ollama.chat_of(body, text.dialect)
        return await _answered(http, OllamaChat, body, request, await chat_choices(service, request))


async def generate(http: web.Request) -> web.StreamResponse:
    """Answer a prompt, or write on from it."""
    service = http.app[SERVICE]
    text, _ = service.opened()
    body = validation.decoded(await http.read(), _prompts)
    check_model(service, body.model)
    if not body.prompt:
        done = OllamaGenerateLine(model=body.model, created_at=moment(), done=True, done_reason="load", response="")
        return json_response(done)
    ollama.refuse_unsupported(body)
    with in_words(ollama.NAMES | {"messages": "prompt"}):
        if not body.raw and text.tokenizer.has_template:
            request = ollama.chat_of_prompt(body, text.dialect)
            return await _answered(http, OllamaGenerate, body, request, await chat_choices(service, request))
        raw = await _raw(service, body, body.prompt)
        return await _answered(http, OllamaGenerate, body, raw, await completion_choices(service, raw))


async def _raw(service: Service, body: OllamaGenerateRequest, prompt: str) -> CompletionRequest:
    """The completion request of a prompt as it is; unless told, it is written on for as long as there is room."""
    _, info = service.opened()
    tokens = await service.encode(prompt, add_special_tokens=True, room=Room("prompt", info.max_model_len))
    fields = ollama.fields_of_raw(body)
    if fields["max_tokens"] is None:
        fields["max_tokens"] = max(1, info.max_model_len - len(tokens))
    return validation.completion_of({"prompt": tokens, **fields})


async def _answered(
    http: web.Request, kind: type[OllamaAnswer], body: OllamaRequest, request: GenerationRequest, choices: list[Choice]
) -> web.StreamResponse:
    service = http.app[SERVICE]
    _, info = service.opened()
    origin: Origin = msgspec.structs.replace(service.origin(REQUEST_ID.get(), info), model=body.model)
    return await answered(
        http, service, kind(origin, choices, AnswerOptions.of(request, service.options.metrics_level))
    )


def check_model(service: Service, name: str) -> None:
    """Raise unless the request means the model served here, with its tag or without."""
    if name.removesuffix(LATEST) != service.options.model.removesuffix(LATEST):
        raise ModelNotFound(f"model {name!r} not found; this server has {service.options.model!r}")


async def tags(http: web.Request) -> web.Response:
    """The model served here, as a list."""
    service = http.app[SERVICE]
    _, info = service.opened()
    return json_response(Tags([_described(service, info)]))


async def running(http: web.Request) -> web.Response:
    """The model served here, which is always loaded."""
    service = http.app[SERVICE]
    _, info = service.opened()
    known = msgspec.structs.asdict(_described(service, info))
    model = RunningModel(**known, expires_at=NEVER, context_length=info.max_model_len)
    return json_response(Running([model]))


def _described(service: Service, info: EngineInfo) -> OllamaModel:
    name = service.options.model.removesuffix(LATEST) + LATEST
    return OllamaModel(
        name=name,
        model=name,
        modified_at=moment(service.created),
        digest=hashlib.sha256(msgspec.json.encode(info)).hexdigest(),
        details=ModelDetails(quantization_level=info.dtype),
    )


async def show(http: web.Request) -> web.Response:
    """More about the model."""
    service = http.app[SERVICE]
    text, info = service.opened()
    body = validation.decoded(await http.read(), _shows)
    name = body.model or body.name
    if name is None:
        raise InvalidRequest("model", "model is required")
    check_model(service, name)
    known = {name: value for name, value in msgspec.structs.asdict(text.defaults).items() if value is not None}
    shown = Shown(
        modelfile=f"FROM {info.target}\n",
        parameters="\n".join(f"{name} {value}" for name, value in known.items()),
        template=text.tokenizer.template,
        details=ModelDetails(quantization_level=info.dtype),
        model_info={
            "general.architecture": "foresay",
            "general.basename": info.target,
            "foresay.context_length": info.max_model_len,
            "foresay.vocab_size": info.vocab_size,
            "foresay.drafter": info.drafter,
        },
        capabilities=_capabilities(text),
        modified_at=moment(service.created),
    )
    return json_response(shown)


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
