"""Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import msgspec
from aiohttp import web

from server.api.anthropic.answer import FRAMING, MessagesAnswer, error_shape
from server.api.anthropic.request import Conversation, drawing
from server.api.anthropic.schemas import (
    EVENTS,
    AssistantTurn,
    CountTokensRequest,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from server.api.common import validation
from server.api.common.answer import AnswerOptions
from server.api.common.leased import leased
from server.api.common.route import ErrorShape, Route, Stream, json_response
from server.api.common.turns import answered, chat_choices, chat_prompt
from server.api.common.words import in_words, reword
from server.gateway.caller import REQUEST_ID
from server.host.models.models import MODELS
from server.host.service import Service

_requests = msgspec.json.Decoder(MessagesRequest)
_counts = msgspec.json.Decoder(CountTokensRequest)


async def messages(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    http.app[MODELS].check_open()
    body = validation.decoded(await http.read(), _requests)
    return await leased(
        http, body.model, lambda service: _messages(http, service, body), FRAMING if body.stream else None
    )


async def _messages(http: web.Request, service: Service, body: MessagesRequest) -> web.StreamResponse:
    text, info = service.opened()
    conversation = Conversation(body, text.chat_format)
    fields = conversation.told() | drawing(body)
    with in_words(conversation.names):
        request = validation.chat_of(fields)
        choices = reword(await chat_choices(service, request), conversation.names)
        options = AnswerOptions.of(request, choices[0].request.params, service.options.metrics_level)
        origin = service.origin(REQUEST_ID.get(), info, body.model)
        origin = msgspec.structs.replace(origin, warnings=(*origin.warnings, *conversation.warnings))
        answer = MessagesAnswer(origin, choices, options)
        return await answered(http, service, answer)


async def count_tokens(http: web.Request) -> web.Response:
    """How many tokens a conversation has, before it is answered."""
    models = http.app[MODELS]
    models.check_open()
    body = validation.decoded(await http.read(), _counts)
    async with models.reading(body.model) as service:
        text, _ = service.opened()
        conversation = Conversation(body, text.chat_format)
        fields = conversation.told()
        with in_words(conversation.names):
            tokens = await chat_prompt(service, validation.chat_of(fields))
    return json_response(TokenCount(len(tokens)))


ERRORS = ErrorShape(prefix="/v1/messages", body=MessagesError, make=error_shape)
ROUTES = [
    Route("POST", "/v1/messages", messages, MessagesRequest, AssistantTurn, Stream(FRAMING, EVENTS)),
    Route("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest, TokenCount),
]
