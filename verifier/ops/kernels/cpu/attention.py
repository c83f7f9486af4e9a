"""Attention of rows over their pages: a row's keys are processed in order of position, in spans of 256.

::

    scores   of 16 positions together, those of a block [16 j, 16 j + 16); the order depends only on the position
    weights  exp(score - the span's largest), summed lane by lane over the blocks, then over the lanes
    values   weighted and added in the order of positions
    spans    folded into each other in order: sums are rescaled to the larger of both largest scores; a head's sink
             is folded in last, once

Rows of one sequence share the blocks that all of them attend to. Positions on a path are processed for each row; at the
end of a text rows share them too, each up to its own position. Neither the boundary nor the other rows change any sum.
Positions that a row does not attend to enter none of its sums.

Legend: S sequences, R rows, H query heads, G kv heads, D head dim, N positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from foresay.kvpaging.store import LARGEST
from foresay.verifier.ops.attention import plan_attention, rotated
from foresay.verifier.ops.kernels.cpu import launch, threads
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.spans import Spans, SpanTile, StoredKV, T, room_of
from foresay.verifier.ops.kernels.cpu.values import F32, I32, I64, LANES, OF_TORCH, Value, vector
from foresay.verifier.ops.kernels.cpu.work_items import INFO, NODES, PARTS, ROWS, SPAN, UNIT, AttentionParts, part_of
from foresay.verifier.ops.records import AttentionMetadata, FusedRope


def tree_attention(
    query: Tensor | FusedRope,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    window: int | None = None,
    first: int = 0,
    count: Tensor | None = None,
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: int = 0,
) -> Tensor:
    """As :func:`foresay.verifier.ops.attention.tree_attention`."""
    (groups, dim), query = keys.shape[-2:], rotated(query, (keys, values, scales))
    dims = dim, shared or dim
    out, plan = launch.arena((*query.shape[:2], dims[1]), query.dtype), plan_attention(rows, len(query), count)
    team = query.shape[1] // groups
    most = min(ROWS, len(query))
    own, part = _own(dims, query.shape[1], groups, most), query.shape[1] * part_of(dims[1])
    values = keys if shared else values
    _attention(query.dtype, keys.dtype, dims, team, groups, Scores(scale, softcap, sinks is not None))(
        query, keys, values, out, plan.slots, plan.slots.shape[1], plan.info, plan.paths, plan.work_items,
        plan.num_items, window or 0, first, launch.arena((threads.MOST, own), torch.float32),
        launch.arena((PARTS, part), torch.float32), launch.zeros(len(query) * groups, torch.int32),
        0 if scales is None else scales, 0 if sinks is None else sinks, most,
    )  # fmt: skip
    return out


def _own(dims: tuple[int, int], heads: int, groups: int, rows: T) -> T:
    """fp32 numbers of a thread's scratch memory: inputs of products, and for ``rows`` rows a span's part and the
    whole."""
    return room_of(dims[0], heads, groups, rows) + rows * (2 * heads * part_of(dims[1]))


#: Heads whose scores are turned into weights at once.
_HEADS = 4


class Scores(NamedTuple):
    """How products become scores, and whether heads have sinks."""

    scale: float
    softcap: float | None
    sinks: bool


@Compiled
def _attention(
    dtype: torch.dtype, stored: torch.dtype, dims: tuple[int, int], team: int, groups: int, scores: Scores
) -> Kernel:
    return _Attention(Kernel("attend"), dtype, stored, dims, team, groups, scores).write()


class _Attention:
    """Writes the kernel; a work item is a unit of the plan and a set of kv heads, each with the ``team`` of query
    heads that share it. dims: D and V.
    """

    def __init__(
        self, k: Kernel, dtype: torch.dtype, stored: torch.dtype, dims: tuple[int, int], team: int, groups: int,
        scores: Scores,
    ) -> None:  # fmt: skip
        self.k, self.of, self.team, self.groups, self.scores = k, OF_TORCH[dtype], team, groups, scores
        self.dim, self.value_dim = dim, value_dim = dims
        self.query, keys, values, self.out, self.slots = (k.pointer(index) for index in range(5))
        scales = k.pointer(15) if stored in LARGEST else None
        self.keys = StoredKV(keys, scales)
        self.values = StoredKV(values, None if scales is None else k.at(scales, groups, F32))
        self.slots_of, self.info, self.paths, self.units = k.number(5), k.pointer(6), k.pointer(7), k.pointer(8)
        self.number, self.window, self.lowest = k.counted(9), k.number(10), k.number(11)
        self.shared, self.arrived = k.pointer(13), k.pointer(14)
        self.sinks = k.pointer(16) if scores.sinks else None
        heads, rows = team * groups, k.number(17)  # of a unit at most
        self.row_part = heads * part_of(value_dim)
        scratch = k.at(k.pointer(12), k.thread * _own(dims, heads, groups, rows), F32)
        self.spans = Spans(k, self.of, OF_TORCH[stored], dims, team, groups, scratch, rows)
        self.own = k.at(scratch, room_of(dim, heads, groups, rows), F32)
        self.folded = k.at(self.own, rows * self.row_part, F32)
        self.parts = AttentionParts(k, value_dim, self.spans.of_weights)
        self.bases, self.begins, self.ends = (k.array(I64, ROWS) for _ in range(3))

    def write(self) -> Kernel:
        k = self.k
        sets = self._sets()
        with k.loop(k.thread, self.number * sets, k.threads) as item:
            self._begin(item // sets, item % sets, sets)
            with k.loop(self.first, self.behind) as span:
                self._attend(span)
                self._deliver(span)
        return k

    def _sets(self) -> Value:
        """How many equal sets the kv heads are divided into: at least as many as threads, if possible.

        All heads of a slot are adjacent: memory is read best if the threads read them at the same time.
        """
        k, sets = self.k, self.k.constant(self.groups)
        for number in range(self.groups, 0, -1):
            if self.groups % number == 0:
                sets = k.select(k.threads <= number, number, sets)
        return sets

    # -- a unit -----------------------------------------------------------------------------------------------------

    def _begin(self, unit: Value, which: Value, sets: Value) -> None:
        k = self.k
        fields = [k.integer(k.load(self.units, I32, unit * UNIT + index), I64) for index in range(UNIT)]
        self.row, self.rows, self.first, self.behind, self.count, self.part, number = fields
        self.heads = (which * self.groups // sets, (which + 1) * self.groups // sets)
        self.queries = self.rows * self.team
        self.counter = k.at(self.arrived, number * self.groups + which, I32)
        self.text = k.at(self.slots, self._info_of(self.row, 0) * self.slots_of, I32)
        self.alone, self.single = self.part < 0, self.count.equals(1)
        self.whole = k.select(self.single, self.own, self.folded)
        self._look()
        with self._of_heads() as (head, number, query):
            self.spans.copy_query(k.at(self.query, self._of_query(head, number) * self.dim, self.of), query)
            with k.when(self.single.equals(0)):
                self.parts.empty(self.parts.of(self.whole, query))

    def _info_of(self, row: Value, index: int) -> Value:
        return self.k.integer(self.k.load(self.info, I32, row * INFO + index), I64)

    @contextmanager
    def _of_heads(self) -> Iterator[tuple[Value, Value, Value]]:
        """A loop over all queries: the kv head, the query's index in it, and in the set."""
        with self.k.loop(*self.heads) as head, self.k.loop(0, self.queries) as number:
            yield head, number, (head - self.heads[0]) * self.queries + number

    def _of_query(self, head: Value, query: Value) -> Value:
        """The index of one of a kv head's queries among all."""
        row, one = self.row + query // self.team, query % self.team
        return (row * self.groups + head) * self.team + one

    def _look(self) -> None:
        """Compute what each row attends to, and the range that all rows attend to; for a single row these are the
        same."""
        k = self.k
        common, shared = k.variable(k.constant(0)), k.variable(k.constant(1 << 62))
        paths, last = k.variable(k.constant(0)), k.variable(k.constant(0))
        with k.loop(0, self.rows) as row:
            base, path = self._info_of(self.row + row, 1), self._info_of(self.row + row, 2)
            end = base + path
            behind = k.select(self.window.equals(0), self.lowest, end - self.window)
            begin = k.select(behind > self.lowest, behind, self.lowest)
            for array, value in ((self.bases, base), (self.begins, begin), (self.ends, end)):
                k.store(value, array, row)
            common.value = k.select(begin > common.value, begin, common.value)
            shared.value = k.smallest(shared.value, base)
            paths.value, last.value = paths.value + path, k.select(end > last.value, end, last.value)
        alone, begin = self.rows.equals(1), k.load(self.begins, I64)
        self.of_text, self.last = paths.value.equals(0), last.value
        self.common = k.select(alone, begin, common.value + (LANES - 1)) // LANES * LANES
        border = shared.value // LANES * LANES
        border = k.select(border > self.common, border, self.common)
        self.border = k.select(alone, k.load(self.ends, I64), border)

    @contextmanager
    def _seeing(self, span: Value) -> Iterator[tuple[Value, Value, Value]]:
        """The first query of each head and row that attend to something in a span, and the range of blocks."""
        k = self.k
        with k.loop(0, self.rows) as row:
            begin, end = k.load(self.begins, I64, row), k.load(self.ends, I64, row)
            low, high = self._clipped(begin, end, span)
            with k.when(low < high), k.loop(0, self.heads[1] - self.heads[0]) as head:
                yield (head * self.rows + row) * self.team, low // LANES * LANES, high

    def _clipped(self, low: Value, high: Value, span: Value) -> tuple[Value, Value]:
        """The positions that are in a span."""
        k, begin = self.k, span * SPAN
        return k.select(low > begin, low, begin), k.smallest(high, begin + SPAN)

    @contextmanager
    def _pieces(self, span: Value) -> Iterator[SpanTile]:
        """A span's pieces, in order of position: for each row the part before the common range, then the common range
        for all, then the part after it, for each or for all rows of a text.
        """
        k, rows, team = self.k, self.rows, self.team
        count = k.select(self.of_text, rows + 2, rows * 2 + 1)
        with k.loop(0, count) as index:
            number = self._in_order(index, count)
            before, together = number < rows, number.equals(rows)
            all_of = together | ((number > rows) & self.of_text)
            row = k.select(before, number, k.select(all_of, 0, number - rows - 1))
            base, begin, end = (k.load(array, I64, row) for array in (self.bases, self.begins, self.ends))
            base, end = (k.select(all_of & self.of_text, self.last, each) for each in (base, end))
            low = k.select(before, begin // LANES * LANES, k.select(together, self.common, self.border))
            high = k.select(before, k.smallest(self.common, end), k.select(together, self.border, end))
            low, high = self._clipped(low, high, span)
            first, queries = k.select(all_of, 0, row * team), k.select(all_of, self.queries, team)
            apart = k.select(all_of & (number > rows), rows, 1)
            path = k.at(self.paths, (self.row + row) * NODES, I32)
            with k.when((low < high) & (begin < end)):
                seen = (span * SPAN, low, high, begin, base, end, self.begins, self.ends, apart)
                yield SpanTile(self.heads, self.queries, first, queries, *seen, self.text, path)

    def _in_order(self, index: Value, count: Value) -> Value:
        """Which of ``count`` pieces comes after so many."""
        return index

    # -- a span -----------------------------------------------------------------------------------------------------

    def _attend(self, span: Value) -> None:
        part = self._part(span)
        with self._pieces(span) as piece:
            self.spans.score(self.keys, piece, self.scores.scale, self.scores.softcap)
        with self._seeing(span) as (first, low, high):
            self._weigh(first, part, span * SPAN, low, high)
        with self._pieces(span) as piece:
            self.spans.mix(self.values, piece, part)

    def _part(self, span: Value) -> Value:
        """Where the sums of a span are: in this thread's memory, or with those of all units of these rows."""
        index = (self.part + span * self.rows) * self.row_part + self.heads[0] * self.queries * self.parts.size
        return self.k.select(self.alone, self.own, self.k.at(self.shared, index, F32))

    def _weigh(self, first: Value, part: Value, span: Value, low: Value, high: Value) -> None:
        """Turn a row's scores into weights, some heads at a time, and begin their parts."""
        for head in range(0, self.team, _HEADS):
            queries = [first + each for each in range(head, min(head + _HEADS, self.team))]
            scores = [self.spans.scores_of(query) for query in queries]
            self.parts.begin([self.parts.of(part, query) for query in queries], scores, low - span, high - span)

    # -- the whole --------------------------------------------------------------------------------------------------

    def _deliver(self, span: Value) -> None:
        """Fold a part into the whole, if it is not the whole; if units share the rows, the last one folds all."""
        k, last = self.k, self._is_last(span)
        first = k.select(self.alone, span, 0)
        behind = k.select(self.alone, k.select(self.single, span, span + 1), k.select(last, self.count, 0))
        with k.loop(first, behind) as each:
            part = self._part(each)
            with self._seeing(each) as (query, _, _), k.loop(query, query + self.team) as one:
                self.parts.fold(self.parts.of(part, one), self.parts.of(self.whole, one))
        with k.when(last), self._of_heads() as (head, number, query):
            if self.sinks is not None:
                sink = k.load(self.sinks, F32, head * self.team + number % self.team)
                self.parts.fold_sink(sink, self.parts.of(self.whole, query))
            row = number // self.team
            sees = k.load(self.begins, I64, row) < k.load(self.ends, I64, row)
            self._finish(self._of_query(head, number), self.parts.of(self.whole, query), sees)

    def _is_last(self, span: Value) -> Value:
        """Whether the parts of all spans of these rows are finished."""
        k = self.k
        done = k.variable(span + 1)
        with k.when(self.alone.equals(0)):
            done.value = k.integer(k.counts_on(self.counter), I64) + 1
            with k.when(done.value.equals(self.count)):
                k.store(k.constant(0, I32), self.counter)
        return done.value.equals(self.count)

    def _finish(self, index: Value, whole: Value, sees: Value) -> None:
        """Write a query's output, up to the value's width."""
        k, out = self.k, self.k.at(self.out, index * self.value_dim, self.of)
        for vectors in range(0, self.value_dim - LANES + 1, LANES):
            k.write(self.parts.value(whole, vector(F32), vectors, sees), out, self.of, vectors)
        with k.loop(self.value_dim // LANES * LANES, self.value_dim) as at:
            k.write(self.parts.value(whole, F32, at, sees), out, self.of, at)
