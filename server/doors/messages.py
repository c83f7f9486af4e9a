"""Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import msgspec
from aiohttp import web

from server import validation
from server.answers.base import AnswerOptions
from server.answers.messages import FRAMING, MessagesAnswer, error_shape
from server.doors.body import json_response
from server.doors.route import ErrorShape, Route, Stream
from server.foreign.messages import Conversation, drawing
from server.foreign.words import in_words, reword
from server.gateway.caller import REQUEST_ID
from server.turns import SERVICE, answered, chat_choices, chat_prompt
from server.wire.messages import (
    EVENTS,
    AssistantTurn,
    CountTokensRequest,
    MessagesError,
    MessagesRequest,
    TokenCount,
)

_requests = msgspec.json.Decoder(MessagesRequest)
_counts = msgspec.json.Decoder(CountTokensRequest)


async def messages(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = http.app[SERVICE]
    text, info = service.opened()
    body = validation.decoded(await http.read(), _requests)
    service.check_model(body.model)
    conversation = Conversation(body, text.dialect)
    fields = conversation.told() | drawing(body)
    with in_words(conversation.names):
        request = validation.chat_of(fields)
        choices = reword(await chat_choices(service, request), conversation.names)
        options = AnswerOptions.of(request, service.options.metrics_level)
        origin = service.origin(REQUEST_ID.get(), info, body.model)
        origin = msgspec.structs.replace(origin, warnings=(*origin.warnings, *conversation.warnings))
        answer = MessagesAnswer(origin, choices, options)
        return await answered(http, service, answer)


async def count_tokens(http: web.Request) -> web.Response:
    """How many tokens a conversation has, before it is answered."""
    service = http.app[SERVICE]
    text, _ = service.opened()
    body = validation.decoded(await http.read(), _counts)
    service.check_model(body.model)
    conversation = Conversation(body, text.dialect)
    fields = conversation.told()
    with in_words(conversation.names):
        tokens = await chat_prompt(service, validation.chat_of(fields))
    return json_response(TokenCount(len(tokens)))


ERRORS = ErrorShape(prefix="/v1/messages", body=MessagesError, make=error_shape)
ROUTES = [
    Route("POST", "/v1/messages", messages, MessagesRequest, AssistantTurn, Stream(FRAMING, EVENTS)),
    Route("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest, TokenCount),
]
