"""The engine's input and output: records that cross processes. Imports no torch."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from foresay.spec.errors import Fault, InvalidRequest
from foresay.spec.sampling import SamplingParams, check_tokens

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must match. text: an llguidance grammar. param: the request's field that it was built from, for
    errors.

    after: the grammar begins after this token (the end of the model's thinking); None: at the first token. opens: if
    given, the grammar also begins at the first token unless that is this one; None: ``after`` always applies, if given.
    """

    text: str
    after: int | None = None
    opens: int | None = None
    param: str = "grammar"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far earlier engines got with a request: another one goes on from there.

    committed: the output tokens so far. arrived: when the request came, on the clock ``time.perf_counter``, which all
    processes of a machine share. cached_tokens: as they reported.
    """

    committed: list[int]
    arrived: float
    cached_tokens: int = 0


class Request(msgspec.Struct, kw_only=True):
    """One sequence to generate. salt: prefixes are shared only between equal salts. fork_of: a request added before
    with the same prompt, whose prompt KV this one shares; only that one computes ``prompt_logprobs``.
    forced: recorded output tokens that replace the samples (every pass is still computed), for measurements.
    prediction: what the output will probably be, for drafts only. speculate: false decodes plainly, one token a step:
    nothing is drafted, not even what a grammar forces. draft_method: the only one of several drafters that may draft;
    "" for whichever is best. most_drafted: the deepest draft; None for no limit but the engine's. aside: a background
    request: it neither reuses cached KV nor leaves any, and its steps are counted separately. private: nothing of its
    text is written to disk. progress: how far another
    engine got, if it began the request; the seed is given then."""

    id: str
    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    grammar: Grammar | None = None
    fork_of: str | None = None
    forced: list[int] | None = None
    prediction: list[int] | None = None
    speculate: bool = True
    draft_method: str = ""
    most_drafted: int | None = None
    aside: bool = False
    private: bool = False
    progress: Progress | None = None

    @property
    def committed(self) -> list[int]:
        """Output tokens that were already emitted."""
        return [] if self.progress is None else self.progress.committed

    def validate(self, vocab_size: int) -> None:
        """Raise :class:`InvalidRequest`, which names the first field that is out of range."""
        self.params.validate(vocab_size)
        for field in ("prompt", "prediction", "forced", "committed"):
            check_tokens(field, getattr(self, field) or (), vocab_size)
        if self.grammar is not None:
            borders = (self.grammar.after, self.grammar.opens)
            check_tokens(self.grammar.param, [token for token in borders if token is not None], vocab_size)
        if self.most_drafted is not None and self.most_drafted < 0:
            raise InvalidRequest("most_drafted", f" must be at least 0, got {self.most_drafted}")


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """How likely a token was: natural logarithms of the model's own distribution (temperature 1, nothing filtered).

    top: the likeliest tokens and their logprobs, likeliest first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """Where the tokens of one step come from: the tree that was verified, and the path taken through it.

    step: the engine's number of the step. drafter: the tree's. parents: of its nodes, the root's is -1; the
    first ``forced`` nodes below the root were forced by a grammar. path: the accepted nodes whose tokens were emitted,
    from depth 1 on; a token after them is the target's own. seconds: the step's, by phase (shared by all its
    sequences).
    sources: which drafter proposed each node of the path, where several drafters made the tree. predicted: how many
    nodes come from the request's own prediction.
    """

    step: int
    drafter: str
    parents: list[int]
    forced: int
    path: list[int]
    seconds: dict[str, float]
    sources: list[str] = []
    predicted: int = 0


class RequestEnd(msgspec.Struct, array_like=True, frozen=True):
    """What is known of a request at its end. levels: the deepest draft configured. resumed: how many tokens there were,
    each time that another engine went on; changed: those times that it was one which may write another text."""

    levels: int = 0
    preemptions: int = 0
    resumed: list[int] = []
    changed: list[int] = []


class Delta(msgspec.Struct, kw_only=True):
    """What one step did for one request. The last delta has a finish_reason and an ending.

    tokens: the emitted tokens. error: why there will be no more; fault: the same, if the request is to blame.
    logprobs: one entry per emitted token, if requested. prompt_logprobs: one entry per prompt token (None for the
    first, which nothing precedes), if requested, once, with the first emitted token. queued: seconds waited in the
    queue. elapsed: seconds since the request arrived.
    origin: of the tokens, if there are any.
    """

    id: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    fault: Fault | None = None
    seed: int = 0
    cached_tokens: int = 0
    queued: float = 0.0
    elapsed: float = 0.0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    ending: RequestEnd | None = None
    origin: Origin | None = None

    @property
    def drafted(self) -> int:
        """Tree nodes below the root."""
        return len(self.origin.parents) - 1 if self.origin is not None else 0

    @property
    def accepted(self) -> int:
        """How many of them were accepted."""
        return len(self.origin.path) if self.origin is not None else 0


class Footprint(msgspec.Struct, frozen=True):
    """What an engine holds of a device, in bytes. capacity: the most that all engines there may hold together. device:
    its name ("cpu", "cuda:0")."""

    held: int
    capacity: int
    device: str


class EngineInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The running engine, for the banner, /health and reports.

    architecture: of the target, in transformers' words. parameters, weight_bytes: of the target; 0 if unknown.
    bits: the class of its bits (:mod:`foresay.server.engine.parameters`).
    quantization: of the target's weights, in words; "" for floats. activations: the type they are multiplied with,
    ``int8`` or ``model``; "" if unknown. memory: what the engine holds, by parts, in words; empty if unknown.
    footprint: the same in bytes, as planned. kv_dtype: of the target's KV cache. kv_token_bytes: bytes per token of
    that and the drafters' caches; 0 if unknown. layers, hidden_size, trained_length: of the target; the last is the
    context that it was trained for. root_seconds: a whole step of one sequence without drafts, as measured at start-up;
    0 if not measured. drafter: its name; draft: the same as a value of ``--draft``, with the source; drafters: each.
    chosen: whether drafter and amount are chosen at every step; then ``draft_shape`` is the maximum. kv_disk:
    how much KV is kept on disk, in words; "" if unknown. warnings: for the operator, a sentence each. identity: what
    its texts depend on, by part (:mod:`foresay.server.engine.handover`).
    """

    target: str
    drafter: str
    drafter_reason: str
    dtype: str
    dtype_reason: str
    device: str
    exact: bool
    exact_reason: str
    kv_tokens: int
    page_size: int
    max_model_len: int
    max_seqs: int
    draft_shape: tuple[int, ...]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    architecture: str = ""
    layers: int = 0
    hidden_size: int = 0
    trained_length: int = 0
    parameters: int = 0
    quantization: str = ""
    bits: str = ""
    activations: str = ""
    activations_reason: str = ""
    weight_bytes: int = 0
    memory: str = ""
    footprint: Footprint | None = None
    kv_dtype: str = ""
    kv_token_bytes: int = 0
    root_seconds: float = 0.0
    drafters: tuple[str, ...] = ()
    draft: str = ""
    chosen: bool = False
    kv_disk: str = ""
    warnings: tuple[str, ...] = ()
    identity: dict[str, str] = {}

    @property
    def fingerprint(self) -> str:
        """The identity in one word, which begins with the class of bits."""
        parts = "\n".join(f"{name}={value}" for name, value in sorted(self.identity.items()))
        return f"{self.bits.replace(' ', '') or 'bits'}_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    @property
    def family(self) -> str:
        """The architecture's GGUF name: ``llama`` for ``LlamaForCausalLM``; empty if unknown."""
        return self.architecture.removesuffix("ForCausalLM").lower()
