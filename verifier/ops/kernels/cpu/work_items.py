"""Positions and slots of a pass's rows and keys, computed once, and the division of attention into units of work.

::

    slots    of every position of each sequence; and of each row of a tree the slots of its path
    units    up to 32 rows of one sequence, and spans of 256 positions that they attend to: all of them, or one each if
             a pass has few rows, so that there is work for all threads

How rows are grouped and spans divided does not affect the bits (:mod:`~foresay.verifier.ops.kernels.cpu.attention`).

Legend: S sequences, R rows, P pages of a table, N positions of a sequence, D head dim.

Each span gives a part of a query's attention, and parts are folded into each other::

    [0, D)    the weighted values, added up; filled up to vectors
    top       the largest score: weights are e to the power of what a score is below it
    total     the sum of the weights, lane by lane over blocks of 16 positions, then over the lanes
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu import launch
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import F32, I1, I32, I64, LANES, Value, vector
from foresay.verifier.ops.records import AttentionMetadata, AttentionPlan

#: The most nodes of a tree, and how many numbers describe a row: its sequence, leading positions of that, nodes of its
#: path.
NODES, INFO = 64, 3
#: The most rows of a unit, positions of a span, and how many numbers describe a unit: see :class:`AttentionPlan`.
ROWS, SPAN, UNIT = 32, 256, 7
#: The most rows of a pass whose spans are divided, and the room for parts of each of their rows in each span.
_FEW, PARTS = 64, 1024


def plan_attention(paged: AttentionMetadata, rows: int, count: Tensor) -> AttentionPlan:
    """rows: the capacity. count: int64[1], the actual number; rows after the last sequence's are padding."""
    sequences, pages = paged.tables.shape
    shapes = ((sequences, pages * paged.page_size), (rows, INFO), (rows, NODES), (rows + PARTS, UNIT))
    positions, own, number = (launch.arena((size,), torch.int64) for size in (rows, rows, 1))
    slots, info, paths, units = (launch.arena(shape, torch.int32) for shape in shapes)
    plan = AttentionPlan(positions, own, slots, info, paths, units, number)
    all_texts = paged.words is None
    _planner(paged.page_size, all_texts, paged.is_prefill is not None)(
        paged.tables, paged.lengths, paged.offsets, 0 if paged.is_prefill is None else paged.is_prefill,
        0 if paged.words is None else paged.words, launch.counted(paged.sequences, sequences), pages, count,
        plan.positions, plan.row_slots, plan.slots, plan.slots.shape[1], plan.info, plan.paths,
        plan.work_items, plan.num_items,
    )  # fmt: skip
    return plan


@Compiled
def _planner(page_size: int, all_texts: bool, some_texts: bool) -> Kernel:
    """Arguments: tables, lengths, offsets, texts, words, sequences, pages, count, those of :class:`AttentionPlan`."""
    return _Planner(Kernel("plan_attention"), page_size, all_texts, some_texts).write()


class _Planner:
    def __init__(self, k: Kernel, page_size: int, all_texts: bool, some_texts: bool) -> None:
        self.k, self.page_size, self.all_texts, self.some_texts = k, page_size, all_texts, some_texts
        self.tables, self.lengths, self.offsets, self.texts, self.words = (k.pointer(index) for index in range(5))
        self.sequences, self.pages, self.count = k.counted(5), k.number(6), k.counted(7)
        self.positions, self.own, self.slots, self.stride = k.pointer(8), k.pointer(9), k.pointer(10), k.number(11)
        self.info, self.paths, self.units, self.number = (k.pointer(index) for index in range(12, 16))
        self.listed, self.parts, self.groups = (k.variable(k.constant(0)) for _ in range(3))

    def write(self) -> Kernel:
        k = self.k
        with k.loop(0, self.sequences) as sequence:
            begin, end, length, text = self._sequence(sequence)
            table = k.at(self.tables, sequence * self.pages, I32)
            mine = k.at(self.slots, sequence * self.stride, I32)
            known = k.smallest(k.select(text, length + (end - begin), length), self.stride)
            with k.share(known) as position:
                k.store(k.integer(self._slot(table, position), I32), mine, position)
            with k.share(end - begin) as order:
                path, last = self._path(table, length, begin + order, text)
                base = k.select(text, length + order + 1, length)
                own = k.select(text, self._slot(table, length + order), last)
                self._describe(begin + order, (sequence, base, path), (base + path - 1, own))
        live, nothing = self._of(self.offsets, self.sequences), k.constant(0)
        with k.share(self.count - live) as padding:
            self._describe(live + padding, (nothing, nothing, nothing), (nothing, nothing))
        with k.when(k.thread.equals(0)):
            self._list(live)
        return k

    def _of(self, array: Value, index: Value) -> Value:
        return self.k.integer(self.k.load(array, I32, index), I64)

    def _sequence(self, sequence: Value) -> tuple[Value, Value, Value, Value]:
        """Its first row and the one after its last, its committed positions, and whether it is a text."""
        begin, end = self._of(self.offsets, sequence), self._of(self.offsets, sequence + 1)
        return begin, end, self._of(self.lengths, sequence), self._is_text(sequence)

    def _is_text(self, sequence: Value) -> Value:
        if self.all_texts or not self.some_texts:
            return self.k.constant(int(self.all_texts), I1)
        return self._of(self.texts, sequence).differs(0)

    def _slot(self, table: Value, position: Value) -> Value:
        return self._of(table, position // self.page_size) * self.page_size + position % self.page_size

    def _path(self, table: Value, length: Value, row: Value, text: Value) -> tuple[Value, Value]:
        """Writes the slots of a node's path; returns how many, and the last one's, which is its own."""
        k = self.k
        nodes, last = k.variable(k.constant(0)), k.variable(k.constant(0))
        if not self.all_texts:
            with k.when(text.equals(0)):
                word = k.load(self.words, I64, row)
                with k.loop(0, NODES) as node, k.when(((word >> node) & 1).differs(0)):
                    last.value = self._slot(table, length + node)
                    k.store(k.integer(last.value, I32), self.paths, row * NODES + nodes.value)
                    nodes.value = nodes.value + 1
        return nodes.value, last.value

    def _describe(self, row: Value, info: tuple[Value, ...], where: tuple[Value, Value]) -> None:
        k = self.k
        for number, value in enumerate(info):
            k.store(k.integer(value, I32), self.info, row * INFO + number)
        for array, value in zip((self.positions, self.own), where, strict=True):
            k.store(value, array, row)

    # -- units ------------------------------------------------------------------------------------------------------

    def _list(self, live: Value) -> None:
        k = self.k
        with k.loop(0, self.sequences) as sequence:
            begin, end, length, text = self._sequence(sequence)
            with k.loop(begin, end, ROWS) as row:
                rows = k.smallest(end - row, ROWS)
                seen = length + k.select(text, row + rows, end) - begin  # the most that any row attends to
                self._divide(row, rows, (seen + SPAN - 1) // SPAN)
        with k.loop(live, self.count, ROWS) as row:
            self._divide(row, k.smallest(self.count - row, ROWS), k.constant(1))
        k.store(self.listed.value, self.number)

    def _divide(self, row: Value, rows: Value, spans: Value) -> None:
        """Write the units of these rows: one for each span, if there are few rows and there is room."""
        k, parts = self.k, rows * spans
        apart = (self.count <= _FEW) & (spans > 1) & (self.parts.value + parts <= PARTS)
        with k.loop(0, k.select(apart, spans, 1)) as span:
            behind, index = k.select(apart, span + 1, spans), k.select(apart, self.parts.value, -1)
            for at, number in enumerate((row, rows, span, behind, spans, index, self.groups.value)):
                k.store(k.integer(number, I32), self.units, self.listed.value * UNIT + at)
            self.listed.value = self.listed.value + 1
        self.parts.value = self.parts.value + k.select(apart, parts, 0)
        self.groups.value = self.groups.value + 1


def part_of(dim: int) -> int:
    """fp32 numbers of a part."""
    return -(-dim // LANES) * LANES + LANES


class AttentionParts:
    """Emits operations on parts. of_weights: the type of weights in products."""

    def __init__(self, k: Kernel, dim: int, of_weights: Any) -> None:
        self.k, self.of_weights, self.size = k, of_weights, part_of(dim)
        self.top, self.total = self.size - LANES, self.size - LANES + 1

    def of(self, parts: Value, query: Value) -> Value:
        """A query's part among those of several."""
        return self.k.at(parts, query * self.size, F32)

    def empty(self, part: Value) -> None:
        """Clear a part: of no positions."""
        self._set(part, self.k.constant(float("-inf"), F32), self.k.constant(0.0, F32))

    def _set(self, part: Value, top: Value, total: Value) -> None:
        k = self.k
        k.store(top, part, self.top)
        k.store(total, part, self.total)
        for at in range(0, self.top, LANES):
            k.store(k.constant(0.0, vector(F32)), part, at)

    def begin(self, parts: list[Value], scores: list[Value], low: Value, high: Value) -> None:
        """Parts of some queries, without their values: scores ``low`` to ``high`` of each become weights."""
        tops = self._largest(scores, low, high)
        for part, top, total in zip(parts, tops, self._weighed(scores, tops, low, high), strict=True):
            self._set(part, top, total)

    def _largest(self, scores: list[Value], low: Value, high: Value) -> list[Value]:
        """The largest score of each query. NaN is skipped: its weight is NaN too."""
        k = self.k
        tops = [k.variable(k.constant(float("-inf"), vector(F32))) for _ in scores]
        with k.loop(low, high, LANES) as at:
            for each, top in zip(scores, tops, strict=True):
                top.value = k.larger(k.load(each, vector(F32), at), top.value)
        return [k.folded(top.value, k.larger) for top in tops]

    def _weighed(self, scores: list[Value], tops: list[Value], low: Value, high: Value) -> list[Value]:
        """Weights overwrite scores that were already read; returns the sum of each query's, rounded."""
        k = self.k
        totals = [k.variable(k.constant(0.0, vector(F32))) for _ in scores]
        with k.loop(low, high, LANES) as at:
            for each, top, total in zip(scores, tops, totals, strict=True):
                weight = k.narrowed(k.exp_below(k.load(each, vector(F32), at) - top), self.of_weights)
                k.store(weight, each, at)
                total.value = total.value + k.widened(weight)
        return [k.total(total.value) for total in totals]

    def fold(self, part: Value, whole: Value) -> None:
        """Add a part to the whole of those before: both are rescaled to the larger of their largest scores."""
        k = self.k
        tops = [k.load(each, F32, self.top) for each in (whole, part)]
        top = k.larger(*tops)
        keep, take = (k.exp_below(each - top) for each in tops)
        k.store(top, whole, self.top)
        k.store(k.fma(k.load(part, F32, self.total), take, k.load(whole, F32, self.total) * keep), whole, self.total)
        keep, take = k.spread(keep), k.spread(take)
        for at in range(0, self.top, LANES):
            k.store(k.fma(k.load(part, vector(F32), at), take, k.load(whole, vector(F32), at) * keep), whole, at)

    def fold_sink(self, sink: Value, whole: Value) -> None:
        """Add a logit without a value to the whole, as a separate part."""
        k, before = self.k, self.k.load(whole, F32, self.top)
        top = k.larger(before, sink)
        keep, take = (k.exp_below(each - top) for each in (before, sink))
        k.store(k.fma(k.load(whole, F32, self.total), keep, take), whole, self.total)
        for at in range(0, self.top, LANES):
            k.store(k.load(whole, vector(F32), at) * k.spread(keep), whole, at)

    def value(self, whole: Value, of: Any, at: int | Value, sees: Value) -> Value:
        """A query's output; zeros if it attends to nothing. Zeros are positive, as folded ones are."""
        k = self.k
        return k.select(sees, (k.load(whole, of, at) + 0.0) / k.load(whole, F32, self.total), 0.0)
