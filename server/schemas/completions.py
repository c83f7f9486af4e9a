"""The schemas of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foresay.server.schemas.bounds import shown
from foresay.server.schemas.shared import (
    FinishReason,
    GenerationRequest,
    Metrics,
    RequestWarning,
    Timings,
    Usage,
    not_done,
)
from foresay.server.schemas.tokens import CompletionLogprobs, PromptLogprobs, Provenance
from foresay.spec.sampling import Logprobs


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``. prompt: a text, token ids, or a list of either. logprobs: how many of the likeliest."""

    prompt: Annotated[str, shown(minLength=1)] | Annotated[list[str | int | list[int]], shown(minItems=1)]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Meta(ge=0, extra={"wanted": "at least 1"})] | None = None

    suffix: Annotated[Any, not_done("")] = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text, or a piece of one. seed: gives the same text again; once it is finished. What a whole answer has no
    value for is null, since clients of vLLM's look for it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    provenance: Provenance | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, or a chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[RequestWarning] | UnsetType = UNSET
