"""Choosing experts, sorting rows by them, and adding up their outputs (:mod:`foresay.verifier.ops.experts`).

A row's scores become integers with the same order: the largest is found vector by vector, and of equal ones the lowest
number. One thread counts and places rows, in their order, and all threads copy them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.verifier.ops.experts import places_of
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled, counted, room
from foresay.verifier.ops.kernels.cpu.values import F32, I32, I64, LANES, Value, vector
from foresay.verifier.ops.records import READING, SPANS, TILE, Routing, Sorted

#: Keys of experts already chosen, and of NaN or experts not considered.
_TAKEN, _ASIDE = -(1 << 31), 1 - (1 << 31)


def route(
    logits: Tensor,
    how: Routing,
    correction: Tensor | None = None,
    count: Tensor | None = None,
    slots: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.experts.route`."""
    shape = len(logits), how.chosen
    chosen, weights = room(shape, torch.int32), room(shape, torch.float32)
    _routing(how, correction is not None, factors is not None)(
        logits, 0 if correction is None else correction, chosen, weights, counted(count, len(logits)), logits.shape[1],
        0 if factors is None else factors,
    )  # fmt: skip
    return chosen, weights


@Compiled
def _routing(how: Routing, corrected: bool, weighted: bool) -> Kernel:
    return _Router(Kernel("route"), how, corrected, weighted).write()


class _Router:
    """Arguments: logits, corrections, chosen, weights, count, width of logits, factors of weights."""

    def __init__(self, k: Kernel, how: Routing, corrected: bool, weighted: bool) -> None:
        self.k, self.how, self.corrected = k, how, corrected
        self.factors = k.pointer(6) if weighted else None
        self.logits, self.corrections, self.chosen, self.weights = (k.pointer(index) for index in range(4))
        self.filled = -(-how.experts // LANES) * LANES
        self.keys, self.scores = k.array(I32, self.filled), k.array(F32, self.filled)

    def write(self) -> Kernel:
        k, how = self.k, self.how
        with k.share(k.counted(4)) as row:
            logits = k.at(self.logits, row * k.number(5), F32)
            with k.loop(0, self.filled, LANES) as at:
                k.store(k.constant(_TAKEN, vector(I32)), self.keys, at)
            with k.loop(0, how.experts) as at:
                self._rank(k.load(logits, F32, at), at)
            if how.groups[0] > 1:
                self._leave_groups()
            top = k.variable(k.constant(float("-inf"), F32))
            with k.loop(0, how.chosen):
                found = self._largest()
                k.store(k.constant(_TAKEN, I32), self.keys, found)
                top.value = k.larger(k.load(self.scores, F32, found), top.value)
            self._tell(row * how.chosen, top.value)
        return k

    def _rank(self, logit: Value, at: Value) -> None:
        """Write an expert's score, for a softmax still its logit, and its key."""
        k = self.k
        score = k.constant(1.0, F32) / (k.exp(logit * -1.0) + 1.0) if self.how.sigmoid else logit
        k.store(score, self.scores, at)
        ranked = (score + k.load(self.corrections, F32, at) if self.corrected else score) + 0.0  # no -0
        bits = k.bits(ranked, I32)
        key = k.select(bits < 0, bits ^ 0x7FFFFFFF, bits)
        k.store(k.select(ranked.differs(ranked), k.constant(_ASIDE, I32), key), self.keys, at)

    def _leave_groups(self) -> None:
        """Exclude all but the best groups."""
        k, (groups, best) = self.k, self.how.groups
        size, sums = self.how.experts // groups, k.array(F32, groups)
        lowest = k.constant(float("-inf"), F32)
        with k.loop(0, groups) as group:
            first, second = k.variable(lowest), k.variable(lowest)
            with k.loop(group * size, (group + 1) * size) as at:
                score = k.load(self.scores, F32, at)
                score = score + k.load(self.corrections, F32, at) if self.corrected else score
                lesser = k.select(score > first.value, first.value, score)
                first.value, second.value = k.larger(score, first.value), k.larger(lesser, second.value)
            k.store(first.value + second.value if self.how.sigmoid else first.value, sums, group)
        with k.loop(0, groups) as group:
            own, before = k.load(sums, F32, group), k.variable(k.constant(0))
            with k.loop(0, groups) as other:
                its = k.load(sums, F32, other)
                ahead = (its > own) | (its.equals(own) & (other < group))
                before.value = before.value + k.select(ahead, k.constant(1), 0)
            with k.when(before.value >= best), k.loop(group * size, (group + 1) * size) as at:
                k.store(k.constant(_ASIDE, I32), self.keys, at)

    def _largest(self) -> Value:
        """The expert with the largest key, of equal ones the lowest."""
        k, whole = self.k, vector(I32)
        best, where = k.variable(k.constant(_TAKEN, whole)), k.variable(k.constant(self.filled, whole))
        with k.loop(0, self.filled, LANES) as at:
            keys = k.load(self.keys, whole, at)
            better = keys > best.value
            where.value = k.select(better, k.counting(at), where.value)
            best.value = k.select(better, keys, best.value)
        most = k.call("llvm.vector.reduce.smax.v16i32", I32, best.value)
        lanes = k.select(best.value.equals(most), where.value, self.filled)
        return k.integer(k.call("llvm.vector.reduce.smin.v16i32", I32, lanes), I64)

    def _tell(self, first: Value, top: Value) -> None:
        """Write the chosen experts in order, and their weights. top: the largest score."""
        k, how = self.k, self.how
        told, total = k.variable(k.constant(0)), k.variable(k.constant(0.0, F32))
        with k.loop(0, how.experts) as at:
            score = k.load(self.scores, F32, at)
            value = score if how.sigmoid else k.exp(score - top)
            taken = k.load(self.keys, I32, at).equals(_TAKEN)
            counts = taken if how.normalised else at >= 0
            total.value = total.value + k.select(counts, value, 0.0)
            with k.when(taken):
                k.store(k.integer(at, I32), self.chosen, first + told.value)
                k.store(value, self.weights, first + told.value)
                told.value = told.value + 1
        if how.sigmoid:
            total.value = total.value + 1e-20 if how.normalised else k.constant(1.0, F32)
        with k.loop(first, first + how.chosen) as at:
            weight = k.load(self.weights, F32, at) / total.value * how.scale
            if self.factors is not None:
                weight = weight * k.load(self.factors, F32, k.integer(k.load(self.chosen, I32, at), I64))
            k.store(weight, self.weights, at)


def sort_rows(x: Tensor, chosen: Tensor, how: Routing, count: Tensor | None = None) -> tuple[Tensor, Sorted]:
    """As :func:`foresay.verifier.ops.experts.sort_rows`."""
    (rows, width), most = x.shape, min(how.experts, chosen.numel())
    copies, places = room((places_of(rows, how), width), x.dtype), room(tuple(chosen.shape), torch.int32)
    spans, count = room((SPANS + 4 * most,), torch.int64), counted(count, rows)
    _sorting(how.experts, how.chosen)(chosen, places, spans, count)
    _copying(x.dtype.itemsize, how.chosen)(x, places, copies, count, width)
    return copies, Sorted(places, spans)


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
