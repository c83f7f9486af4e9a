"""``POST /v1/chat/completions``."""

from __future__ import annotations

from aiohttp import web

from server import validation
from server.answers.base import AnswerOptions
from server.answers.chat import ChatAnswer
from server.turns import REQUEST_ID, SERVICE, answered, chat_choices


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = http.app[SERVICE]
    _, info = service.opened()
    body = validation.decode_chat(await http.read())
    service.check_model(body.model)
    choices = await chat_choices(service, body)
    options = AnswerOptions.of(body, service.options.metrics_level)
    answer = ChatAnswer(service.origin(body.request_id or REQUEST_ID.get(), info), choices, options)
    return await answered(http, service, answer)


ROUTES = [web.post("/v1/chat/completions", chat_completions)]
