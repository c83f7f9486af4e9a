"""The memory plan on a GPU: the engine's share minus models and workspace is KV cache.

::

    total   |<------- --gpu-memory-utilization of it, or what is free if that is less ------->|
            | target | draft model or head | workspace | graphs | KV cache: what is left      |

The workspace, what a pass takes besides weights and KV, is computed from its tensors' shapes. Layers run one after the
other, so the largest tensor of each kind is counted once. The kernels' own functions say how they split their work.

Legend: H hidden width, Q query heads, G kv heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import msgspec

from foresay.drafters.proposer import MOST_FOUND, MOST_NODES
from foresay.server.engine.memory import MOST_UTILIZATION, Demand, DrafterShapes, MemoryPlan, fitting_flags, listed
from foresay.server.engine.parameters import (
    Device,
    expert_bytes,
    free_bytes,
    item_bytes,
    machine_bytes,
    pinned,
    table_bytes,
)
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun
from foresay.server.settings.units import bytes_in_words, counted
from foresay.spec.tree import MAX_NODES
from foresay.verifier.graphs.buckets import LONG, chunks, drafted_rows, passes, sizes
from foresay.verifier.model.config import ModelConfig, matrices, products
from foresay.verifier.model.layers import Attention
from foresay.verifier.model.mla import MLA
from foresay.verifier.model.products import DOWN, GATE_UP, OUTPUT, QKV, SHARED_DOWN, SHARED_GATE_UP
from foresay.verifier.ops.kernels.blocked import LEAST_BLOCK, segments_of
from foresay.verifier.ops.kernels.key_blocks import WIDEST, columns_of
from foresay.verifier.ops.kernels.tree_attention import most_partials

#: Default share of the memory for the engine.
UTILIZATION = 0.9
#: Reserve for captured graphs in addition to their tensors: an estimate, not measured yet.
GRAPH_RESERVE = 1 << 29
#: Compute capabilities whose multiprocessors have at most 99 KiB of shared memory for a program.
_LITTLE_SHARED = ((7, 0), (7, 2), (7, 5), (8, 6), (8, 9), (12, 0), (12, 1))
#: Share of the host's free memory that may be page-locked: what is locked is never swapped, and the page cache, the KV
#: that is kept on disk and other programs need the rest.
_HOST_SHARE = 0.75
#: Default maximum of KV tokens, unless sequences or flags need more: the host keeps records of all pages.
_MOST_TOKENS = 1 << 22
#: Shorter contexts are not suggested.
_LEAST_CONTEXT = 512


def plan_gpu(
    config: EngineConfig,
    length: int,
    dtype: str,
    target: ModelConfig,
    drafters: Sequence[DrafterShapes],
    device: Device,
) -> MemoryPlan:
    """As :func:`foresay.server.engine.build.plan`. Raises CannotRun for models without GPU kernels and for what does
    not fit, naming the flags that would make it fit."""
    for model in (target, *(model for drafter in drafters for model in drafter.shapes(target))):
        if device.capability in _LITTLE_SHARED and any(map(_is_wide, model.stack.attentions)):
            what = "latents" if any(isinstance(one, MLA) for one in model.stack.attentions) else "wide heads"
            fault = f"{device}: a block of {what} ({model.architecture}) does not fit its multiprocessors"
            raise CannotRun(fault, "--device cpu runs them")
    case, host = _Case(config, length, dtype, target, tuple(drafters), device), _lockable()
    if not case.fits and 0 < case.table <= host and (hosted := replace(case, hosted=True)).fits:
        case = hosted
    if not case.fits:
        spilled = _spilled(case)
        if spilled is None or spilled.locked + spilled.largest > host:
            lacking = "" if spilled is None else _lacking(spilled, host)
            hints = list(_hints(case))
            raise CannotRun(_fault(case) + lacking, fitting_flags(hints) if hints else "name a smaller model")
        case = spilled
    tokens = config.kv_tokens or min(case.tokens, max(config.max_seqs * length, _MOST_TOKENS))
    found = case.demand.plan(tokens, device.total, case.overhead)
    found = replace(found, mapped=case.table, hosted=True) if case.hosted else found
    return replace(found, away=case.away, host=case.locked) if case.away else found


def _lockable() -> int:
    """Bytes of the host's memory that may be page-locked."""
    return int(_HOST_SHARE * min(machine_bytes(), free_bytes() or machine_bytes()))


def _is_wide(node: Attention) -> bool:
    """Whether the kernels have larger blocks of its keys and values."""
    return isinstance(node, MLA) or node.head_dim > WIDEST


def _spilled(case: _Case) -> _Case | None:
    """The case with the experts of as few layers as necessary in the host's memory; None if that does not help."""
    numbers = tuple(expert_bytes(case.target, case.dtype))
    tried = [replace(case, away=numbers[:count]) for count in range(1, len(numbers) + 1)]
    first = bisect.bisect_left(tried, True, key=lambda one: one.fits and one.loads)
    return tried[first] if first < len(tried) else None


def _lacking(case: _Case, host: int) -> str:
    """host: bytes that may be locked."""
    needed, layers = bytes_in_words(case.locked + case.largest), counted(len(case.away), "layer")
    return f"; to keep experts of {layers} in the host's memory takes {needed} of it, and {bytes_in_words(host)} may be"


@dataclass(frozen=True)
class _Case:
    """One configuration of the engine on one device, as :func:`plan_gpu` takes it."""

    config: EngineConfig
    length: int
    dtype: str
    target: ModelConfig
    drafters: tuple[DrafterShapes, ...]
    device: Device
    away: tuple[int, ...] = ()  # layers of the target whose experts stay in the host's memory
    hosted: bool = False  # whether its table of embeddings per layer does

    @property
    def table(self) -> int:
        """Bytes of that."""
        return table_bytes(self.target, self.dtype)

    @property
    def locked(self) -> int:
        """Bytes of these."""
        found = expert_bytes(self.target, self.dtype)
        return sum(found[number] for number in self.away)

    @property
    def largest(self) -> int:
        """Bytes of one layer's experts, which are there twice while they are laid out."""
        return max(expert_bytes(self.target, self.dtype).values())

    @property
    def loads(self) -> bool:
        """Whether the layers that stay on the device can be laid out there."""
        return self.budget - sum(self.demand.weights.values()) >= self.largest + GRAPH_RESERVE

    @property
    def utilization(self) -> float:
        """The engine's share of the device's memory."""
        return UTILIZATION if self.config.gpu_memory_utilization is None else self.config.gpu_memory_utilization

    @property
    def budget(self) -> int:
        """Bytes that the engine may hold."""
        share, free = int(self.utilization * self.device.total), self.device.free
        return share if free is None else min(share, free)

    @property
    def least(self) -> int:
        """Tokens that the KV cache must have room for."""
        return max(self.length, self.config.kv_tokens or 0)

    @cached_property
    def demand(self) -> Demand:
        """What the models need."""
        demand = Demand.of(self.config, self.dtype, self.target, self.drafters, False, self.device.chunk)
        if self.away or self.hosted:
            left = demand.weights["target"] - (self.locked if self.away else 0) - (self.table if self.hosted else 0)
            demand = replace(demand, weights={**demand.weights, "target": left})
        return demand

    @cached_property
    def tokens(self) -> int:
        """Tokens of text that the KV cache has room for beside the models; negative if there is none."""
        return self.demand.tokens(self.budget - sum(self.demand.weights.values()) - sum(self.overhead.values()))

    def needed(self, tokens: int) -> int:
        """Total bytes, with a KV cache of ``tokens`` tokens."""
        return sum(self.demand.weights.values()) + sum(self.overhead.values()) + self.demand.kv_bytes(tokens)

    @property
    def fits(self) -> bool:
        """Whether the required KV cache fits."""
        return self.tokens >= self.least

    @cached_property
    def overhead(self) -> dict[str, int]:
        """Bytes other than weights and KV cache, by name. Models take turns, so the largest pass counts; all rotary
        tables stay."""
        shapes = [self.target, *(shape for drafter in self.drafters for shape in drafter.shapes(self.target))]
        positions, trees = self.length + MAX_NODES, self.config.max_seqs * MAX_NODES
        largest = max(
            workspace_bytes(shape, item_bytes(self.dtype), positions, self.device.chunk + trees, trees)
            for shape in shapes
        )
        workspace = largest + sum(rope_bytes(shape, item_bytes(self.dtype), positions) for shape in shapes)
        graphs = {"graphs": self._graphs(shapes)} if self.config.graphs else {}
        states = {"recurrent states": self.demand.state_bytes} if self.demand.state_bytes else {}
        return {"workspace": workspace} | graphs | states

    def _graphs(self, shapes: Sequence[ModelConfig]) -> int:
        """Tensors held by captured graphs: a workspace of the largest, and logits that the host reads."""
        shape, seqs = pinned(self.config), self.config.max_seqs
        planned = MOST_NODES if self.drafters else MOST_FOUND
        nodes = 1 if self.config.draft == "none" else planned if shape is None else shape.nodes
        positions, item, page_size = self.length + MAX_NODES, item_bytes(self.dtype), self.config.page_size
        rows = {at: drafted_rows(max(sizes(seqs)), nodes, at) for at in (positions, min(positions, LONG))}
        kept = max(rows.values()) if self.drafters else MAX_NODES  # where steps stop: none with found nodes alone does
        prompts = chunks(seqs, min(self.device.chunk, self.length), positions, page_size)
        kept += sum(each.logits for each in (*passes(seqs, positions, page_size), *prompts))
        logits = kept * self.target.vocab_size * 4
        most, decoding = max((each.text_rows for each in prompts), default=0), rows[positions] if seqs > 1 else 0
        stretch = workspace_bytes(self.target, item, positions, most + decoding, decoding)
        stretch -= 4 * most * self.target.vocab_size
        steps = [(item, at, count, count) for at, count in rows.items()]
        workspace = max(workspace_bytes(shape, *step) for shape in shapes for step in steps)
        return GRAPH_RESERVE + logits + max(workspace, stretch)

    def changed(self, **settings: object) -> _Case:
        """The same with other settings."""
        return replace(self, config=msgspec.structs.replace(self.config, **settings))

    def cut(self, length: int) -> _Case:
        """The same for texts of at most ``length`` tokens, with the smallest possible KV cache."""
        shorter = replace(self, length=length)
        return shorter.changed(kv_tokens=None)


def _fault(case: _Case) -> str:
    """What would be needed, and what is available."""
    needed = case.needed(case.least)
    parts = {**case.demand.weights, **case.overhead}
    parts[f"KV cache of {case.least:,} tokens"] = case.demand.kv_bytes(case.least)
    total, share = bytes_in_words(case.device.total), f"--gpu-memory-utilization {case.utilization:g}"
    limit = f"{share} of its {total} is {bytes_in_words(case.budget)}"
    if case.device.free is not None and case.budget == case.device.free:
        limit = f"only {bytes_in_words(case.budget)} of its {total} are free"
    return f"the engine would take {bytes_in_words(needed)} of {case.device} ({listed(parts)}), but {limit}"


def _hints(case: _Case) -> Iterator[str]:
    """Flags that would make it fit; each was tried in the plan."""
    if case.tokens >= case.length:
        yield f"--kv-tokens {case.tokens}"
    elif shorter := _shorter(case):
        yield shorter
    enough = math.ceil(100 * case.needed(case.least) / case.device.total) / 100
    if enough <= MOST_UTILIZATION and case.changed(gpu_memory_utilization=enough).fits:
        yield f"--gpu-memory-utilization {enough:g}"
    if case.dtype == "float32":
        half = replace(case, dtype="bfloat16" if case.device.has_bf16 else "float16")
        if half.fits:
            yield f"--dtype {half.dtype}"
        elif shorter := _shorter(half):
            yield f"--dtype {half.dtype} {shorter}"
    if case.config.kv_dtype == "auto" and case.changed(kv_dtype="int8").fits:
        yield "--kv-dtype int8"
    if case.config.graphs and case.changed(graphs=False).fits:
        yield "--no-graphs"
    if case.drafters and replace(case, drafters=()).fits:
        yield "--draft none"


def _shorter(case: _Case) -> str | None:
    """The flags for the longest texts that fit; None if even short ones do not."""
    lengths = range(_LEAST_CONTEXT, case.length)
    fitting = bisect.bisect_left(lengths, True, key=lambda length: not case.cut(length).fits)
    if not fitting:
        return None
    length = lengths[fitting - 1]
    return f"--max-model-len {length}" + ("" if case.config.kv_tokens is None else f" --kv-tokens {length}")


def workspace_bytes(model: ModelConfig, item: int, positions: int, rows: int, tree_rows: int) -> int:
    """Bytes of the tensors of the largest pass.

    item: bytes of a weight. positions: slots of the longest page table. rows: most rows of a pass, any of which may
    need logits. tree_rows: those that are tree nodes, whose attention is split.
    """
    return (
        rows * _row_numbers(model) * item
        + 4 * rows * model.vocab_size  # logits
        + 4 * rows * (_linear_partials(model) + _recurrent_numbers(model) + _mixed_numbers(model))
        + 4 * max(_attended(each, tree_rows, positions) for each in model.stack.attentions)
    )


def _attended(node: Attention, rows: int, positions: int) -> int:
    """fp32 numbers of the partials of rows' attention: sums, and for each part of them maximum score and sum of
    weights."""
    value = node.kv_lora_rank if isinstance(node, MLA) else node.head_dim
    parts = -(-value // columns_of(node.head_dim, value))
    return most_partials(rows, node.heads, node.kv_heads, positions) * (value + 2 * parts)


def _absorbed(node: Attention) -> int:
    """Further numbers of one row over latents: its latent and what is beside it, narrower input and its norm, queries
    before, through and after the heads' matrices, and output before them."""
    if not isinstance(node, MLA):
        return 0
    of_head = node.nope_dim + 2 * node.rotary_dim + 3 * node.kv_lora_rank
    return node.head_dim + 2 * (node.q_lora_rank or 0) + node.heads * of_head


def _recurrent_numbers(model: ModelConfig) -> int:
    """fp32 numbers of one row in a recurrent layer: before and after the convolution, gates, rates, output."""
    found = model.stack.recurrence
    return 0 if found is None else 3 * found.channels + 2 * found.value_heads * (found.value_dim + 2)


def _mixed_numbers(model: ModelConfig) -> int:
    """Numbers of 4 bytes of one row in a mixture: logits; of each chosen expert its number, weight, output, and places,
    of which a tile has 64; the shared expert's output."""
    found = model.stack.experts
    if found is None:
        return 0
    return found.count + found.top_k * (model.hidden_size + 3 + 64) + model.hidden_size


def rope_bytes(model: ModelConfig, item: int, positions: int) -> int:
    """Bytes of the cosines and sines of ``positions`` positions, in the model's dtype."""
    tables = {(one.rope, one.rotary_dim) for one in model.stack.attentions if one.rope is not None}
    return 2 * item * positions * sum(width for _, width in tables)


@lru_cache(maxsize=16)  # a plan is searched for: it is requested for many lengths
def _row_numbers(model: ModelConfig) -> int:
    """Activations of one row: residual stream, its sum and norm; qkv, rotated queries, attention output; gate, up and
    their product, of each chosen expert and of the shared one; inputs of all layers; norms of experts beside an MLP."""
    made, read = Counter[str](), Counter[str]()
    for _, product in products(model):
        times = product.top_k or 1
        made |= Counter({product.name: product.outer // (product.experts or 1) * times})
        read |= Counter({product.name: product.inner * times})
    inner = made[GATE_UP] + made[SHARED_GATE_UP] + read[DOWN] + read[SHARED_DOWN]
    latents = max(map(_absorbed, model.stack.attentions))
    own, beside = model.stack.embedding, 2 * model.hidden_size if any(one.experts for one in model.stack.layers) else 0
    inputs = 0 if own is None else 2 * own.width * model.num_layers
    return 3 * model.hidden_size + made[QKV] + 2 * read[OUTPUT] + inner + latents + inputs + beside


@lru_cache(maxsize=16)
def _linear_partials(model: ModelConfig) -> int:
    """fp32 partial sums of one row in the widest split-K product, which experts' are not; 0 if none is split. Counted
    with the smallest blocks, which give the most segments.
    """
    shapes = {(product.outer, product.inner) for _, product in products(model) if not product.experts}
    shapes |= {(outer, inner) for name, inner, outer in matrices(model) if "layers" not in name}
    if (found := model.stack.experts) is not None:
        shapes |= {(found.count, model.hidden_size)}  # a router's
    cut = [(segments_of(outer, -(-inner // LEAST_BLOCK), LEAST_BLOCK)[0], outer) for outer, inner in shapes]
    return max(segments * outer if segments > 1 else 0 for segments, outer in cut)
