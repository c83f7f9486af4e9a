"""Kernels over bandwidth, with the weights and the store of a whole model in turns, so that none is in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from bench.engines import Bench
from bench.gpu.drafting import Ground, rows_proposer
from bench.gpu.steps import bench_of, read
from bench.gpu.worker import Task
from bench.shapes import kv_bytes_per_token
from foresay.verifier.graphs.rows import Nodes, rows_of
from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.attention import tree_attention
from foresay.verifier.ops.kernels import pdl
from foresay.verifier.ops.linear import finish

#: Largest relative error of a product in bf16: rounding, with room, far below any wrong index.
WRONG = 1e-2


def matrices(bench: Bench, kind: str) -> list[Linear]:
    """The matrices of a kind, of all layers, each by itself: it prefetches no other's weight."""
    decoder = bench.target.decoder
    those = [decoder.head] if kind == "head" else [getattr(layer, kind) for layer in decoder.layers]
    return [Linear(each._packed.plain(), None, each.dtype, each._packed.gated) for each in those]


def kernels(task: Task) -> None:
    """Products next to the library's; attention by rows and context."""
    bench, (few, *_, many) = bench_of(task, "8B", random=True), task.settings.rows
    for kind in ("qkv", "output", "gate_up", "down", "head"):
        those = matrices(bench, kind)
        for rows in (few, many):
            x = torch.randn(rows, those[0].in_features, device=task.device.torch).to(task.device.dtype)
            error = task.take("error of a product", "", error_of, those[0], x, of=kind, rows=rows)
            task.check("a product is right", error is not None and error < WRONG, of=kind, rows=rows)
            task.take("product", "s", product, task, those, x, of=kind, rows=rows)
    first, *longer = task.settings.contexts
    for rows, context in ((few, first), (many, first), *((few, context) for context in longer)):
        task.take("attention", "s", attention, task, bench, rows, context, rows=rows, context=context)


def each(task: Task, calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of one of these, run one after the other in one launch."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return float(task.device.median(task.device.captured(all_of_them), task.settings.patience / 3)) / len(calls)


def product(task: Task, those: Sequence[Linear], x: Tensor) -> dict[str, Any]:
    """Ours and the library's product of the same weights, neither with a prefetch; and ours with it."""
    ours = [partial(one.split_k, x) for one in those]
    with patch.object(pdl, "PDL", False):
        taken = each(task, ours)
    theirs = each(task, [partial(functional.linear, x, one._packed.plain()) for one in those])
    share, ahead = those[0].nbytes / taken / read(task), each(task, ours)
    return {"value": taken, "share": share, "library": theirs, "over_library": taken / theirs, "asked_ahead": ahead}


def error_of(matrix: Linear, x: Tensor) -> float:
    """||found - wanted|| / ||wanted|| of its product, including the gate."""
    made, packed = matrix.split_k(x), matrix._packed
    found = made if isinstance(made, Tensor) else finish(made, x.dtype, packed.gated)
    wanted = torch.cat([functional.linear(x.double(), part.double()) for part in packed.plain().split(16384)], dim=-1)
    if packed.gated:
        gate, up = wanted.chunk(2, dim=-1)
        wanted = functional.silu(gate) * up
    return float((found.double() - wanted).norm() / wanted.norm())


@torch.inference_mode()
def attention(task: Task, bench: Bench, rows: int, context: int) -> dict[str, Any]:
    """Over all layers' keys and values; its tables are as wide as a server's."""
    target, where, config = bench.target, task.device.torch, bench.target.decoder.config
    proposer = rows_proposer(rows, where)
    ground = Ground(target, proposer, context)
    ground.reset()
    tree, numbers = (proposer.propose(ground.state), torch.arange(rows, device=where)[None].contiguous())
    static = rows_of(ground.state, Nodes(tree.tokens, numbers, tree.ancestors, tree.depths))
    query = torch.randn(rows, config.num_heads, config.head_dim, device=where).to(task.device.dtype)
    given = static.groups[0].metadata, config.first.attention.scale, None, 0, static.count
    stores = [target.store.layer(layer) for layer in range(config.num_layers)]
    calls = [partial(tree_attention, query, keys, values, *given, scales) for keys, values, scales in stores]
    taken = each(task, calls)
    moved = (context + rows) * kv_bytes_per_token(config, task.device.dtype.itemsize) / config.num_layers
    return {"value": taken, "share": moved / taken / read(task)}
