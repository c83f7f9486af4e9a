"""Every setting, once: the fields below are the flags, the ``FORESAY_*`` variables and the keys of a TOML file.

::

    EngineConfig        [engine]    --draft-tokens   FORESAY_DRAFT_TOKENS   which models, drafting, memory
    ├── ServeConfig     [server]    --port           FORESAY_PORT           foresay serve
    └── SamplingConfig  [sampling]  --temperature    FORESAY_TEMPERATURE    foresay generate, foresay chat
        └── BenchConfig [bench]     --rounds         FORESAY_ROUNDS         foresay bench

A field belongs to the section of the class that declares it. :mod:`server.load_config` reads them in the order flag,
variable, file, default. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from spec.errors import ConfigurationError

Positive = Annotated[int, Meta(ge=1)]
Dtype = Literal["auto", "bfloat16", "float32", "float16"]
Shape = Annotated[str, Meta(pattern=r"^[1-9][0-9]*(,[1-9][0-9]*)*$", extra={"expected": 'node counts such as "3,2,1"'})]


def _about(description: str, group: str, metavar: str | None = None) -> Meta:
    """What ``--help`` says about a field, and under which heading."""
    return Meta(description=description, extra={"group": group, "metavar": metavar})


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`server.build.build_engine` needs: the models, how to draft, and how much memory to hold."""

    target: Annotated[str, _about("bundled, a directory, or a Hugging Face hub id", "models", "TARGET")] = "bundled"
    draft: Annotated[
        str,
        _about(
            "who proposes tokens: auto (the bundled draft for the bundled target, otherwise none), none, ngram, "
            "or a draft model as a directory or hub id",
            "models",
            "DRAFT",
        ),
    ] = "auto"
    dtype: Annotated[
        Dtype, _about("weights and KV cache; auto is bfloat16, or float32 on a processor without bf16", "models")
    ] = "auto"
    draft_tokens: Annotated[int, Meta(ge=0, le=63), _about("tokens drafted ahead, as a chain", "drafting", "K")] = 4
    draft_tree: Annotated[
        Shape | None,
        _about("draft a tree instead: nodes kept at each depth, for example 3,2,1", "drafting", "SHAPE"),
    ] = None
    max_seqs: Annotated[int, Meta(ge=1, le=256), _about("sequences decoded at the same time", "memory", "N")] = 4
    max_model_len: Annotated[
        Positive | None, _about("longest prompt plus output in tokens (the model's own limit)", "memory", "TOKENS")
    ] = None
    kv_tokens: Annotated[
        Positive | None, _about("tokens the KV cache holds (chosen from the free memory)", "memory", "TOKENS")
    ] = None
    page_size: Annotated[int, Meta(ge=1, le=1024), _about("tokens in one page of the KV cache", "memory", "TOKENS")] = (
        16
    )
    prefix_cache: Annotated[bool, _about("reuse the KV of prompts that start alike", "memory")] = True
    threads: Annotated[Positive | None, _about("CPU threads (one per physical core)", "memory", "N")] = None
    seed: Annotated[int | None, _about("seed of requests that bring none (random)", "drawing", "S")] = None


class ServeConfig(EngineConfig, frozen=True, kw_only=True):
    """What ``foresay serve`` adds: where it listens and how it treats its clients."""

    host: Annotated[str, _about("address to listen on", "server", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _about("port to listen on; 0 takes a free one", "server", "PORT")] = 8000
    served_model_name: Annotated[
        str | None, _about("the model's name in the API (the target's name)", "server", "NAME")
    ] = None
    max_queue: Annotated[
        int, Meta(ge=0), _about("requests that may wait for their turn before new ones get 429", "server", "N")
    ] = 256
    drain_seconds: Annotated[
        float, Meta(ge=0), _about("after SIGTERM, how long running requests may take to finish", "server", "SECONDS")
    ] = 30.0


class SamplingConfig(EngineConfig, frozen=True, kw_only=True):
    """What ``foresay generate`` and ``foresay chat`` add: how tokens are drawn and when to stop."""

    temperature: Annotated[float, Meta(ge=0, le=100), _about("0 takes the most likely token", "drawing", "T")] = 1.0
    top_k: Annotated[int, Meta(ge=-1), _about("draw among the K most likely tokens; 0 is all", "drawing", "K")] = 0
    top_p: Annotated[
        float, Meta(gt=0, le=1), _about("draw among the most likely tokens that together reach P", "drawing", "P")
    ] = 1.0
    min_p: Annotated[
        float, Meta(ge=0, le=1), _about("leave out tokens below P times the most likely one's chance", "drawing", "P")
    ] = 0.0
    max_tokens: Annotated[Positive, _about("most tokens to write", "stopping", "N")] = 256
    min_tokens: Annotated[int, Meta(ge=0), _about("fewest tokens to write", "stopping", "N")] = 0
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        _about("end where this text appears; may be given several times", "stopping", "TEXT"),
    ] = ()
    ignore_eos: Annotated[bool, _about("write on past the model's end-of-text token", "stopping")] = False


class BenchConfig(SamplingConfig, frozen=True, kw_only=True):
    """What ``foresay bench`` adds."""

    rounds: Annotated[int, Meta(ge=1, le=1000), _about("times each way of decoding is measured", "bench", "N")] = 5


#: The sections of a TOML file and who declares their keys, ancestors first.
SECTIONS: dict[str, type[EngineConfig]] = {
    "engine": EngineConfig,
    "server": ServeConfig,
    "sampling": SamplingConfig,
    "bench": BenchConfig,
}


def check(config: EngineConfig) -> None:
    """Raise :class:`ConfigurationError` for settings that are fine one by one but not together."""
    if isinstance(config, SamplingConfig) and config.min_tokens > config.max_tokens:
        raise ConfigurationError(f"min_tokens ({config.min_tokens}) must be at most max_tokens ({config.max_tokens})")
    if config.max_model_len is not None and config.kv_tokens is not None and config.kv_tokens < config.max_model_len:
        raise ConfigurationError(
            f"kv_tokens ({config.kv_tokens}) must be at least max_model_len ({config.max_model_len}), "
            "or a single long request could never be served"
        )
