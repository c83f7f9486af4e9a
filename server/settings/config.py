"""Every setting, once: the fields below are the flags, the ``FORESAY_*`` variables and the keys of a TOML file.

::

    EngineConfig        [engine]    --draft-tokens   FORESAY_DRAFT_TOKENS   which models, drafting, memory
    ├── ServeConfig     [server]    --port           FORESAY_PORT           foresay serve
    └── SamplingConfig  [sampling]  --temperature    FORESAY_TEMPERATURE    foresay generate, foresay chat
        └── BenchConfig [bench]     --rounds         FORESAY_ROUNDS         foresay bench

A field belongs to the section of the class that declares it. A file may have sections ``[models.NAME]`` with keys of
``[engine]``: then a server has several models (docs/models.md). :mod:`foresay.server.settings.load` reads them in the
order flag, variable, file, default. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from foresay.server.catalog.formats import FORMATS, REASONING
from foresay.server.settings import units
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import SUFFIX
from foresay.spec.sampling import MinP, MinTokens, Penalty, Positive, RepetitionPenalty, Temperature, TopK, TopP

Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Span = Annotated[str, Meta(pattern=units.SPAN, extra={"expected": units.EXPECTED})]
KVDisk = Annotated[str, Meta(pattern=rf"^(off|{units.BYTES})$", extra={"expected": f"off or {units.BYTES_EXPECTED}"})]
Dtype = Literal["auto", "bfloat16", "float32", "float16"]
Quantize = Literal["int8", "int4", "fp8"]
KVDtype = Literal["auto", "int8", "fp8"]
Activations = Literal["auto", "int8", "model"]
DeviceKind = Literal["auto", "cpu", "cuda"]
ToolParser = Literal["auto", "none", *FORMATS, "response_template"]  # type: ignore[valid-type]
ReasoningParser = Literal["auto", "none", *REASONING]  # type: ignore[valid-type]
Growth = Literal["dynamic", "static"]
Chain = Annotated[
    int, Meta(ge=1, le=63, extra={"expected": "a whole number from 1 to 63 (--draft none decodes without drafts)"})
]
Shape = Annotated[
    str,
    Meta(
        pattern=r"^([1-9][0-9]*(,[1-9][0-9]*)*|.*\.json)$",
        extra={"expected": 'node counts such as "3,2,1", or a template (.json)'},
    ),
]
#: A model's name for clients. Several are given one by one, so a comma can only be a mistake.
ModelName = Annotated[
    str,
    Meta(
        pattern=r"^[^,\x00-\x1f\x7f]{1,256}$",
        extra={"expected": "a name of 1 to 256 characters without a comma (several names: the setting several times)"},
    ),
]
LayerNumbers = Annotated[
    str, Meta(pattern=r"^[0-9]{1,4}(,[0-9]{1,4})*$", extra={"expected": 'layer numbers such as "2,16,29"'})
]

DraftVocab = Annotated[
    str,
    Meta(pattern=r"^(auto|full|[1-9][0-9]{2,6})$", extra={"expected": "auto, full, or a number of tokens from 100"}),
]
Replicas = Annotated[
    str, Meta(pattern=r"^[1-9][0-9]{0,3}(-[1-9][0-9]{0,3})?$", extra={"expected": 'a number such as 2, or "1-4"'})
]
Origin = Annotated[
    str,
    Meta(
        pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$",
        extra={"expected": 'an origin such as "https://chat.example.com" (no path), or "*"'},
    ),
]
#: Hashed fast, so it must not be a human-made password: see :mod:`foresay.server.gateway.keys`.
SecretKey = Annotated[
    str,
    Meta(
        pattern=r"^[\x21-\x7e]{16,512}$", extra={"expected": "a key of 16 to 512 printable characters without a space"}
    ),
]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`foresay.server.engine.build.build_engine` needs: the models, how to draft, and how much memory to
    hold."""

    target: str = "bundled"
    draft: str = "auto"
    anyway: bool = False
    dtype: Dtype = "auto"
    quantize: Quantize | None = None
    activations: Activations = "auto"
    kv_dtype: KVDtype = "auto"
    draft_quantize: Quantize | None = None
    draft_kv_dtype: KVDtype = "auto"
    device: DeviceKind = "auto"
    graphs: bool = True
    draft_tokens: Chain | None = None
    draft_tree: Shape | None = None
    draft_layers: LayerNumbers | None = None
    draft_vocab: DraftVocab = "auto"
    draft_growth: Growth = "dynamic"
    draft_history: str | None = None
    max_seqs: Annotated[int, Meta(ge=1, le=256)] = 4
    max_model_len: Positive | None = None
    kv_tokens: Positive | None = None
    page_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    gpu_memory_utilization: Share | None = None
    prefix_cache: bool = True
    kv_disk: KVDisk | None = None
    weight_cache: bool = True
    weight_cache_bytes: Positive = 20_000_000_000
    threads: Positive | None = None
    seed: int | None = None


class ServeConfig(EngineConfig, frozen=True, kw_only=True):
    """What ``foresay serve`` adds: where it listens and how it treats its clients."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    served_model_name: tuple[ModelName, ...] = ()
    any_model_name: bool = False
    strict_limits: bool = False
    keep_client_noise: bool = False
    max_queue: Annotated[int, Meta(ge=0)] = 256
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    drain_seconds: Annotated[float, Meta(ge=0)] = 30.0
    engine_timeout: Seconds = 30.0
    max_resumes: Annotated[int, Meta(ge=0)] = 3
    idle_unload: Span | None = None
    max_loaded_models: Positive | None = None
    access_log: bool = False
    log_stats: bool = True
    self_check: Annotated[float, Meta(ge=0, le=1)] = 0.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_key: tuple[SecretKey, ...] = ()
    api_key_file: str | None = None
    admin_key: SecretKey | None = None
    cors_origin: tuple[Origin, ...] = ()
    max_requests_per_minute: Positive | None = None
    max_output_tokens: Positive | None = None
    max_body_bytes: Annotated[int, Meta(ge=1024)] | None = None
    body_timeout: Seconds = 60.0
    request_timeout: Seconds | None = None
    first_token_timeout: Seconds | None = None
    replicas: Replicas | None = None
    ray_address: str | None = None
    #: By the name that clients use; empty if the server has one model. Each has all settings, including the common
    #: ones.
    models: dict[str, ServeConfig] = {}

    @property
    def idle_seconds(self) -> float | None:
        """``idle_unload`` in seconds; None if a model stays."""
        return None if self.idle_unload is None else units.seconds_of(self.idle_unload)

    @property
    def most_replicas(self) -> int:
        """Most engines that there may be."""
        return 1 if self.replicas is None else int(self.replicas.rpartition("-")[2])

    @property
    def most_running(self) -> int:
        """Most requests that may run and wait."""
        return self.max_seqs * self.most_replicas + self.max_queue


#: A command's default max_tokens.
USUAL_TOKENS = 256


class SamplingConfig(EngineConfig, frozen=True, kw_only=True):
    """What ``foresay generate`` and ``foresay chat`` add: how tokens are sampled and when to stop."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_tokens: Positive | None = None
    min_tokens: MinTokens = 0
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    ignore_eos: bool = False


class BenchConfig(SamplingConfig, frozen=True, kw_only=True):
    """What ``foresay bench`` adds."""

    rounds: Annotated[int, Meta(ge=1, le=1000)] = 5


#: The sections of a TOML file and the classes that declare their keys, ancestors first.
SECTIONS: dict[str, type[EngineConfig]] = {
    "engine": EngineConfig,
    "server": ServeConfig,
    "sampling": SamplingConfig,
    "bench": BenchConfig,
}


def check(config: EngineConfig) -> None:
    """Raise :class:`ConfigurationError` for settings that are each valid but do not fit together."""
    if isinstance(config, ServeConfig):
        _check_server(config)
    if isinstance(config, SamplingConfig) and config.min_tokens > (config.max_tokens or USUAL_TOKENS):
        most = config.max_tokens or f"{USUAL_TOKENS}, unless it is set"
        raise ConfigurationError(f"min_tokens ({config.min_tokens}) must be at most max_tokens ({most})")
    if config.draft_history is not None and not {SUFFIX, "auto"} & {part.strip() for part in config.draft.split(",")}:
        raise ConfigurationError(
            f"draft_history is what the suffix drafter remembers, but draft is {config.draft}: set --draft suffix, or "
            "leave --draft-history out"
        )
    if config.max_model_len is not None and config.kv_tokens is not None and config.kv_tokens < config.max_model_len:
        raise ConfigurationError(
            f"kv_tokens ({config.kv_tokens}) must be at least max_model_len ({config.max_model_len}), "
            "or a single long request could never be served"
        )


def _check_server(config: ServeConfig) -> None:
    if config.idle_seconds == 0:
        raise ConfigurationError("idle_unload must be above 0; leave it out to keep the model")
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        missing = "ssl_certfile" if config.ssl_certfile is None else "ssl_keyfile"
        raise ConfigurationError(f"HTTPS needs a certificate and its key: {missing} is not set")
    if len(set(config.api_key)) < len(config.api_key):
        raise ConfigurationError("the same api_key is given twice")
    if len(set(config.served_model_name)) < len(config.served_model_name):
        raise ConfigurationError("the same served_model_name is given twice")
    if config.request_timeout is not None and (config.first_token_timeout or 0) > config.request_timeout:
        raise ConfigurationError(
            f"first_token_timeout ({config.first_token_timeout:g}) must be at most "
            f"request_timeout ({config.request_timeout:g})"
        )
    _check_replicas(config)
    limit, longest = config.max_output_tokens, config.max_model_len
    if limit is not None and longest is not None and limit >= longest:
        raise ConfigurationError(f"max_output_tokens ({limit}) must be below max_model_len ({longest})")


def _check_replicas(config: ServeConfig) -> None:
    if config.replicas is None:
        if config.ray_address is not None:
            raise ConfigurationError("ray_address is where replicas run, but there are none: set --replicas")
        return
    least, _, most = config.replicas.partition("-")
    if most and int(most) < int(least):
        raise ConfigurationError(f"replicas ({config.replicas}) must name the least first, then the most")
    if config.draft_history is not None:
        raise ConfigurationError("draft_history is a file written by one engine: it cannot be combined with --replicas")
    if config.idle_unload is not None:
        raise ConfigurationError("idle_unload ends an engine: with --replicas say how many, such as --replicas 1-4")


def check_models(config: ServeConfig) -> None:
    """Raise :class:`ConfigurationError` for models of one server that are each valid but do not fit together."""
    if not config.models:
        if config.max_loaded_models is not None:
            raise ConfigurationError("max_loaded_models is for several models, but no [models.NAME] names any")
        return
    if config.replicas is not None:
        raise ConfigurationError("replicas serve one model: --replicas cannot be combined with [models.NAME]")
    if config.served_model_name:
        raise ConfigurationError("served_model_name is for one model; several are named by [models.NAME]")
    _check_own_files(config.models)


def _check_own_files(models: dict[str, ServeConfig]) -> None:
    """Refuse a file that two models would write to: both may be loaded at once."""
    users: dict[str, str] = {}
    for name, config in models.items():
        file = config.draft_history
        if file is not None and users.setdefault(file, name) != name:
            raise ConfigurationError(
                f"the models {users[file]} and {name} would both write to {file}: set draft_history in each section"
            )
