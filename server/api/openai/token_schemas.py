"""Text to tokens and back on the wire, as vLLM spells it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from server.schemas.chat import Message
from server.schemas.tools import Tool


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /tokenize``. prompt: a text; or messages: a conversation, and the fields of chat completions that say how
    it is rendered.

    add_special_tokens: true unless said otherwise for a text, false for a conversation, whose template writes them.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    """The tokens of a text. token_strs: what each of them stands for alone, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


class Detokenized(msgspec.Struct, kw_only=True):
    """The text of some tokens, special ones written out."""

    prompt: str


class Rendered(msgspec.Struct, kw_only=True):
    """What a conversation looks like to the model, before any inference."""

    prompt: str
    token_ids: list[int]
    count: int
    max_model_len: int
