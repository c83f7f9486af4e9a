"""The schemas of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foresay.server.schemas import shared
from foresay.server.schemas.bounds import shown
from foresay.server.schemas.tokens import CompletionLogprobs, PromptLogprobs, Provenance
from foresay.spec.sampling import Logprobs


class CompletionRequest(shared.GenerationRequest, kw_only=True):
    """``POST /v1/completions``. prompt: a text, token ids, or a list of either. logprobs: number of most likely
    tokens."""

    prompt: Annotated[str, shown(minLength=1)] | Annotated[list[str | int | list[int]], shown(minItems=1)]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Meta(ge=0, extra={"wanted": "at least 1"})] | None = None

    suffix: Annotated[Any, shared.not_done("")] = None


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


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, or a chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: shared.Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: shared.Metrics | UnsetType = UNSET
    timings: shared.Timings | UnsetType = UNSET
    warnings: list[shared.RequestWarning] | UnsetType = UNSET
