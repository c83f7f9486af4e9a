"""How likely tokens were, as chat and completions say it. There can be many of these, hence ``gc=False``."""

from __future__ import annotations

import msgspec


class TopLogprob(msgspec.Struct, gc=False):
    """A token that could have been. bytes: of a token that is half a character, too."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, gc=False):
    """A token of the answer, and the likeliest ones in its place, likeliest first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, gc=False):
    """One entry per token, the one that ended the answer among them."""

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
    """A token of the prompt, or a likelier one, as vLLM reports it. rank: 1 is the likeliest; null if not listed."""

    logprob: float
    rank: int | None
    decoded_token: str


#: One entry per prompt token, by token id; null for the first, which nothing precedes.
PromptLogprobs = list[dict[str, PromptLogprob] | None]
