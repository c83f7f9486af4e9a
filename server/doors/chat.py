"""``POST /v1/chat/completions``."""

from __future__ import annotations

from aiohttp import web

from server import validation
from server.answers.base import AnswerOptions
from server.answers.chat import ChatAnswer
from server.doors.route import Route, Stream
from server.gateway.caller import REQUEST_ID
from server.sse import EVENTS
from server.turns import SERVICE, answered, chat_choices
from server.wire.chat import ChatChunk, ChatCompletion, ChatRequest
from server.wire.shared import ErrorBody


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = http.app[SERVICE]
    _, info = service.opened()
    body = validation.decode_chat(await http.read())
    service.check_model(body.model)
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
