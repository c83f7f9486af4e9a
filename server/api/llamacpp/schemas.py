"""The schemas of llama.cpp's own completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.schemas.bounds import shown
from foresay.server.schemas.shared import GenerationRequest, RequestWarning, Timings, not_done, not_followed
from foresay.server.schemas.tokens import TopLogprob
from foresay.spec.sampling import Logprobs, RepetitionPenalty

HERE = "/completion"


class NativeRequest(GenerationRequest, kw_only=True):
    """The fields shared by ``POST /completion`` and ``/infill``: the sampling fields of completions, some under
    llama.cpp's names. n_predict: maximum number of tokens to generate; negative: as many as fit; 0: only prefill the
    prompt, for later requests. n_probs: like logprobs of completions."""

    n_predict: int | None = None
    n_probs: Logprobs | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None

    n: Annotated[int | None, not_done(1, by=HERE)] = None
    post_sampling_probs: Annotated[Any, not_done(False, by=HERE)] = None
    lora: Annotated[Any, not_done([], by=HERE)] = None

    response_fields: Annotated[list[str] | None, not_followed([], why="answers have all their fields")] = None
    t_max_prompt_ms: Annotated[int | None, not_followed(0, -1, why="prompts are read whole, however long it takes")] = (
        None
    )
    t_max_predict_ms: Annotated[int | None, not_followed(0, -1, why="n_predict bounds what is written, not time")] = (
        None
    )
    n_indent: Annotated[int | None, not_followed(0, why="lines may be indented less")] = None


class NativeCompletion(NativeRequest, kw_only=True):
    """``POST /completion``. prompt: a text, or token ids."""

    prompt: Annotated[str, shown(minLength=1)] | list[int]


class Extra(msgspec.Struct, kw_only=True):
    """A file for context."""

    text: str
    filename: str | None = None


class InfillRequest(NativeRequest, kw_only=True):
    """``POST /infill``: generates the text between a prefix and a suffix. prompt: its beginning, if already written."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[Extra] | None = None


class NativeTop(TopLogprob, kw_only=True):
    """One of the most likely tokens, with its id."""

    id: int


class NativeTokenLogprob(msgspec.Struct, kw_only=True):
    """A token of the answer with its id, and the most likely tokens at its position."""

    id: int
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[NativeTop]


class NativeAnswer(msgspec.Struct, kw_only=True):
    """An answer, or a chunk of one. Only the last chunk has the fields from ``model`` on."""

    index: int = 0
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool = False
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[NativeTokenLogprob] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "word", "limit"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[RequestWarning] | UnsetType = UNSET
