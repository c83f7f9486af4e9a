"""What responses report about tokens: log-probabilities and provenance.

Every token and every step is reported exactly once, however a stream is chunked: over a whole response the counts of
the steps add up to those of its ``metrics``, and the texts of the tokens to its text. Fields: docs/protocol.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


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
