"""Fields shared by completions and chat, named as by OpenAI and vLLM, and fields of every response.

Optional request fields default to None and accept null. Known but unsupported fields are annotated with
:func:`not_done`; fields not listed here are ignored. In responses, ``UNSET`` fields are left out. Field by field:
docs/compatibility.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foresay.server.schemas.bounds import Choices, Name, RequestId, Stop, Stops, TokenIds, Words
from foresay.spec import sampling as ranges
from foresay.spec.shape import MAX_NODES

NOT_DONE = "Known but not supported."


def not_done(*harmless: object, by: str = "this server", instead: str = "") -> Meta:
    """The annotation of a known but unsupported field. harmless: values besides null that change nothing; all others
    are refused, since ignoring them silently would break a promise. instead: an alternative.
    """
    values = [value for at, value in enumerate(harmless) if value not in harmless[:at]]  # 1 is 1.0
    words = {"enum": [None, *values], "default": None, "description": NOT_DONE}
    typed = [(type(value), value) for value in harmless]  # 0 is not False
    wrong = f" is not supported by {by}{instead and f'; {instead}'}"
    return Meta(extra={"harmless": typed, "wrong": wrong}, extra_json_schema=words)


def not_followed(*harmless: object, why: str) -> Meta:
    """The annotation of a field that does not change the text and is ignored with a warning. harmless: values that need
    no warning."""
    return Meta(extra={"harmless": [(type(value), value) for value in harmless], "why": why})


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema with a name. strict: the schema holds either way."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The required format of the answer. type: ``text``, ``json_object`` or ``json_schema``. schema: for a JSON object,
    as in llama.cpp."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """What the answer must match: exactly one of json (a schema, or its text), regex, choice, grammar, json_object.
    The other fields determine how JSON is formatted."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    structural_tag: Any = None


FinishReason = Literal["stop", "length", "tool_calls"]
MetricsLevel = Literal["none", "summary", "detailed"]
#: The sentence of each warning, after the field's name, by its code.
WARNINGS = {
    "tool_left_out": "tools of type {kind} cannot be run here; the model does not see this one",
    "max_tokens_clamped": "{requested:,} tokens are more than {why}; at most {room:,} are generated",
    "model_renamed": "{requested} is served by {name!r}",
    "hint_left_out": "this model's chat template cannot express {value}; the model does not see it",
    "format_not_enforced": "the model sees this grammar, but its calls are not constrained to it",
    "system_moved": "this model's chat template refuses system messages here; it is sent as the user's",
    "client_noise_left_out": "the model does not see {name} (--keep-client-noise shows it)",
    "compacted": "{results} results of tools, {thoughts} thoughts and {earlier} earlier items were left out",
    "not_followed": "not followed: {why}",
    "unknown_field": "there is no such field here, so it changes nothing",
    "generic_tools": "this model's chat template has no tools; they are described in the prompt in a general format",
    "resumed": "the engine was replaced after output token {at_token:,}; the text may differ from there on",
}
WarningCode = Literal[*WARNINGS]  # type: ignore[valid-type]

# -- requests ------------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream contains in addition to text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_DEEPEST = MAX_NODES - 1


class Speculation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How drafts are made for this request; they do not change its text. off: decode without drafts, one token per
    step. method: one of the server's drafters, auto (the best at each step) or none. max_tokens: maximum draft depth.
    """

    off: bool | None = None
    method: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=_DEEPEST)] | None = None


class PredictionPart(msgspec.Struct, kw_only=True):
    """A part of a predicted text."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """A predicted answer, used as a draft; it does not change the text."""

    type: Literal["content"]
    content: str | list[PredictionPart]


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields shared by completions and chat. logit_bias: as OpenAI has it, or llama.cpp's list of pairs, a token's
    id or a text and its bias, or false for never. grammar, json_schema: llama.cpp's names for what structured_outputs
    calls grammar and json."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: ranges.Positive | None = None
    temperature: ranges.Temperature | None = None
    top_p: ranges.TopP | None = None
    top_k: ranges.TopK | None = None
    min_p: ranges.MinP | None = None
    seed: int | None = None
    min_tokens: ranges.MinTokens | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    request_id: RequestId | None = None
    cache_salt: Name | None = None
    spec_decode_metrics: MetricsLevel | None = None
    speculation: Speculation | None = None
    prediction: Prediction | None = None
    presence_penalty: ranges.Penalty | None = None
    frequency_penalty: ranges.Penalty | None = None
    repetition_penalty: ranges.RepetitionPenalty | None = None
    logit_bias: dict[str, float] | list[tuple[int | str, float | bool]] | None = None
    bad_words: Words | None = None
    allowed_token_ids: list[int] | None = None
    n: Choices | None = None
    best_of: int | None = None
    top_logprobs: ranges.Logprobs | None = None
    prompt_logprobs: ranges.Logprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    provenance: bool | None = None
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_progress: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    samplers: Annotated[str | list[str] | None, not_followed([], why="filters have one order on this server")] = None
    cache_prompt: Annotated[bool | None, not_followed(True, why="prefixes are always reused")] = None
    timings_per_token: Annotated[bool | None, not_followed(False, why="timings come at the end")] = None

    logprob_token_ids: Annotated[Any, not_done([])] = None
    dynatemp_range: Annotated[Any, not_done(0, 0.0)] = None
    top_n_sigma: Annotated[Any, not_done(-1, -1.0, 0, 0.0)] = None
    use_beam_search: Annotated[Any, not_done(False)] = None
    length_penalty: Annotated[Any, not_done(1, 1.0)] = None
    guided_json: Annotated[Any, not_done(instead="write structured_outputs.json")] = None
    guided_regex: Annotated[Any, not_done(instead="write structured_outputs.regex")] = None
    guided_choice: Annotated[Any, not_done(instead="write structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, not_done(instead="write structured_outputs.grammar")] = None
    priority: Annotated[Any, not_done(0)] = None
    logits_processors: Annotated[Any, not_done([])] = None
    prompt_embeds: Annotated[Any, not_done()] = None
    kv_transfer_params: Annotated[Any, not_done()] = None
    vllm_xargs: Annotated[Any, not_done({})] = None
    truncation_side: Annotated[Any, not_done("left")] = None
    thinking_token_budget: Annotated[Any, not_done()] = None
    repeat_penalty: Annotated[Any, not_done(1, 1.0, instead="write repetition_penalty")] = None
    no_repeat_ngram_size: Annotated[Any, not_done(0)] = None
    typical_p: Annotated[Any, not_done(1, 1.0)] = None
    mirostat: Annotated[Any, not_done(0)] = None
    xtc_probability: Annotated[Any, not_done(0, 0.0)] = None
    dry_multiplier: Annotated[Any, not_done(0, 0.0)] = None
    n_predict: Annotated[Any, not_done(instead="write max_tokens")] = None
    regex: Annotated[Any, not_done("", instead="write structured_outputs.regex")] = None
    ebnf: Annotated[Any, not_done("", instead="write structured_outputs.grammar")] = None


# -- what responses share ------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: prompt tokens whose KV was cached."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """reasoning_tokens: completion tokens of reasoning. accepted_prediction_tokens, rejected_prediction_tokens: drafted
    tokens of the request's prediction that are in the text, and that are not (these are not completion tokens); only if
    there is a prediction."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Tokens of the answer so far, of all choices together. completion_tokens_details: only with reasoning or a
    prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class SpeculativeDecoding(msgspec.Struct, kw_only=True):
    """Drafting statistics in vLLM's format. Lists by step only if details were requested."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class Metrics(msgspec.Struct, kw_only=True):
    """How the answer was generated: vLLM's fields; ``tokens_per_step``: tokens per pass of the target, including passes
    without drafts; ``exact``: whether plain decoding gives the same tokens on this machine; ``resumed``: how often
    another engine process continued it. speculative_decoding is null without a drafter."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float
    tokens_per_step: float | None
    exact: bool
    resumed: int
    speculative_decoding: SpeculativeDecoding | None


class Timings(msgspec.Struct, kw_only=True):
    """How long prompt and answer took, in llama.cpp's format; cache_n: prompt tokens that were cached. draft_n,
    draft_n_accepted: drafted and accepted tokens. Times in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class PromptProgress(msgspec.Struct, kw_only=True):
    """How far the prompt is read, in llama.cpp's format: its tokens, those that were cached, and those that are read,
    the cached ones included; and the milliseconds that it took so far."""

    total: int
    cache: int
    processed: int
    time_ms: float


class RequestWarning(msgspec.Struct, frozen=True, kw_only=True):
    """What is not done as requested. param: the field; message: a sentence that names it. docs/compatibility.md says
    what each code means."""

    code: WarningCode
    param: str
    message: str


class ErrorDetail(msgspec.Struct):
    """An error, in OpenAI's four fields."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every error response, and the last event of a failed stream."""

    error: ErrorDetail


class UsualSampling(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The default sampling of ``foresay chat``, ``foresay generate`` and the page. recommended: which of these come
    from the model's ``generation_config.json``; the others are usual values."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    recommended: list[str]


class ModelCard(msgspec.Struct, kw_only=True):
    """One entry of ``GET /v1/models``, with the fields of OpenAI, vLLM, Anthropic, llama.cpp and others. loaded: only
    if there are several models. max_model_len, also called context_length or max_input_tokens: left out if unknown, as
    for a model that was never loaded. max_tokens: of an output, if the server limits it. rarely_calls_tools: only of
    known models that do, unless they are made to. sampling: left out until its tokenizer is loaded."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "foresay"
    root: str
    max_model_len: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    rarely_calls_tools: bool | UnsetType = UNSET
    meta: dict[str, int] | UnsetType = UNSET
    loaded: bool | UnsetType = UNSET
    sampling: UsualSampling | UnsetType = UNSET
    type: str = "model"
    lifecycle: str = "active"
    display_name: str
    created_at: str


class ModelList(msgspec.Struct, kw_only=True):
    """``GET /v1/models``: all names of the served models, on one page."""

    data: list[ModelCard]
    object: str = "list"
    first_id: str
    last_id: str
    has_more: bool = False
