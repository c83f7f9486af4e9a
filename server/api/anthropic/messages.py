"""Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET

from foresay.server.api.anthropic import schemas
from foresay.server.api.anthropic.request import Conversation, drawing
from foresay.server.api.common.answer import Answer, Item, Items, parsed_arguments
from foresay.server.api.common.route import NAMED_EVENTS, ErrorShape, Route, Stream, json_response
from foresay.server.api.common.streaming import leasing
from foresay.server.api.common.turns import answered, chat_choices, chat_prompt
from foresay.server.api.common.validation import converted, naming
from foresay.server.gateway.keys import CONTEXT
from foresay.server.models.models import MODELS
from foresay.server.models.service import AnswerOrigin, Service
from foresay.server.schemas.chat import ChatRequest
from foresay.server.schemas.shared import ErrorBody, GenerationRequest
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart

FRAMING = msgspec.structs.replace(NAMED_EVENTS, ping=b'event: ping\ndata: {"type":"ping"}\n\n')

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_shape(status: int, body: ErrorBody) -> schemas.MessagesError:
    """An error in Anthropic's format, with the field added."""
    return schemas.MessagesError(
        schemas.MessagesErrorDetail(_KINDS.get(status, "api_error"), naming(body.error), body.error.param)
    )


class MessagesAnswer(Answer):
    """A ``message`` and the events of its stream. There is one choice."""

    framing = FRAMING

    def __init__(self, origin: AnswerOrigin, choices: Sequence[Choice], body: GenerationRequest) -> None:
        super().__init__(origin, choices, body)
        self.id = f"msg_{origin.id}"
        self._choice = choices[0]
        self._blocks = Blocks()

    def opening(self, index: int) -> list[msgspec.Struct]:
        return [schemas.MessageStart(self._message([]))]

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """Events of the blocks begun, continued and completed by a piece; after the last one, why it ended."""
        events = self._blocks.take(piece.parts)
        if piece.finish_reason is not None:
            ending = schemas.Ending(stop_reason=self._stop_reason(), stop_sequence=self._stop_sequence())
            events += self._blocks.close()
            late, metrics = [one.for_client for one in self._replaced()] or UNSET, self._metrics()
            events.append(schemas.MessageDelta(delta=ending, usage=self._counts(), metrics=metrics, warnings=late))
        return events

    def closing(self) -> list[msgspec.Struct]:
        return [schemas.MessageStop()]

    def whole(self, pieces: Sequence[Piece]) -> msgspec.Struct:
        self._blocks.take(pieces[0].parts)
        self._blocks.close()
        message = self._message(self._blocks.whole)
        message.stop_reason, message.stop_sequence = self._stop_reason(), self._stop_sequence()
        message.metrics = self._metrics()
        return message

    def broken(self, error: ErrorBody) -> msgspec.Struct:
        """The error as an event."""
        return error_shape(400 if error.error.type == "invalid_request_error" else 500, error)

    def _message(self, content: list[schemas.AnswerBlock]) -> schemas.AssistantTurn:
        return schemas.AssistantTurn(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            usage=self._counts(),
            warnings=self._warnings(),
        )

    def _counts(self) -> schemas.MessageUsage:
        cached = self._choice.cached_tokens
        return schemas.MessageUsage(
            input_tokens=len(self._choice.request.prompt) - cached,
            cache_read_input_tokens=cached,
            output_tokens=self._choice.completion_tokens,
        )

    def _stop_sequence(self) -> str | None:
        return self._choice.stop_reason if isinstance(self._choice.stop_reason, str) else None

    def _stop_reason(self) -> schemas.StopReason:
        if self._choice.finish_reason == "length":
            return "max_tokens"
        if self._choice.finish_reason == "tool_calls":
            return "tool_use"
        return "end_turn" if self._stop_sequence() is None else "stop_sequence"


class Blocks(Items[msgspec.Struct]):
    """The blocks of a message. whole: the complete ones."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: list[schemas.AnswerBlock] = []

    def opens(self, item: Item) -> list[msgspec.Struct]:
        """The empty block."""
        return [schemas.BlockStart(item.index, _block(item))]

    def grows(self, item: Item, more: str) -> list[msgspec.Struct]:
        """More of its text."""
        return [schemas.BlockMore(item.index, DELTAS[type(item.first)](more))] if more else []

    def closes(self, item: Item) -> list[msgspec.Struct]:
        """The end of the block."""
        self.whole.append(_block(item))
        return [schemas.BlockStop(item.index)]


DELTAS: dict[type[Part], Callable[[str], schemas.BlockDelta]] = {
    TextPart: schemas.TextDelta,
    ReasoningPart: schemas.ThinkingDelta,
    ToolCallPart: schemas.InputDelta,
}


def _block(item: Item) -> schemas.AnswerBlock:
    """A block, as far as it is known so far."""
    match item.first:
        case TextPart():
            return schemas.TextBlock(text=item.text)
        case ReasoningPart():
            return schemas.ThinkingBlock(thinking=item.text)
        case ToolCallPart(id=id, name=name):
            return schemas.ToolUseBlock(id=id or "", name=name or "", input=parsed_arguments(item.text))


@leasing(FRAMING)
async def messages(http: web.Request, service: Service, body: schemas.MessagesRequest) -> web.StreamResponse:
    """Answer a conversation."""
    text, _ = service.opened()
    conversation = Conversation(body, text.chat_format)
    fields = conversation.chat_fields() | drawing(body)
    with conversation.names as names:
        request = converted(fields, ChatRequest)
        choices = names.warned(await chat_choices(service, request))
        origin = service.origin(CONTEXT.get().id, body.model)
        origin = msgspec.structs.replace(origin, warnings=(*origin.warnings, *conversation.warnings))
        return await answered(http, service, request, choices, MessagesAnswer, origin)


async def count_tokens(http: web.Request, body: schemas.CountTokensRequest) -> web.Response:
    """How many tokens a conversation has, before it is answered."""
    async with http.app[MODELS].reading(body.model) as service:
        text, _ = service.opened()
        conversation = Conversation(body, text.chat_format)
        fields = conversation.chat_fields()
        with conversation.names:
            tokens = await chat_prompt(service, converted(fields, ChatRequest))
    return json_response(schemas.TokenCount(len(tokens)))


ERRORS = ErrorShape(prefix="/v1/messages", body=schemas.MessagesError, make=error_shape)
_STREAM = Stream(FRAMING, schemas.EVENTS)
ROUTES = [
    Route("POST", "/v1/messages", messages, schemas.MessagesRequest, schemas.AssistantTurn, _STREAM),
    Route("POST", "/v1/messages/count_tokens", count_tokens, schemas.CountTokensRequest, schemas.TokenCount),
]
