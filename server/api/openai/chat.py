"""``POST /v1/chat/completions``."""

from __future__ import annotations

from aiohttp import web

from server.api.common import validation
from server.api.common.answer import AnswerOptions
from server.api.common.leased import leased
from server.api.common.route import Route, Stream
from server.api.common.sse import EVENTS
from server.api.common.turns import answered, chat_choices
from server.api.openai.chat_answer import ChatAnswer
from server.gateway.caller import REQUEST_ID
from server.host.models.models import MODELS
from server.host.service import Service
from server.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from server.schemas.shared import ErrorBody


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    http.app[MODELS].check_open()
    body = validation.decode_chat(await http.read())
    return await leased(http, body.model, lambda service: _chat(http, service, body), EVENTS if body.stream else None)


async def _chat(http: web.Request, service: Service, body: ChatRequest) -> web.StreamResponse:
    _, info = service.opened()
    choices = await chat_choices(service, body)
    options = AnswerOptions.of(body, choices[0].request.params, service.options.metrics_level)
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
