"""The schemas of ``/v1/chat/completions``, including tools: offered functions, tool choice, calls."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.schemas import shared
from foresay.server.schemas.bounds import shown
from foresay.server.schemas.tokens import ChatLogprobs, PromptLogprobs, Provenance
from foresay.spec.sampling import Positive

# -- requests ------------------------------------------------------------------------------------------------------


class Function(msgspec.Struct, kw_only=True):
    """A function the model may call. parameters: a JSON schema of its arguments. strict: they must match it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Something the model may use; those of other types than ``function`` are left out, and named."""

    type: str
    function: Function | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """An offered tool by its name."""

    type: str = "function"
    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """Some of the offered tools. mode: ``auto`` or ``required``."""

    mode: str
    tools: list[NamedTool]


class FunctionChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """``tool_choice``: this function must be called."""

    function: FunctionName


class AllowedChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """``tool_choice``: only some of the offered tools count."""

    allowed_tools: AllowedTools


#: ``none``, ``auto``, ``required``, or one of the objects.
ToolChoice = str | FunctionChoice | AllowedChoice

# -- shared by requests and responses -------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct, kw_only=True):
    """Which function was called. arguments: JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: CalledFunction


# -- streams -------------------------------------------------------------------------------------------------------


class FunctionDelta(msgspec.Struct, kw_only=True):
    """More of a call. name: in its first delta."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """More of call number ``index`` of the answer. id, type: in its first delta."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only those of type ``text`` are served."""

    type: str
    text: str | None = None


#: Chat templates' names of the roles.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation. tool_call_id: the call that a message of role ``tool`` is the result of."""

    role: Annotated[str, shown(enum=sorted(ROLES))]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    function_call: Annotated[Any, shared.not_done("none", "auto")] = None
    audio: Annotated[Any, shared.not_done()] = None


class ChatRequest(shared.GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], shown(minItems=1)]
    logprobs: bool | None = None
    max_completion_tokens: Positive | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None

    echo: Annotated[Any, shared.not_done(False)] = None
    functions: Annotated[Any, shared.not_done([])] = None
    function_call: Annotated[Any, shared.not_done("none", "auto")] = None
    modalities: Annotated[Any, shared.not_done(["text"])] = None
    audio: Annotated[Any, shared.not_done()] = None
    verbosity: Annotated[Any, shared.not_done()] = None
    web_search_options: Annotated[Any, shared.not_done()] = None
    chat_template: Annotated[Any, shared.not_done()] = None
    documents: Annotated[Any, shared.not_done([])] = None
    media_io_kwargs: Annotated[Any, shared.not_done({})] = None
    mm_processor_kwargs: Annotated[Any, shared.not_done({})] = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer. content: null where there is none beside calls or reasoning. reasoning: what vLLM and others call
    reasoning_content."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. seed: gives the same text again."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: shared.FinishReason | None
    stop_reason: str | int | None = None
    seed: int | UnsetType = UNSET
    token_ids: list[int] | None = None
    provenance: Provenance | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat completion. metadata: of one that is stored."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: shared.Usage
    metadata: dict[str, str] | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: shared.Metrics | UnsetType = UNSET
    timings: shared.Timings | UnsetType = UNSET
    warnings: list[shared.RequestWarning] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: shared.FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    provenance: Provenance | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: shared.Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: shared.Metrics | UnsetType = UNSET
    timings: shared.Timings | UnsetType = UNSET
    warnings: list[shared.RequestWarning] | UnsetType = UNSET
