"""The part of a query's attention that a span of positions gives, and parts folded into each other.

::

    [0, D)    the weighted values, added up; filled up to vectors
    top       the largest score: weights are e to the power of what a score is below it
    total     the sum of the weights, lane by lane over blocks of 16 positions, then over the lanes

Legend: D head dim.
"""

from __future__ import annotations

from typing import Any

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.values import F32, LANES, Value, vector


def part_of(dim: int) -> int:
    """fp32 numbers of a part."""
    return -(-dim // LANES) * LANES + LANES


class Parts:
    """Emits what is done with parts. of_weights: the type that weights have in products."""

    def __init__(self, k: Kernel, dim: int, of_weights: Any) -> None:
        self.k, self.of_weights, self.size = k, of_weights, part_of(dim)
        self.top, self.total = self.size - LANES, self.size - LANES + 1

    def of(self, parts: Value, query: Value) -> Value:
        """A query's among those of several."""
        return self.k.at(parts, query * self.size, F32)

    def empty(self, part: Value) -> None:
        """Of no positions."""
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
        """The largest score of each query. One that is no number is passed over: its weight is none either."""
        k = self.k
        tops = [k.variable(k.constant(float("-inf"), vector(F32))) for _ in scores]
        with k.loop(low, high, LANES) as at:
            for each, top in zip(scores, tops, strict=True):
                top.value = k.larger(k.load(each, vector(F32), at), top.value)
        return [k.folded(top.value, k.larger) for top in tops]

    def _weighed(self, scores: list[Value], tops: list[Value], low: Value, high: Value) -> list[Value]:
        """Weights are written over scores that were read before; returns the sum of each query's, as rounded."""
        k = self.k
        totals = [k.variable(k.constant(0.0, vector(F32))) for _ in scores]
        with k.loop(low, high, LANES) as at:
            for each, top, total in zip(scores, tops, totals, strict=True):
                weight = k.narrowed(k.exp_below(k.load(each, vector(F32), at) - top), self.of_weights)
                k.store(weight, each, at)
                total.value = total.value + k.widened(weight)
        return [k.total(total.value) for total in totals]

    def fold(self, part: Value, whole: Value) -> None:
        """Add a part to the whole of those before: both are brought to the larger of their largest scores."""
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
        """Add a logit that has no value to the whole, as a part of its own."""
        k, before = self.k, self.k.load(whole, F32, self.top)
        top = k.larger(before, sink)
        keep, take = (k.exp_below(each - top) for each in (before, sink))
        k.store(k.fma(k.load(whole, F32, self.total), keep, take), whole, self.total)
        for at in range(0, self.top, LANES):
            k.store(k.load(whole, vector(F32), at) * k.spread(keep), whole, at)

    def value(self, whole: Value, of: Any, at: int | Value, sees: Value) -> Value:
        """What a query has of values; zeros if it sees nothing. A zero has no sign: one that was folded has none."""
        k = self.k
        return k.select(sees, (k.load(whole, of, at) + 0.0) / k.load(whole, F32, self.total), 0.0)
