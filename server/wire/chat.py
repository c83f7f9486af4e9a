"""``/v1/chat/completions`` on the wire."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from server.wire.shared import FinishReason, GenerationRequest, Metrics, Usage


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only those of type ``text`` are served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    echo: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. seed: gives the same text again."""

    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
