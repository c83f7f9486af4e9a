"""Every setting, once: the fields below are the flags, the ``FORESAY_*`` variables and the keys of a TOML file; below
each stands its help (:mod:`foresay.server.settings.fields` reads it).

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
from foresay.spec.sampling import MinP, Positive, RepetitionPenalty, Temperature, TopK, TopP

Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Span = Annotated[str, Meta(pattern=units.SPAN, extra={"expected": units.EXPECTED})]
KVDisk = Annotated[str, Meta(pattern=rf"^(off|{units.BYTES})$", extra={"expected": f"off or {units.BYTES_EXPECTED}"})]
Dtype = Literal["auto", "bfloat16", "float32", "float16"]
Bits = Literal["auto", "portable", "fast"]
Quantize = Literal["int8", "int4", "fp8"]
KVDtype = Literal["auto", "bfloat16", "int8", "fp8"]
DraftKVDtype = Literal["auto", "int8", "fp8"]
Activations = Literal["auto", "int8", "model"]
DeviceKind = Literal["auto", "cpu", "cuda"]
ToolParser = Literal["auto", "none", *FORMATS]  # type: ignore[valid-type]
ReasoningParser = Literal["auto", "none", *REASONING]  # type: ignore[valid-type]
Chain = Annotated[
    int, Meta(ge=1, le=63, extra={"expected": "a whole number from 1 to 63 (--draft none decodes without drafts)"})
]
Shape = Annotated[
    str,
    Meta(
        pattern=r"^[1-9][0-9]*(,[1-9][0-9]*)*$",
        extra={"expected": 'node counts such as "3,2,1"'},
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
        pattern=r"^[\x21-\x7e]{16,512}\Z", extra={"expected": "a key of 16 to 512 printable characters without a space"}
    ),
]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`foresay.server.engine.build.build_engine` needs: the models, how to draft, and how much memory to
    hold."""

    # models
    target: str = "bundled"
    """TARGET (text): bundled, a short name such as smollm2 (foresay models), a directory, a GGUF file, or a Hugging
    Face hub id"""
    draft: str = "auto"
    """DRAFT: what proposes tokens: auto (suffix, and a head or draft model that ships with the target), none, ngram,
    suffix, self (the target in fewer bits, on its own KV cache; self:int4, self:int8), mtp (the layer for further
    tokens in Qwen3.5's checkpoints), the directory or hub id of a draft model or of heads (eagle3:PATH, dflash:PATH,
    medusa:PATH and such), the kind alone of one that ships with the target (draft_model, eagle3), a class of your own
    (package.module:Class, see docs/drafters.md), or several separated by commas"""
    anyway: bool = False
    """draft even with a model of another vocabulary that knows less than half of what a text consists of; launch: start
    the agent even if the model does not suffice for it"""
    dtype: Dtype = "auto"
    """(text): weights and KV cache; auto is bfloat16, or float16 on a GPU and float32 on a processor without bf16 and
    with --bits portable"""
    bits: Bits = "auto"
    """(text): portable bits are the same on every CPU, so one seed gives one text everywhere; fast ones may be this
    processor's own; auto takes the faster, which are portable on a processor without bf16 dot products"""
    quantize: Quantize | None = None
    """KIND (text): make the target's weights int8, int4 or fp8 as they are loaded: half or a quarter of the bytes to
    read in each step (as the files have them)"""
    activations: Activations = "auto"
    """(text): what quantised weights are multiplied with: int8 rounds activations in groups of 32, which is faster on a
    CPU; model leaves them as they are; auto is int8 with weights of 4 bits on a CPU"""
    kv_dtype: KVDtype = "auto"
    """(text): the target's KV cache: int8 or fp8 (e4m3), with a scale for each token and head, hold twice as many
    tokens as 16 bits do; auto is --dtype, but bfloat16 where a CPU chose float32 for weights of at most 16 bits"""
    draft_quantize: Quantize | None = None
    """KIND: --quantize for a draft model"""
    draft_kv_dtype: DraftKVDtype = "auto"
    """--kv-dtype for the KV cache of a draft model or of EAGLE and DFlash heads"""
    device: DeviceKind = "auto"
    """(text): where the models run; auto is the first GPU if there is one, otherwise the CPU"""
    graphs: bool = True
    """capture whole steps in CUDA graphs at start-up; on a CPU there are none"""

    # drafting
    draft_tokens: Chain | None = None
    """K: draft a chain of K tokens in every step (chosen at each step from measurements)"""
    draft_tree: Shape | None = None
    """SHAPE: draft a tree instead: nodes for each depth, for example 3,2,1"""
    draft_vocab: DraftVocab = "auto"
    """N: how many tokens a draft model, an EAGLE or an MTP head has logits of, on a CPU: those said lately; auto is
    32768 of a vocabulary of at least twice as many, or all in texts that say others; full is all"""

    # memory
    max_seqs: Annotated[int, Meta(ge=1, le=256)] = 4
    """N: sequences decoded at the same time"""
    max_model_len: Positive | None = None
    """TOKENS: longest prompt plus output in tokens (the model's own limit)"""
    kv_tokens: Positive | None = None
    """TOKENS: tokens the KV cache holds (chosen from the free memory)"""
    page_size: Literal[8, 16, 32] = 16
    """TOKENS: tokens in one page of the KV cache: 8, 16 or 32"""
    gpu_memory_utilization: Share | None = None
    """SHARE: share of the GPU's memory that the engine may hold: models, KV cache and all (0.9)"""
    prefix_cache: bool = True
    """reuse the KV of prompts that start alike"""
    kv_disk: KVDisk | None = None
    """SIZE: how much of the user's cache directory the KV of prompts and answers may take, so that servers started
    later need not compute it, in files that you alone may read; off: none. The least recently used goes first (a tenth
    of what is free, at most 8GiB; off on a GPU)"""
    weight_cache: bool = True
    """keep packed weights on disk, so that later starts on a CPU read and pack nothing: at most 20 GB, the least
    recently used go first"""
    threads: Positive | None = None
    """N: CPU threads (one per physical core)"""

    # sampling
    seed: int | None = None
    """S: seed of requests that give none (random)"""


class ServeConfig(EngineConfig, frozen=True, kw_only=True):
    """What ``foresay serve`` adds: where it listens and how it treats its clients."""

    # server
    host: str = "127.0.0.1"
    """ADDRESS: address to listen on"""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """PORT: port to listen on; 0 takes a free one"""
    served_model_name: tuple[ModelName, ...] = ()
    """NAME: the model's name in the API; may be given several times, answers show the first (the target's name, or the
    last part of its directory). Not for [models.NAME] in the file: those are called NAME"""
    any_model_name: bool = False
    """serve requests whatever model they name; with [models.NAME], the first in the file serves them; answers show the
    real name"""
    keep_client_noise: bool = False
    """show the model also what clients put into prompts that changes each time and means nothing to it, such as Claude
    Code's x-anthropic-billing-header (else it is left out, with a warning, so that the KV cache finds what follows
    again)"""
    max_queue: Annotated[int, Meta(ge=0)] = 256
    """N: requests that may wait for their turn before new ones get 429"""
    tool_parser: ToolParser = "auto"
    """how the model writes tool calls; auto takes it from its chat template"""
    reasoning_parser: ReasoningParser = "auto"
    """how the model writes its reasoning; auto takes it from its chat template"""
    drain_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """SECONDS: after SIGTERM, how long running requests may take to finish"""
    engine_timeout: Seconds = 30.0
    """SECONDS (cluster): kill and restart the engine process if it shows no sign of life (no answer, no CPU time) for
    this long; 20 times as long if it is only silent, or loading, and a fifteenth if it was stopped (SIGSTOP)"""
    max_resumes: Annotated[int, Meta(ge=0)] = 3
    """N (cluster): how often a request is resumed in a new engine process after the one that ran it died or hung; 0: it
    fails"""
    idle_unload: Span | None = None
    """TIME: end the engine process of a model after this long without a request (30s, 10m, 2h), which frees its memory;
    the next request waits until it is loaded again (never)"""
    max_loaded_models: Positive | None = None
    """N: with [models.NAME] in the file: models loaded at the same time (as many as the memory plan has room for)"""
    access_log: bool = False
    """a line on stderr for each request: path, status, time, tokens, key; never text"""
    log_stats: bool = True
    """every 10 s, a line on stderr about what was drafted and accepted, and a warning if speculation does not pay"""
    self_check: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """P: decode this share of the finished requests again without drafts while the server is idle, and count those
    whose tokens differ; 1 is all of them"""
    ssl_certfile: str | None = None
    """FILE: serve HTTPS with this certificate chain (PEM); needs --ssl-keyfile"""
    ssl_keyfile: str | None = None
    """FILE: the private key of the certificate (PEM, not encrypted)"""

    # access
    api_key: tuple[SecretKey, ...] = ()
    """KEY (secret): a key that clients must send; may be given several times. Others on this machine can read flags:
    FORESAY_API_KEY or --api-key-file keep it to yourself"""
    api_key_file: str | None = None
    """FILE: keys with names and limits, hashed; foresay keys new makes entries"""
    admin_key: SecretKey | None = None
    """KEY (secret): the key with which the engine of the running server may be replaced (foresay reload). It can be
    used to load any file: FORESAY_ADMIN_KEY keeps it from others on this machine (no one may)"""
    cors_origin: tuple[Origin, ...] = ()
    """ORIGIN: let web pages of this origin use the server; may be given several times, * is any page (default: none)"""

    # limits
    max_requests_per_minute: Positive | None = None
    """N: requests each key may send in a minute, then 429 (no limit)"""
    max_output_tokens: Positive | None = None
    """N: most tokens of an output; who asks for more gets as many, and a warning (the context)"""
    max_body_bytes: Annotated[int, Meta(ge=1024)] | None = None
    """BYTES: largest body of a request, and message on a WebSocket (4 MiB, or 32 for each token of the context)"""
    body_timeout: Seconds = 60.0
    """SECONDS: refuse with 408 a request whose body takes longer than this to arrive"""
    request_timeout: Seconds | None = None
    """SECONDS: end a request that takes longer than this with an error (never)"""

    # replicas
    replicas: Replicas | None = None
    """N: run this many engines, each in a replica on Ray Serve; 1-4 lets Ray choose by load. Needs the extra
    foresay[ray], see docs/scale.md (one engine, without Ray)"""
    ray_address: str | None = None
    """ADDRESS: with --replicas: the Ray that runs them, such as auto or 10.0.0.5:6379; replicas that already exist are
    shared (a Ray on this machine, started and ended with the server)"""
    #: By the name that clients use; empty if the server has one model. Each has all settings, the common ones too.
    models: dict[str, ServeConfig] = {}

    def base_url(self, port: int) -> str:
        """Where clients on this machine find the server that listens on a port; a wildcard address becomes
        localhost."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.host, self.host)
        literal = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"{'http' if self.ssl_certfile is None else 'https'}://{literal}:{port}"

    @property
    def idle_seconds(self) -> float | None:
        """``idle_unload`` in seconds; None if a model stays."""
        return None if self.idle_unload is None else units.seconds_of(self.idle_unload)


#: A command's default max_tokens.
USUAL_TOKENS = 256


class SamplingConfig(EngineConfig, frozen=True, kw_only=True):
    """What ``foresay generate`` and ``foresay chat`` add: how tokens are sampled and when to stop."""

    # sampling
    temperature: Temperature | None = None
    """T: 0 takes the most likely token (default: as the model recommends, else 0.7; bench: 1)"""
    top_k: TopK | None = None
    """K: sample from the K most likely tokens, 0: all (default: as the model recommends)"""
    top_p: TopP | None = None
    """P: sample from the most likely tokens that together reach P (default: as the model recommends, else 0.95; bench:
    1)"""
    min_p: MinP = 0.0
    """P: leave out tokens less likely than P times the most likely one"""
    repetition_penalty: RepetitionPenalty = 1.0
    """R: above 1, tokens of the prompt and the text so far get less likely"""

    # stopping
    max_tokens: Positive | None = None
    """N: the longest answer, in tokens (default: 256; chat and run: all that the context leaves)"""
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """TEXT: stop where this text appears; may be given several times"""
    ignore_eos: bool = False
    """go on past the model's end-of-text token"""


class BenchConfig(SamplingConfig, frozen=True, kw_only=True):
    """What ``foresay bench`` adds."""

    # bench
    rounds: Annotated[int, Meta(ge=1, le=1000)] = 5
    """N: how often each way of decoding is measured"""


#: The sections of a TOML file and the classes that declare their keys, ancestors first.
SECTIONS: dict[str, type[EngineConfig]] = {
    "engine": EngineConfig,
    "server": ServeConfig,
    "sampling": SamplingConfig,
    "bench": BenchConfig,
}
