"""The schemas of ``/v1/responses``: the request, the items of a conversation, and the response object.

Input items are one struct with optional fields, distinguished by ``type``, because clients leave ``type`` out of
messages. Output items have a struct for each kind.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.schemas.bounds import Name
from foresay.server.schemas.chat import ChatTokenLogprob, Provenance
from foresay.server.schemas.shared import GenerationRequest, Metrics, RequestWarning, ResponseFormat, not_done
from foresay.spec.sampling import Positive

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
#: The value of ``include`` for log-probabilities.
LOGPROBS = "message.output_text.logprobs"
HERE = "/v1/responses"

# -- requests ------------------------------------------------------------------------------------------------------


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item's content. type: ``input_text``, ``output_text``, ``refusal``, ``reasoning_text`` or
    ``summary_text``."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One item of a conversation. type: ``message`` (also if left out), ``function_call``, ``function_call_output``,
    ``custom_tool_call``, ``custom_tool_call_output``, ``reasoning``, ``additional_tools``, ``compaction``, or
    ``item_reference`` for an output item of a stored response."""

    id: str | None = None
    type: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    tools: list[FunctionTool] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A tool: a ``function``, whose arguments follow the JSON schema ``parameters``; a ``custom`` tool, which takes a
    text of some ``format``; or a ``namespace`` of such ``tools``. Other types are left out, with a warning."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | UnsetType | None = UNSET
    tools: list[FunctionTool] | UnsetType | None = UNSET


class NamedChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``tool_choice`` as an object: a ``function`` or ``custom`` tool by name, or ``allowed_tools`` with a mode."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[NamedChoice] | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The format of the text. type: ``text``, ``json_object``, or ``json_schema`` with the other fields."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | UnsetType | None = UNSET


class TextOptions(msgspec.Struct, kw_only=True):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """How much the model reasons. summary: only ``auto``, which adds none: reasoning is shown in full."""

    effort: str | None = None
    summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """Accepted but ignored: events are never padded."""

    include_obfuscation: bool | None = None


class ResponseRequest(GenerationRequest, kw_only=True):
    """``POST /v1/responses``: OpenAI's fields, and the sampling fields of chat completions."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Positive | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]  # OpenAI's own two meanings

    # Not supported here, so declared without ranges.
    n: Annotated[int | None, not_done(1, by=HERE)] = None
    max_tokens: Annotated[int | None, not_done(by=HERE, instead="use max_output_tokens")] = None
    response_format: Annotated[ResponseFormat | None, not_done(by=HERE, instead="use text.format")] = None
    prompt_logprobs: Annotated[int | None, not_done(by=HERE)] = None
    return_token_ids: Annotated[bool | None, not_done(False, by=HERE)] = None
    request_id: Annotated[str | None, not_done(by=HERE)] = None
    background: Annotated[Any, not_done(False, by=HERE)] = None
    conversation: Annotated[Any, not_done(by=HERE)] = None
    prompt: Annotated[Any, not_done(by=HERE)] = None
    max_tool_calls: Annotated[Any, not_done(by=HERE)] = None
    context_management: Annotated[Any, not_done([], by=HERE)] = None
    moderation: Annotated[Any, not_done(by=HERE)] = None
    logprobs: Annotated[Any, not_done(False, by=HERE, instead=f"use include: [{LOGPROBS!r}]")] = None


class CompactRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/responses/compact``: the conversation, as in ``POST /v1/responses``. model: null for a server's only
    one. prompt_cache_key: accepted but not needed."""

    model: str | None
    input: str | list[InputItem] | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    prompt_cache_key: Name | None = None


# -- what the model writes -----------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function call to be made by the client. arguments: JSON text, as generated by the model."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool, to be made by the client. input: the text for the tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText] = []


OutputItem = OutputMessage | FunctionCall | CustomToolCall | ReasoningItem

# -- the response --------------------------------------------------------------------------------------------------


class InputTokensDetails(msgspec.Struct):
    """cached_tokens: input tokens whose KV was cached."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """reasoning_tokens: output tokens of reasoning. The others as in
    :class:`~foresay.server.schemas.shared.CompletionTokensDetails`."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class ResponseUsage(msgspec.Struct):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, kw_only=True):
    """A response, running or finished. seed: reproduces the text. metrics: how it was generated. provenance: complete,
    if requested. These three only when it is finished."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning
    service_tier: str = "default"
    store: bool = True
    temperature: float
    text: TextOptions
    tool_choice: str | NamedChoice = "auto"
    tools: list[FunctionTool] = []
    top_logprobs: int = 0
    top_p: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] = {}
    seed: int | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    provenance: Provenance | UnsetType = UNSET
    warnings: list[RequestWarning] | UnsetType = UNSET


class Compaction(msgspec.Struct, kw_only=True):
    """``POST /v1/responses/compact``: the items to continue with: the user's messages, and a ``compaction`` of all.
    usage: input_tokens is the length of the given ones."""

    id: str
    object: str = "response.compaction"
    created_at: int
    output: list[InputItem]
    usage: ResponseUsage
    warnings: list[RequestWarning] | UnsetType = UNSET


class DeletedResponse(msgspec.Struct):
    """``DELETE /v1/responses/{id}``."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """``GET /v1/responses/{id}/input_items``. first_id, last_id: null if there are none."""

    object: str = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct):
    """``POST /v1/responses/input_tokens``."""

    input_tokens: int
    object: str = "response.input_tokens"
