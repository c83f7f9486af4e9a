"""Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``: its messages as a chat request, and the
answer as its content blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from foresay.server.api.anthropic import schemas
from foresay.server.api.common.answer import Answer, Item, Items, parsed_arguments
from foresay.server.api.common.route import NAMED_EVENTS, ErrorShape, Route, Stream, json_response
from foresay.server.api.common.turns import answered, chat_choices, chat_prompt, leasing
from foresay.server.api.common.validation import FieldNames, converted, naming, thinking
from foresay.server.catalog.formats import EFFORTS
from foresay.server.gateway.keys import CONTEXT
from foresay.server.models.models import MODELS
from foresay.server.models.service import AnswerOrigin, Service
from foresay.server.schemas.bounds import MOST_TOOLS, check_count
from foresay.server.schemas.chat import ChatRequest
from foresay.server.schemas.shared import ErrorBody, GenerationRequest
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import InvalidRequest, Path

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
        return [schemas.MessageEvent(type="message_start", message=self._message([]))]

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """Events of the blocks begun, continued and completed by a piece; after the last one, why it ended."""
        events = self._blocks.take(piece.parts)
        if piece.finish_reason is not None:
            end = schemas.MessageEvent(type="message_delta", usage=self._counts(), metrics=self._metrics())
            end.delta = schemas.EventDelta(stop_reason=self._stop_reason(), stop_sequence=self._stop_sequence())
            end.warnings = [one.for_client for one in self._replaced()] or UNSET
            events += [*self._blocks.close(), end]
        return events

    def closing(self) -> list[msgspec.Struct]:
        return [schemas.MessageEvent(type="message_stop")]

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
        return [schemas.MessageEvent(type="content_block_start", index=item.index, content_block=_block(item))]

    def grows(self, item: Item, more: str) -> list[msgspec.Struct]:
        """More of its text."""
        kind, field = DELTAS[type(item.first)]
        delta = schemas.EventDelta(type=kind)
        setattr(delta, field, more)
        return [schemas.MessageEvent(type="content_block_delta", index=item.index, delta=delta)] if more else []

    def closes(self, item: Item) -> list[msgspec.Struct]:
        """The end of the block."""
        self.whole.append(_block(item))
        return [schemas.MessageEvent(type="content_block_stop", index=item.index)]


#: The type of a part's deltas, and the field with the text.
DELTAS: dict[type[Part], tuple[str, str]] = {
    TextPart: ("text_delta", "text"),
    ReasoningPart: ("thinking_delta", "thinking"),
    ToolCallPart: ("input_json_delta", "partial_json"),
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


# -- the request ------------------------------------------------------------------------------------------------------


Json = dict[str, Any]


#: Fields with the same meaning in the chat request.
_SAME = ("max_tokens", "stream", "temperature", "top_p", "top_k")
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "tool_choice.function.name": "tool_choice.name",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}


class Conversation:
    """Converts a conversation to a chat request. names: the client's names of renamed fields. warnings: what the chat
    request cannot express.
    """

    def __init__(self, body: schemas.CountTokensRequest, chat_format: ChatFormat) -> None:
        self.names = FieldNames(_NAMES)
        self._body = body
        self._chat_format = chat_format
        self._messages: list[Json] = []
        self._found: set[str] = set()  # deferred tools referenced in the conversation
        self.warnings: tuple[Warned, ...] = ()

    def chat_fields(self) -> Json:
        """The fields of the chat request; errors already name the client's fields."""
        body = self._body
        if not body.messages:
            raise InvalidRequest("messages", " must not be empty")
        if body.system:
            self._add_text("system", _text(body.system), ("system",), ("system",))
        for index, turn in enumerate(body.messages):
            self._turn(turn, ("messages", index))
        for message in self._messages:
            if isinstance(message.get("content"), list):
                message["content"] = "\n".join(message["content"])
        continues = body.messages[-1].role == "assistant"
        request = {"messages": self._messages, **self._tools()}
        if continues:
            request |= {"continue_final_message": True, "add_generation_prompt": False}
        request |= self._thinking()
        if body.output_config is not None and body.output_config.format is not None:
            shape = {"name": "output", "schema": body.output_config.format.schema, "strict": True}
            request["response_format"] = {"type": "json_schema", "json_schema": shape}
        return request | self._effort()

    def _turn(self, turn: schemas.Turn, path: Path) -> None:
        """Tool results become messages of their own; texts become the user's, or the system's."""
        blocks: list[schemas.Block] = (
            list(turn.content) if isinstance(turn.content, list) else [schemas.TextBlock(text=turn.content)]
        )
        if not blocks:
            raise InvalidRequest((*path, "content"), " must not be empty")
        if turn.role == "assistant":
            return self._assistant(blocks, path)
        texts = False
        for index, block in enumerate(blocks):
            at = (*path, "content", index)
            match block:
                case schemas.TextBlock(text=text):
                    texts = True
                    self._add_text(turn.role, text, path)
                case _ if turn.role == "system":
                    raise InvalidRequest(at, ": a system message holds only text")
                case schemas.ToolResultBlock() if texts:
                    raise InvalidRequest(at, ": tool_result blocks come before the text of their message")
                case schemas.ToolResultBlock(tool_use_id=id, content=content):
                    self._found.update(
                        part.tool_name for part in content or () if isinstance(part, schemas.ToolReference)
                    )
                    self._add(at, (*at, "content"), role="tool", tool_call_id=id, content=_text(content or ""))
                case _:
                    raise InvalidRequest(at, ": only the assistant may send this block")

    def _assistant(self, blocks: list[schemas.Block], path: Path) -> None:
        message: Json = {"role": "assistant"}
        texts: list[str] = []
        thoughts: list[str] = []
        for index, block in enumerate(blocks):
            match block:
                case schemas.TextBlock(text=text):
                    texts.append(text)
                case schemas.ThinkingBlock(thinking=thought):
                    thoughts.append(thought)
                case schemas.ToolUseBlock(id=id, name=name, input=given):
                    call = {"name": name, "arguments": msgspec.json.encode(given).decode()}
                    message.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": call})
                case schemas.ToolResultBlock():
                    raise InvalidRequest((*path, "content", index), ": only the user may send this block")
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if texts or "tool_calls" not in message:
            message["content"] = "".join(texts)
        self._add(path, (*path, "content"), **message)

    def _add_text(self, role: str, text: str, path: Path, content_path: Path = ()) -> None:
        """Add text to the last message if it has the same role, so that neighbours are one turn."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == role:
            last["content"].append(text)
        else:
            self._add(path, content_path or (*path, "content"), role=role, content=[text])

    def _add(self, path: Path, content_path: Path, **message: Any) -> None:
        here = ("messages", len(self._messages))
        self.names[here] = path
        self.names[*here, "content"] = content_path
        self.names[*here, "tool_call_id"] = (*path, "tool_use_id")
        self._messages.append(message)

    def _tools(self) -> Json:
        body = self._body
        if body.tools is None:
            return {}
        shown = [(at, tool) for at, tool in enumerate(body.tools) if not tool.defer_loading or tool.name in self._found]
        check_count(shown, MOST_TOOLS, "tools")  # before converting each
        for index, (at, _) in enumerate(shown):
            self.names["tools", index] = self.names["tools", index, "function"] = ("tools", at)
            self.names["tools", index, "function", "parameters"] = ("tools", at, "input_schema")
        return {"tools": [_tool(tool, at) for at, tool in shown]} | _choice(body.tool_choice)

    def _thinking(self) -> Json:
        """Whether the model is to reason; ignored, with a warning, for one that cannot, or always does."""
        wanted, able = self._body.thinking, self._chat_format
        if wanted is None:
            return {}
        always = able.thinks is not None and "enable_thinking" not in able.words
        if always if wanted.type == "disabled" else able.thinks is None:
            if wanted.type != "adaptive":
                self.warnings += (warning("hint_left_out", "thinking", value=wanted.type),)
            return {}
        return thinking(able, wanted.type != "disabled", "thinking")

    def _effort(self) -> Json:
        """How much the model is to reason and write."""
        effort = None if self._body.output_config is None else self._body.output_config.effort
        if effort is None:
            return {}
        if effort in EFFORTS and "reasoning_effort" in self._chat_format.words:
            return {"reasoning_effort": effort}
        self.warnings += (warning("hint_left_out", "output_config.effort", value=effort),)
        return {}


def _tool(tool: schemas.ToolDefinition, index: int) -> Json:
    if tool.type not in (None, "custom"):
        return {"type": tool.type}
    if tool.name is None:
        raise InvalidRequest(("tools", index, "name"), " is required")
    function: Json = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: schemas.ChoiceOfTool | None) -> Json:
    if choice is None:
        return {}
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("tool_choice.name", " is required with type tool")
    wanted: Json = {"tool_choice": {"any": "required"}.get(choice.type, choice.type)}
    if choice.type == "tool":
        wanted["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use is not None:
        wanted["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return wanted


def _text(content: str | Sequence[schemas.TextBlock | schemas.ToolReference]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, schemas.TextBlock) else part.tool_name for part in content)


# -- routes -----------------------------------------------------------------------------------------------------------


@leasing(FRAMING)
async def messages(http: web.Request, service: Service, body: schemas.MessagesRequest) -> web.StreamResponse:
    """Answer a conversation."""
    text, _ = service.opened()
    conversation = Conversation(body, text.chat_format)
    fields = conversation.chat_fields() | {name: getattr(body, name) for name in _SAME} | {"stop": body.stop_sequences}
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
_STREAM = Stream(FRAMING, (schemas.MessageEvent, schemas.MessagesError))
ROUTES = [
    Route("POST", "/v1/messages", messages, schemas.MessagesRequest, schemas.AssistantTurn, _STREAM),
    Route("POST", "/v1/messages/count_tokens", count_tokens, schemas.CountTokensRequest, schemas.TokenCount),
]
