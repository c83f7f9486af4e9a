"""How much memory an engine will hold, and whether it fits the device; known before a weight is read.

::

    weights     target, draft model or head, in the engine's dtype; on a CPU in fp32, matrices in their files' 16 bits;
                quantised ones in theirs
    workspace   on a GPU: rotary tables and the tensors of a pass; and a reserve for its graphs
    recordings  on a CPU: logits and tensors of the largest passes
    states      of recurrent layers: of running texts, of checkpoints by which prefixes are reused; records
    KV cache    pages * page_size tokens, each as many numbers as all models together keep of it; but for sliding-window
                layers only the pages that running texts attend to, and as many again for texts that may continue

On a CPU the KV cache takes a share of the memory, which other programs use too. On a GPU it takes all that
``--gpu-memory-utilization`` leaves. Does not import torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foresay.server.engine.parameters import (
    Device,
    held_table_bytes,
    item_bytes,
    model_bytes,
    pinned,
    state_bytes,
    state_pages,
    table_bytes,
    token_bytes,
    wanted_rows,
)
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun
from foresay.server.settings.units import bytes_in_words, counted
from foresay.spec.request import Footprint
from foresay.spec.shape import MAX_CHUNK, MAX_NODES, WHOLE_CHAIN
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.layers import Attention
from foresay.verifier.model.mla import MLA

#: Share of the machine's memory that the KV cache takes if no size is given, and the most that everything may take
#: then.
_KV_SHARE = 0.25
_ALL_SHARE = 0.95
#: The largest share of a GPU that is suggested, and that several engines may hold together.
MOST_UTILIZATION = 0.98
#: Rows of a sequence with draft logits in a tree; and bytes that any recorded pass takes besides its rows.
_OPEN_ROWS, _ANY_PASS = 16, 4 << 20
#: Of attention on a CPU: rows of a unit of work, positions of a span, sums of spans at once.
_UNIT, _SPAN, _PARTS = 32, 256, 1024
#: Capacity in tokens of a KV cache whose size does not grow with the text.
_BOUNDLESS = 1 << 40
#: Tokens that the exactness probe at start-up needs: it reads two texts at once.
_PROBE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine will hold, in bytes.

    weights: by model. overhead: anything else except the KV cache, by name. tokens: of text that the KV cache holds.
    pages: of the pool, including room for drafts and padding. kv_bytes: of all pages. machine: the total available.
    token_bytes: of each further token, in the stores of all models together. window_pages: of the target's layers with
    a window, if fewer than the pool's; else 0. states: sequences of a pass that leave records, and state pages; None
    without recurrent layers. away: the target's layers whose experts stay in the host's memory; host: bytes of these,
    which are no part of anything above.
    mapped: of the target's table of embeddings that layers have of their own, if it stays in the files, or, hosted, in
    the host's memory.
    """

    weights: Mapping[str, int]
    tokens: int
    pages: int
    kv_bytes: int
    machine: int
    token_bytes: int
    overhead: Mapping[str, int] = field(default_factory=dict)
    window_pages: int = 0
    states: tuple[int, int] | None = None
    away: Sequence[int] = ()
    host: int = 0
    mapped: int = 0
    hosted: bool = False

    @property
    def total(self) -> int:
        """Everything: weights, KV cache and the rest."""
        return sum(self.weights.values()) + sum(self.overhead.values()) + self.kv_bytes

    @property
    def described(self) -> str:
        """Its parts, in words."""
        parts = listed({**self.weights, **self.overhead})
        found = f"{parts}, KV cache of {self.tokens:,} tokens {bytes_in_words(self.kv_bytes)}"
        if self.mapped:
            where = "the host's memory, as the GPU has no room for it" if self.hosted else "its file"
            found += f"; a table of embeddings per layer, {bytes_in_words(self.mapped)}, is read in {where}"
        if self.away:
            layers, size = counted(len(self.away), "layer"), bytes_in_words(self.host)
            found += f"; experts of {layers}, {size}, stay in the host's memory, as the GPU has no room for them"
        return found


class DrafterShapes(Protocol):
    """What the memory plan needs of a drafter; :class:`foresay.server.engine.drafters.entry.Entry` implements it."""

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """The models that it runs."""

    def with_states(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """Those of them that keep recurrent states of their own, if they have such layers."""

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """Bytes that it keeps for each token of the KV cache."""

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        """Bytes of its weights, by model."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the models need, for any size of the KV cache.

    weights: bytes by model. per_token: bytes that all models together keep for a token. scratch: tokens of room for
    drafts. page_size: tokens of a page. dtype: of weights and KV cache. recordings: bytes of a CPU's. per_seen: what
    the target's layers with a window keep for a token in addition, in ``most_seen`` pages at most. states: see
    :class:`MemoryPlan`. state_bytes: of those and the draft models' states. mapped: see there too.
    """

    weights: Mapping[str, int]
    per_token: int
    scratch: int
    page_size: int
    dtype: str
    recordings: int = 0
    per_seen: int = 0
    most_seen: int = 0
    states: tuple[int, int] | None = None
    state_bytes: int = 0
    mapped: int = 0

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        dtype: str,
        target: ModelConfig,
        drafters: Sequence[DrafterShapes],
        packed: bool = True,
        chunk: int = MAX_CHUNK,
    ) -> Demand:
        """packed: as on a CPU, where an output head tied to the embedding is a separate copy. chunk: most prefill rows
        in one step.

        Raises a loader's error for a drafter that cannot be read.
        """
        drafted = sum(drafter.token_bytes(target, dtype) for drafter in drafters)
        scratch = config.max_seqs * (MAX_NODES + config.page_size)
        weights = Counter({"target": model_bytes(target, dtype, packed)})
        for drafter in drafters:
            weights.update(drafter.weights(dtype, packed))  # adds: a chain may have one of a kind that is asked for too
        everywhere, seen = (token_bytes(target, dtype, config.kv_dtype, windowed) for windowed in (False, True))
        recordings = recorded_bytes(config, target, drafters, dtype) if packed else 0
        most_seen = _window_pages(config, target.sliding_window, chunk) if seen and target.sliding_window else 0
        models = [target, *(model for drafter in drafters for model in drafter.with_states(target))]
        return cls(
            weights, everywhere + drafted, scratch, config.page_size, dtype, recordings, seen, most_seen,
            None if target.stack.recurrence is None else state_pages(config, not packed),
            sum(state_bytes(model, *state_pages(config, not packed)) for model in models),
            0 if held_table_bytes(target, dtype, packed) else table_bytes(target, target.dtype),
        )  # fmt: skip

    def pages(self, tokens: int) -> int:
        """The pages of a pool that holds this many tokens of text."""
        return 1 + -(-(max(tokens, _PROBE_TOKENS) + self.scratch) // self.page_size)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV cache for this many tokens of text."""
        pages = self.pages(tokens)
        return self.page_size * (pages * self.per_token + min(pages, self.most_seen) * self.per_seen)

    def tokens(self, count: int) -> int:
        """The most tokens of text whose KV cache takes at most ``count`` bytes; negative if not even the scratch room
        fits."""
        return (self.held(count) // self.page_size - 1) * self.page_size - self.scratch

    def held(self, count: float) -> int:
        """How many tokens ``count`` bytes hold, including the scratch room for drafts."""
        whole, seen = int(count // (self.per_token + self.per_seen)), self.most_seen * self.page_size
        if not self.per_seen or whole <= seen:
            return whole
        return int((count - seen * self.per_seen) // self.per_token) if self.per_token else _BOUNDLESS

    def plan(self, tokens: int, machine: int, overhead: Mapping[str, int]) -> MemoryPlan:
        """The plan with a KV cache of ``tokens`` tokens. machine, overhead: see :class:`MemoryPlan`."""
        pages = self.pages(tokens)
        fewer = self.most_seen if self.most_seen < pages else 0
        further = self.per_token + (0 if fewer else self.per_seen)
        return MemoryPlan(
            self.weights, tokens, pages, self.kv_bytes(tokens), machine, further, overhead, fewer, self.states,
            mapped=self.mapped,
        )  # fmt: skip


def _window_pages(config: EngineConfig, window: int, chunk: int) -> int:
    """A sufficient number of pages for layers with a window: for each running text what its next row sees and what
    steps may write ahead; the same for texts that may continue; and a prefill chunk."""
    size = config.page_size
    each = -(-(window + 4 * MAX_NODES) // size) + 2
    return 2 * config.max_seqs * each + -(-chunk // size) + 2


def plan_cpu(config: EngineConfig, length: int, demand: Demand, machine: int) -> MemoryPlan:
    """Room for all sequences at full length, within a share of the memory. machine: its bytes."""
    weights, alone = demand.weights, sum(demand.weights.values())
    if alone > machine:
        raise CannotRun(
            _too_much("the weights alone", alone, weights, machine), _smaller_weights(demand.dtype, config.quantize)
        )
    others = {"recordings": demand.recordings}
    if demand.state_bytes:
        others["recurrent states"] = demand.state_bytes
    overhead = alone + sum(others.values())
    affordable = demand.held(min(machine * _KV_SHARE, machine * _ALL_SHARE - overhead))
    tokens = config.kv_tokens or min(config.max_seqs * length, max(affordable, 0))
    if tokens < length:
        raise CannotRun(
            f"the KV cache holds {tokens} tokens, fewer than max_model_len ({length})", "lower --max-model-len"
        )
    kv_bytes = demand.kv_bytes(tokens)
    if overhead + kv_bytes > machine:
        taken = {**weights, **others, f"KV cache of {tokens:,} tokens": kv_bytes}
        smaller = f"--kv-tokens {affordable} fits" if affordable >= length else "lower --max-model-len and --kv-tokens"
        raise CannotRun(_too_much("the engine", overhead + kv_bytes, taken, machine), smaller)
    return demand.plan(tokens, machine, others)


def recorded_bytes(config: EngineConfig, target: ModelConfig, drafters: Sequence[DrafterShapes], dtype: str) -> int:
    """Bytes of a CPU's recordings once all are made: for each model the rows of its largest pass, with logits for tree
    nodes; and for each draft model the logits of its levels, for 1, 2, 4 .. sequences, twice: for fixed trees, and for
    those that end early; and its passes and the target's in the steps that are recorded whole."""
    shape, rows = pinned(config), wanted_rows(config)
    padded = 1 << (config.max_seqs - 1).bit_length()  # to the next power of two
    level_rows = 4 * padded * (_OPEN_ROWS if shape is None else shape.nodes)
    drafting = [model for drafter in drafters for model in drafter.shapes(target)]
    passes = _pass_bytes(target, dtype, MAX_CHUNK + rows, rows)
    passes += sum(_pass_bytes(model, dtype, MAX_CHUNK, config.max_seqs) for model in drafting)
    made = 2 * config.max_seqs.bit_length() * _ANY_PASS
    steps, most = (WHOLE_CHAIN, WHOLE_CHAIN + 1) if shape is None else (int(shape.is_chain), shape.nodes)
    whole = [steps * (_pass_bytes(target, dtype, most, most) + _pass_bytes(one, dtype, most, most)) for one in drafting]
    return passes + sum(whole) + sum(4 * level_rows * model.vocab_size + made for model in drafting)


def _pass_bytes(model: ModelConfig, dtype: str, rows: int, wanted: int) -> int:
    """Bytes of a recorded pass: activations, of which recurrent layers', experts' sums and logits are fp32. dtype: of
    the others. wanted: rows with logits."""
    heads = max(((3 * one.heads + 2 * one.kv_heads) * one.head_dim for one in model.stack.attentions), default=0)
    widths = 4 * model.hidden_size + heads + 3 * model.intermediate_size
    wide = 0 if (found := model.stack.recurrence) is None else 4 * (found.record or found.channels)
    if (mixture := model.stack.experts) is not None:  # a row is copied for each of its experts
        widths += mixture.top_k * (model.hidden_size + mixture.inner)
        wide += (mixture.top_k + 1) * model.hidden_size
    if (own := model.stack.embedding) is not None:
        widths += 2 * own.width * model.num_layers
    attention = max(map(_of_attention, model.stack.attentions), default=0)
    return item_bytes(dtype) * rows * widths + 4 * (wanted * model.vocab_size + rows * wide + attention) + _ANY_PASS


def _of_attention(node: Attention) -> int:
    """fp32 numbers for the sums of spans, and, of each thread, for inputs and sums: they grow with heads and their
    width (:mod:`foresay.verifier.ops.kernels.cpu.work_items`)."""
    sums = node.heads * ((node.kv_lora_rank if isinstance(node, MLA) else node.head_dim) + 16)
    inputs = _UNIT * node.heads * (node.head_dim + _SPAN) + (_UNIT + _SPAN * node.kv_heads) * node.head_dim
    return _PARTS * sums + max(os.cpu_count() or 1, 4) * (inputs + 2 * _UNIT * sums)


class NoRoom(CannotRun):
    """An engine fits the device, but not alongside those already loaded."""

    def __init__(self, fault: str, hint: str, footprint: Footprint) -> None:
        super().__init__(fault, hint)
        self.footprint = footprint


def footprint(memory: MemoryPlan, device: Device) -> Footprint:
    """What the plan holds of the device, for fitting several engines on it."""
    share = MOST_UTILIZATION if device.is_gpu else _ALL_SHARE
    return Footprint(memory.total, int(share * device.total), device.name)


def check_others(own: Footprint, others: int) -> None:
    """Raise :class:`NoRoom` if an engine does not fit alongside others that hold ``others`` bytes of its device."""
    if own.held + others > own.capacity:
        fault = f"the engine would take {bytes_in_words(own.held)} beside the {bytes_in_words(others)} of others"
        raise NoRoom(fault, f"all together may hold {bytes_in_words(own.capacity)} of {own.device}", own)


def fitting_flags(flags: Sequence[str]) -> str:
    """Flags, in words. flags: at least one; each of them suffices."""
    if len(flags) == 1:
        return f"{flags[0]} fits"
    return "any one of these fits: " + "; ".join(flags)


def listed(parts: Mapping[str, int]) -> str:
    """Parts and their bytes, for people."""
    return ", ".join(f"{name} {bytes_in_words(count)}" for name, count in parts.items())


def _too_much(what: str, total: int, parts: Mapping[str, int], machine: int) -> str:
    return (
        f"{what} would take {bytes_in_words(total)} ({listed(parts)}), but this machine has {bytes_in_words(machine)}"
    )


def _smaller_weights(dtype: str, quantize: str | None) -> str:
    halved = "load them with --dtype bfloat16, " if dtype == "float32" else ""
    smaller = "" if quantize == "int4" else "make them smaller with --quantize int4, "
    return f"{halved}{smaller}or name a smaller model" if halved or smaller else "name a smaller model"
