"""The schemas of Ollama's API. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.catalog.formats import EFFORTS
from foresay.server.schemas.bounds import Stop, Stops, shown
from foresay.server.schemas.chat import ChatTokenLogprob
from foresay.server.schemas.shared import Metrics, RequestWarning, not_done
from foresay.spec.sampling import Logprobs, MinP, Penalty, RepetitionPenalty, Temperature, TopK, TopP

# -- requests ------------------------------------------------------------------------------------------------------


class OllamaOptions(msgspec.Struct, kw_only=True):
    """How to sample and when to stop. num_predict: maximum number of tokens to generate; negative: as many as fit.

    Options that affect how a model is run rather than its output (num_ctx, num_gpu and the like) are ignored.
    """

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: Stop | Stops | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    typical_p: Annotated[Any, not_done(1, 1.0)] = None
    tfs_z: Annotated[Any, not_done(1, 1.0)] = None
    mirostat: Annotated[Any, not_done(0)] = None
    repeat_last_n: Any = None
    penalize_newline: Annotated[Any, not_done(True)] = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields shared by chat and generate. stream: true by default. format: ``json``, or a JSON schema.

    think: whether the model reasons before it answers, if it can. keep_alive: how long the model stays loaded after
    this request (``5m``, or seconds; negative: forever; 0: not at all).
    """

    model: str
    stream: bool | None = None
    format: Annotated[str, shown(enum=["", "json"])] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Annotated[str, shown(enum=list(EFFORTS))] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    """The called function and its arguments."""

    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A tool call."""

    function: OllamaFunction
    id: str | UnsetType | None = UNSET


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation. tool_name: in messages of role ``tool``, the tool whose result it is."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    images: Annotated[Any, not_done([])] = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """``POST /api/chat``. Without messages the model is only loaded, or (keep_alive 0) unloaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """``POST /api/generate``. raw: the prompt is sent to the model unchanged, without the chat template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    suffix: Annotated[Any, not_done("")] = None
    template: Annotated[Any, not_done("")] = None
    context: Annotated[Any, not_done([])] = None
    images: Annotated[Any, not_done([])] = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """``POST /api/show``. name: used by older clients instead of ``model``."""

    model: str | None = None
    name: str | None = None


class PullRequest(ShowRequest, kw_only=True):
    """``POST /api/pull``: downloads a model of the catalog or of the hub."""

    stream: bool | None = None


# -- answers -------------------------------------------------------------------------------------------------------


class OllamaAnswerMessage(msgspec.Struct, kw_only=True):
    """More of the answer, or all of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaProgress(msgspec.Struct, kw_only=True):
    """The fields of every line; those from done_reason on only of the last one. logprobs: of the line's tokens, if
    requested."""

    model: str
    created_at: str
    done: bool
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_cached_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    warnings: list[RequestWarning] | UnsetType = UNSET


class OllamaChatLine(OllamaProgress, kw_only=True):
    """A line of ``/api/chat``, or its whole answer."""

    message: OllamaAnswerMessage


class OllamaGenerateLine(OllamaProgress, kw_only=True):
    """A line of ``/api/generate``, or its whole answer."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaError(msgspec.Struct):
    """An error, as a body or as the last line of a failed stream."""

    error: str


class PullStatus(msgspec.Struct):
    """A line of the response to ``POST /api/pull``; without streaming, only the last one."""

    status: str


class ModelDetails(msgspec.Struct, kw_only=True):
    """The kind of model. quantization_level: the type of the weights."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: tuple[str, ...]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model in ``/api/tags``. size: bytes of its weights, 0 if it was never loaded. digest: of its description, not
    of its files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class RunningModel(OllamaModel, kw_only=True):
    """A model in ``/api/ps``. size: bytes of models and KV cache; size_vram: those on a GPU."""

    expires_at: str
    size_vram: int
    context_length: int


class Tags(msgspec.Struct):
    """``GET /api/tags``."""

    models: list[OllamaModel]


class Running(msgspec.Struct):
    """``GET /api/ps``."""

    models: list[RunningModel]


class OllamaVersion(msgspec.Struct, kw_only=True):
    """``GET /api/version``. version: the version of Ollama's API that is implemented."""

    version: str
    foresay: str


class Shown(msgspec.Struct, kw_only=True):
    """``POST /api/show``. template: the chat template, in Jinja."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
