"""The schemas of Anthropic's ``/v1/messages``.

Blocks appear in requests and responses; streams consist of events. Fields not listed here are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foresay.server.schemas.bounds import Stops, shown
from foresay.server.schemas.shared import Metrics, RequestWarning
from foresay.spec.sampling import Positive, TopK, TopP

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

# -- blocks --------------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning before its answer. signature: always empty."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call. input: its arguments."""

    id: str
    name: str
    input: dict[str, Any]


class ToolReference(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_reference"):
    """A deferred tool that was found: from now on the model sees it."""

    tool_name: str


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock | ToolReference] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock

# -- requests ------------------------------------------------------------------------------------------------------


class Turn(msgspec.Struct, kw_only=True):
    """One turn of the conversation. Consecutive texts of the user, or of the system, form one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool that the model may call. Tools of other types than ``custom`` are left out, with a warning. defer_loading:
    the model does not see it until a ``tool_reference`` names it."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ChoiceOfTool(msgspec.Struct, kw_only=True):
    """``tool_choice``. name: the tool that must be called, for type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model reasons before it answers, if it can. budget_tokens: accepted but ignored; max_tokens is the
    limit."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class OutputSchema(msgspec.Struct, kw_only=True):
    """The JSON schema that the answer's text must follow."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """The form of the answer. effort: how much the model reasons and writes, if its chat template supports that."""

    format: OutputSchema | None = None
    effort: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/messages/count_tokens``: the parts of the prompt."""

    model: str
    messages: Annotated[list[Turn], shown(minItems=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ChoiceOfTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """``POST /v1/messages``. If the last turn is the assistant's, the answer continues it."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Stops | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None


# -- answers -------------------------------------------------------------------------------------------------------


class TokenCount(msgspec.Struct):
    """``POST /v1/messages/count_tokens``."""

    input_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens so far. The prompt has input_tokens plus cache_read_input_tokens; the KV of the latter was cached."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class AssistantTurn(msgspec.Struct, kw_only=True):
    """A whole answer, or the empty one at the beginning of a stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics | UnsetType = UNSET
    warnings: list[RequestWarning] | UnsetType = UNSET


# -- events --------------------------------------------------------------------------------------------------------


class EventDelta(msgspec.Struct, kw_only=True):
    """More of a block, by type: ``text_delta``, ``thinking_delta`` or ``input_json_delta`` (of a call's arguments); or,
    without a type, why the answer ended."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


EVENT_TYPES = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
    "message_stop",
)


class MessageEvent(msgspec.Struct, kw_only=True):
    """An event, with the fields of its type. message: the empty answer, at the start. index: of the block that an event
    is about. usage: counts the whole answer. warnings: those not known at the start."""

    type: Annotated[str, shown(enum=list(EVENT_TYPES))]
    message: AssistantTurn | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    warnings: list[RequestWarning] | UnsetType = UNSET


class MessagesErrorDetail(msgspec.Struct):
    """An error. param: the field of the request (our addition)."""

    type: str
    message: str
    param: str | None = None


class MessagesError(msgspec.Struct):
    """An error, as a body or as the last event of a failed stream."""

    error: MessagesErrorDetail
    type: Literal["error"] = "error"
