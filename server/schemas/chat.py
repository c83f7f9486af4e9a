"""The schemas of ``/v1/chat/completions``, including tools (offered functions, tool choice, calls), and of
``/v1/completions``; and what responses report about tokens: log-probabilities and provenance.

Every token and every step is reported exactly once, however a stream is chunked: over a whole response the counts of
the steps add up to those of its ``metrics``, and the texts of the tokens to its text. Fields: docs/protocol.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foresay.server.schemas import shared
from foresay.server.schemas.bounds import shown
from foresay.spec.sampling import Logprobs, Positive

# -- about tokens -----------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, gc=False):
    """An alternative token. bytes: also given for a token that is not a whole character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, gc=False):
    """A token of the answer, and the most likely tokens at its position, the likeliest first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, gc=False):
    """One entry per token, including the one that ended the answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, gc=False):
    """Lists with one entry per token. The first token of a prompt has null: nothing precedes it.

    top_logprobs: the likeliest tokens and the token itself. text_offset: where in ``text`` the token begins.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, gc=False):
    """A token of the prompt, or a more likely one, in vLLM's format. rank: 1 is the likeliest; null if not listed."""

    logprob: float
    rank: int | None
    decoded_token: str


#: One entry per prompt token, by token id; null for the first, which nothing precedes.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


#: ``draft``: proposed by a drafter and accepted. ``grammar``: drafted because a grammar allowed nothing else, and
#: accepted. ``target``: sampled by the target after the last accepted token.
Source = Literal["draft", "grammar", "target"]


class TokenProvenance(msgspec.Struct, kw_only=True):
    """One token. step: the step that emitted it. depth: its depth in the draft tree; 0: sampled by the target.

    text, reasoning, arguments: what became certain with it of the answer's text, the reasoning, and the arguments of
    calls. Characters of several tokens, and text that might begin a stop string, are reported with the token that makes
    them certain. drafter: its name, if it was drafted. logprob: if log-probabilities were requested.
    """

    id: int
    text: str
    reasoning: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    step: int
    origin: Source
    drafter: str | UnsetType = UNSET
    depth: int
    logprob: float | UnsetType = UNSET


class StepProvenance(msgspec.Struct, kw_only=True):
    """One step's contribution to this answer. step: its number in the engine. drafter: null if nothing was drafted.

    nodes: of the tree, including its root. drafted: nodes below the root; forced: those that a grammar forced.
    accepted: drafted tokens that are in the answer. discarded: tokens after the answer's end. ms: the step's
    milliseconds by phase, shared by all answers in it.
    """

    step: int
    drafter: str | None
    nodes: int
    drafted: int
    forced: int
    accepted: int
    discarded: int
    ms: dict[str, float]


class Provenance(msgspec.Struct):
    """Steps and tokens, in order. A step is reported no later than its tokens."""

    steps: list[StepProvenance]
    tokens: list[TokenProvenance]


# -- requests ------------------------------------------------------------------------------------------------------


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call. parameters: a JSON schema of its arguments. strict: they must match it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call; other types than ``function`` are left out, with a warning."""

    type: str
    function: Function | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by name."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """One of the request's tools, by name."""

    type: str = "function"
    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """Some of the request's tools. mode: ``auto`` or ``required``."""

    mode: str
    tools: list[NamedTool]


class FunctionChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """``tool_choice``: this function must be called."""

    function: FunctionName


class AllowedChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """``tool_choice``: only some of the request's tools may be called."""

    allowed_tools: AllowedTools


#: ``none``, ``auto``, ``required``, or one of the objects.
ToolChoice = str | FunctionChoice | AllowedChoice

# -- shared by requests and responses -------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct, kw_only=True):
    """The called function. arguments: JSON text, as generated by the model."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call."""

    id: str
    type: str = "function"
    function: CalledFunction


# -- streams -------------------------------------------------------------------------------------------------------


class FunctionDelta(msgspec.Struct, kw_only=True):
    """More of a call. name: only in its first delta."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """More of call number ``index`` of the answer. id, type: only in its first delta."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only type ``text`` is supported."""

    type: str
    text: str | None = None


#: Chat templates' names of the roles.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation. tool_call_id: for role ``tool``, the call whose result it is."""

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
    store: Annotated[bool | None, shared.not_followed(False, why="only responses are kept (POST /v1/responses)")] = None

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
    """The answer. content: null if there are only calls or reasoning. reasoning: the same as reasoning_content, which
    is vLLM's name."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. seed: reproduces the text."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: shared.FinishReason | None
    stop_reason: str | int | None = None
    seed: int | UnsetType = UNSET
    token_ids: list[int] | None = None
    provenance: Provenance | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: shared.Usage
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: shared.Metrics | UnsetType = UNSET
    timings: shared.Timings | UnsetType = UNSET
    warnings: list[shared.RequestWarning] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the message. content: null in the first one, which only begins it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A chunk of one answer."""

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
    prompt_progress: shared.PromptProgress | UnsetType = UNSET
    metrics: shared.Metrics | UnsetType = UNSET
    timings: shared.Timings | UnsetType = UNSET
    warnings: list[shared.RequestWarning] | UnsetType = UNSET


class CompletionRequest(shared.GenerationRequest, kw_only=True):
    """``POST /v1/completions``. prompt: a text, token ids, or a list of either. suffix: what comes after the text that
    is to be filled in. logprobs: number of most likely tokens."""

    prompt: Annotated[str, shown(minLength=1)] | Annotated[list[str | int | list[int]], shown(minItems=1)]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text, or a chunk of one. seed: reproduces the text; only when it is finished. In whole answers missing values
    are null, as vLLM's clients expect."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: shared.FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    provenance: Provenance | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole completion, or a chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: shared.Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_progress: shared.PromptProgress | UnsetType = UNSET
    metrics: shared.Metrics | UnsetType = UNSET
    timings: shared.Timings | UnsetType = UNSET
    warnings: list[shared.RequestWarning] | UnsetType = UNSET
