"""The winner of a row that its filters leave: the search behind a sample
(:mod:`foresay.verifier.ops.kernels.cpu.sample`), by one thread for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foresay.verifier.ops.kernels.cpu.asm import Kernel, Variable
from foresay.verifier.ops.kernels.cpu.best import Best
from foresay.verifier.ops.kernels.cpu.types import F32, I32, I64, LANES, vector
from foresay.verifier.ops.kernels.cpu.values import Value

if TYPE_CHECKING:
    from foresay.verifier.ops.kernels.cpu.sample import Drawing, Row

INFINITY = float("inf")


class Search:
    """The first winner of a row that stands: fewer than k tokens are likelier, and weigh less than enough together; it
    weighs ``min_p``."""

    def __init__(self, sample: Drawing, row: Row, top: Value) -> None:
        self.k, self.sample, self.row, self.top = sample.k, sample, row, top

    def run(self, token: Variable, total: Value) -> None:
        """token: the winner among all. total: the row's mass."""
        k, row = self.k, self.row
        least = k.variable(k.constant(-INFINITY, F32))
        enough = k.variable(k.select(row.by_p, total * row.top_p, INFINITY))
        with k.when(row.by_k & row.by_p):
            least.value = self._least_of_top_k()
            enough.value = self.sample.mass(row, 0, self.sample.width, self.top, least.value) * row.top_p
        most = k.select(row.by_k, row.top_k, self.sample.width)
        going = k.variable(k.constant(1))
        with k.during(going):
            pivot = self.sample.logit(row, token.value)
            count, mass, following = self._likelier(pivot, least.value)
            stands = (count < most) & (pivot >= least.value) & (k.exp(pivot - self.top) >= row.min_p)
            stands = stands & ((mass < enough.value) | count.equals(0))
            going.value = k.select(stands, 0, going.value)
            token.value = k.select(stands, token.value, following)

    def _likelier(self, pivot: Value, least: Value) -> tuple[Value, Value, Value]:
        """How many tokens are likelier than the pivot, what they weigh, and which of those that may stand wins."""
        k, sample, row = self.k, self.sample, self.row
        count, mass = k.variable(k.constant(0, vector(I32))), k.variable(k.constant(0.0, vector(F32)))
        best = Best(k)
        with k.loop(0, sample.width, LANES) as at:
            scaled = sample.scaled(row, at)
            above = scaled > pivot
            with k.when(k.any(above)):
                weight = k.exp(scaled - self.top)
                count.value = count.value + k.select(above, k.constant(1, vector(I32)), 0)
                mass.value = mass.value + k.select(above, weight, 0.0)
                possible = above & (scaled >= least) & (weight >= row.min_p)
                sample.see_noisy(row, best, k.select(possible, scaled, -INFINITY), at)
        return k.integer(k.total(count.value), I64), k.total(mass.value), k.integer(best.column, I64)

    def _least_of_top_k(self) -> Value:
        """The k-th largest scaled logit: bisection over the bits, which are in the order of the numbers."""
        k, row = self.k, self.row
        low, high = k.variable(_ordered(k, k.constant(-INFINITY, F32))), k.variable(_ordered(k, self.top))
        going = k.variable(k.constant(1))
        with k.during(going):
            middle = low.value + (high.value - low.value + 1) // 2
            reaches = self._reaching(_unordered(k, middle)) >= row.top_k
            low.value = k.select(reaches, middle, low.value)
            high.value = k.select(reaches, high.value, middle - 1)
            going.value = k.select(low.value < high.value, k.constant(1), 0)
        return _unordered(k, low.value)

    def _reaching(self, least: Value) -> Value:
        """How many tokens are at least as likely."""
        k, sample = self.k, self.sample
        count = k.variable(k.constant(0, vector(I32)))
        with k.loop(0, sample.width, LANES) as at:
            reaches = sample.scaled(self.row, at) >= least
            count.value = count.value + k.select(reaches, k.constant(1, vector(I32)), 0)
        return k.integer(k.total(count.value), I64)


def _ordered(k: Kernel, value: Value) -> Value:
    """int64 in the order of the fp32 values."""
    bits = k.bits(value, I32)
    return k.integer(k.select(bits < 0, bits ^ 0x7FFFFFFF, bits), I64)


def _unordered(k: Kernel, number: Value) -> Value:
    """The fp32 value of an ordered number."""
    low = k.integer(number, I32)
    return k.bits(k.select(low < 0, low ^ 0x7FFFFFFF, low), F32)
