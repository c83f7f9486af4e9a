"""Ollama's API: ``/api/chat``, ``/api/generate``, and what it says about its models."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

import foresay
from server import validation
from server.answers.base import AnswerOptions, Origin
from server.answers.ollama import OllamaAnswer, OllamaChat, OllamaGenerate, error_shape, moment
from server.answers.ollama_models import described, details, model_info
from server.choice import Choice
from server.doors.body import json_response
from server.doors.route import ErrorShape, Route, Stream
from server.foreign import ollama
from server.foreign.words import in_words, reword
from server.gateway.caller import REQUEST_ID
from server.room import Room
from server.service import Service, Text
from server.sse import LINES
from server.turns import SERVICE, answered, chat_choices, completion_choices
from server.wire.completions import CompletionRequest
from server.wire.ollama import (
    OllamaAnswerMessage,
    OllamaChatLine,
    OllamaChatRequest,
    OllamaError,
    OllamaGenerateLine,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaVersion,
    Running,
    RunningModel,
    Shown,
    ShowRequest,
    Tags,
)
from server.wire.shared import GenerationRequest
from spec.errors import InvalidRequest

#: Whose API this is, as far as it goes: log-probabilities came with it. Clients that ask want 0.6.4 at least.
OLLAMA_VERSION = "0.12.11"
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
    service.check_model(body.model)
    if not body.messages:
        done = OllamaChatLine(model=body.model, created_at=moment(), done=True, message=OllamaAnswerMessage())
        done.done_reason = "load"
        return json_response(done)
    ollama.refuse_unsupported(body)
    with in_words(ollama.NAMES):
        request = ollama.chat_of(body, text.dialect)
        choices = reword(await chat_choices(service, request), ollama.NAMES)
        return await _answered(http, OllamaChat, body, request, choices)


async def generate(http: web.Request) -> web.StreamResponse:
    """Answer a prompt, or write on from it."""
    service = http.app[SERVICE]
    text, _ = service.opened()
    body = validation.decoded(await http.read(), _prompts)
    service.check_model(body.model)
    if not body.prompt:
        done = OllamaGenerateLine(model=body.model, created_at=moment(), done=True, done_reason="load", response="")
        return json_response(done)
    ollama.refuse_unsupported(body)
    with in_words(names := ollama.NAMES | {"messages": "prompt"}):
        request: GenerationRequest
        if not body.raw and text.tokenizer.has_template:
            request = chat = ollama.chat_of_prompt(body, text.dialect)
            choices = await chat_choices(service, chat)
        else:
            request = raw = await _raw(service, body, body.prompt)
            choices = await completion_choices(service, raw)
        return await _answered(http, OllamaGenerate, body, request, reword(choices, names))


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
    kind: type[OllamaAnswer],
    body: OllamaRequest,
    request: GenerationRequest,
    choices: Sequence[Choice],
) -> web.StreamResponse:
    service = http.app[SERVICE]
    _, info = service.opened()
    origin: Origin = msgspec.structs.replace(service.origin(REQUEST_ID.get(), info, body.model), model=body.model)
    return await answered(
        http, service, kind(origin, choices, AnswerOptions.of(request, service.options.metrics_level))
    )


async def tags(http: web.Request) -> web.Response:
    """The model served here, as a list: once for each of its names."""
    service = http.app[SERVICE]
    _, info = service.opened()
    return json_response(Tags([described(name, service.created, info) for name in service.options.names.known]))


async def running(http: web.Request) -> web.Response:
    """The model served here, which is always loaded."""
    service = http.app[SERVICE]
    _, info = service.opened()
    known = msgspec.structs.asdict(described(service.options.model, service.created, info)) | {"size": info.held_bytes}
    on_gpu = info.held_bytes if info.device.startswith("cuda") else 0
    model = RunningModel(**known, expires_at=NEVER, size_vram=on_gpu, context_length=info.max_model_len)
    return json_response(Running([model]))


async def show(http: web.Request) -> web.Response:
    """More about the model."""
    service = http.app[SERVICE]
    text, info = service.opened()
    body = validation.decoded(await http.read(), _shows)
    name = body.model or body.name
    if name is None:
        raise InvalidRequest("model", "model is required")
    service.check_model(name)
    known = {name: value for name, value in msgspec.structs.asdict(text.defaults).items() if value is not None}
    shown = Shown(
        modelfile=f"FROM {info.target}\n",
        parameters="\n".join(f"{name} {value}" for name, value in known.items()),
        template=text.tokenizer.template,
        details=details(info),
        model_info=model_info(service.options.model, info),
        capabilities=_capabilities(text),
        modified_at=moment(service.created),
    )
    return json_response(shown)


def _capabilities(text: Text) -> list[str]:
    tools = text.dialect.calls is not None and "tools" in text.dialect.words
    known = {"completion": True, "tools": tools, "thinking": text.dialect.thinks is not None}
    return [name for name, there in known.items() if there]


async def version(http: web.Request) -> web.Response:
    """The version of Ollama whose API this is; that of Foresay beside it."""
    return json_response(OllamaVersion(version=OLLAMA_VERSION, foresay=foresay.__version__))


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
    Route("GET", "/api/version", version, answer=OllamaVersion),
]
