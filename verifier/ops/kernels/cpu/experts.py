"""Sorting rows by their experts (:mod:`foresay.verifier.ops.experts`): one thread counts and places them, in their
order, and all threads copy them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.experts import places_of
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled, arena, counted
from foresay.verifier.ops.kernels.cpu.values import I32, I64
from foresay.verifier.ops.records import READING, SPANS, TILE, ExpertRows, Routing


def sort_rows(x: Tensor, chosen: Tensor, how: Routing, count: Tensor | None = None) -> tuple[Tensor, ExpertRows]:
    """As :func:`foresay.verifier.ops.experts.sort_rows`."""
    (rows, width), most = x.shape, min(how.experts, chosen.numel())
    copies, places = arena((places_of(rows, how), width), x.dtype), arena(tuple(chosen.shape), torch.int32)
    spans, count = arena((SPANS + 4 * most,), torch.int64), counted(count, rows)
    _sorting(how.experts, how.top_k)(chosen, places, spans, count)
    _copying(x.dtype.itemsize, how.top_k)(x, places, copies, count, width)
    return copies, ExpertRows(places, spans)


@Compiled
def _sorting(experts: int, each: int) -> Kernel:
    """Arguments: chosen, places, spans, count."""
    k = Kernel("sort_rows")
    chosen, places, spans = (k.pointer(index) for index in range(3))
    after = k.array(I64, experts)
    with k.when(k.thread.equals(0)):
        numbers = k.counted(3) * each
        with k.loop(0, experts) as expert:
            k.store(k.constant(0), after, expert)
        with k.loop(0, numbers) as number:
            expert = k.load(chosen, I32, number)
            k.store(k.load(after, I64, k.integer(expert, I64)) + 1, after, k.integer(expert, I64))
        known, cost, end = (k.variable(k.constant(0)) for _ in range(3))
        with k.loop(0, experts) as expert:
            rows, first = k.load(after, I64, expert), end.value
            with k.when(rows > 0):
                for at, value in enumerate((expert, first, first + rows, cost.value)):
                    k.store(value, spans, known.value * 4 + (SPANS + at))
                k.store(first, after, expert)
                known.value, cost.value = known.value + 1, cost.value + rows + READING
                end.value = (first + rows + (TILE - 1)) // TILE * TILE
        for at, total in enumerate((known, cost, end)):
            k.store(total.value, spans, at)
        with k.loop(0, numbers) as number:
            expert = k.integer(k.load(chosen, I32, number), I64)
            place = k.load(after, I64, expert)
            k.store(k.integer(place, I32), places, number)
            k.store(place + 1, after, expert)
    return k


@Compiled
def _copying(item: int, each: int) -> Kernel:
    """Arguments: rows, places, copies, count, width."""
    k = Kernel("copy_rows")
    x, places, copies, size = *(k.pointer(index) for index in range(3)), k.number(4) * item
    with k.share(k.counted(3) * each) as number:
        place = k.integer(k.load(places, I32, number), I64)
        k.copy(k.bytes_at(x, number // each * size), k.bytes_at(copies, place * size), size)
    return k
