"""``POST /v1/chat/completions``."""

from __future__ import annotations

from aiohttp import web

from server import validation
from server.answers.base import AnswerOptions
from server.answers.chat import ChatAnswer
from server.doors.leased import leased
from server.doors.route import Route, Stream
from server.gateway.caller import REQUEST_ID
from server.models.models import MODELS
from server.service import Service
from server.sse import EVENTS
from server.turns import answered, chat_choices
from server.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from server.wire.shared import ErrorBody


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    http.app[MODELS].check_open()
    body = validation.decode_chat(await http.read())
    return await leased(http, body.model, lambda service: _chat(http, service, body), EVENTS if body.stream else None)


async def _chat(http: web.Request, service: Service, body: ChatRequest) -> web.StreamResponse:
    _, info = service.opened()
    choices = await chat_choices(service, body)
    options = AnswerOptions.of(body, service.options.metrics_level)
    origin = service.origin(body.request_id or REQUEST_ID.get(), info, body.model)
    answer = ChatAnswer(origin, choices, options, body.include_reasoning is not False)
    return await answered(http, service, answer)


ROUTES = [
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        ChatRequest,
        ChatCompletion,
        Stream(EVENTS, (ChatChunk, ErrorBody)),
    )
]
