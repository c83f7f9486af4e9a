"""The sample at every row in two entries, without sorting or copying the vocabulary.

    scan     rows x pieces   each piece's largest ``logit / T + noise``, its largest ``logit / T``, and its mass
    settle   rows            the row's winner; where a filter takes that out, the next ones until one stands

Top-k, top-p and min-p each keep the tokens from some logit upwards. So if the winner among all tokens is filtered out,
every survivor is likelier than the winner: the next winner is the largest noisy logit among the *likelier* tokens, and
so on until one stands.

Most tokens are too unlikely to win whatever their noise: its bound tells
(:class:`foresay.verifier.ops.kernels.cpu.noise.PositionNoise`), and its two logarithms are taken of the others alone. A
piece is always as long, so a row is summed in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.spec.sample import BROKEN
from foresay.verifier.ops.kernels.cpu.asm import Kernel, Variable
from foresay.verifier.ops.kernels.cpu.best import Best
from foresay.verifier.ops.kernels.cpu.launch import Compiled, room
from foresay.verifier.ops.kernels.cpu.noise import PositionNoise
from foresay.verifier.ops.kernels.cpu.types import F32, I32, I64, LANES, vector
from foresay.verifier.ops.kernels.cpu.values import Value
from foresay.verifier.ops.records import COLDEST, RowSampling

INFINITY = float("inf")
#: Tokens of a piece: a quarter of what a core's nearest cache holds.
PIECE = 4096


def sample_rows(
    logits: Tensor, sampling: RowSampling, token_ids: Tensor | None, sampled: Tensor, count: Tensor
) -> None:
    """Sample from the first ``count`` rows, as :func:`foresay.verifier.ops.sample.sample_rows` says. sampled:
    int64[N]."""
    rows, width = logits.shape
    pieces = -(-width // PIECE)
    s = sampling
    asked = (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)
    found = (room((rows * pieces, 3), torch.float32), room((rows * pieces,), torch.int32))
    ids = 0 if token_ids is None else token_ids.contiguous()
    arguments = (logits, ids, *asked, *found, sampled, count, width, pieces)
    for entry in (_scan, _settle):
        entry(token_ids is not None, PIECE)(*arguments)


@Compiled
def _scan(own_ids: bool, piece: int) -> Kernel:
    k = Kernel("scan")
    sample = Drawing(k, own_ids, piece)
    with k.share(sample.rows * sample.pieces) as unit:
        sample.scan(sample.row(unit // sample.pieces), unit % sample.pieces, unit)
    return k


@Compiled
def _settle(own_ids: bool, piece: int) -> Kernel:
    k = Kernel("settle")
    sample = Drawing(k, own_ids, piece)
    with k.share(sample.rows) as row:
        sample.settle(sample.row(row))
    return k


@dataclass(frozen=True, slots=True)
class Row:
    """One row while it is sampled. by_k, by_p, filtered: whether top-k, top-p, any filter is on."""

    number: Value
    start: Value
    heat: Value
    noise: PositionNoise
    hot: Value
    top_k: Value
    top_p: Value
    min_p: Value
    by_k: Value
    by_p: Value

    @property
    def filtered(self) -> Value:
        """Whether the winner can be taken out."""
        return self.hot & (self.by_k | self.by_p | (self.min_p > 0.0))


class Drawing:
    """Writes both kernels, whose arguments are the same."""

    def __init__(self, kernel: Kernel, own_ids: bool, piece: int) -> None:
        self.k, self.own_ids, self.piece = kernel, own_ids, piece
        self.logits, self.ids, *self.asked = (kernel.pointer(index) for index in range(8))
        self.floats, self.winners, self.sampled = (kernel.pointer(index) for index in (8, 9, 10))
        self.rows, self.width, self.pieces = kernel.counted(11), kernel.number(12), kernel.number(13)

    def row(self, number: Value) -> Row:
        """What is asked of a row."""
        k = self.k
        types = (F32, I32, F32, F32, I64, I64)
        heat, top_k, top_p, min_p, seed, position = (
            k.load(pointer, of, number) for pointer, of in zip(self.asked, types, strict=True)
        )
        hot, top_k = heat >= COLDEST, k.integer(top_k, I64)
        return Row(
            number=number,
            start=k.at(self.logits, number * self.width, F32),
            heat=k.select(hot, heat, 1.0),
            noise=PositionNoise(k, seed, position),
            hot=hot,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            by_k=(top_k > 0) & (top_k < self.width),
            by_p=top_p < 1.0,
        )

    def tokens(self, columns: Value, at: Value) -> Value:
        """int32: whose noise is that of these columns, the first of which is ``at``."""
        if not self.own_ids:
            return columns
        return self.k.integer(self.k.some(self.ids, I64, at, self.width, 0), I32)

    # -- scan -------------------------------------------------------------------------------------------------------

    def scan(self, row: Row, piece: Value, unit: Value) -> None:
        """One piece of a row."""
        k = self.k
        begin = piece * self.piece
        end = k.smallest(begin + self.piece, self.width)
        top = self._top(row, begin, end)
        best = Best(k)
        with k.loop(begin, end, LANES) as at:
            self._see(row, best, at)
        where = unit * 3
        k.store(best.value, self.floats, where)
        k.store(top, self.floats, where + 1)
        k.store(best.column, self.winners, unit)
        with k.when(row.filtered & row.by_p):
            k.store(self.mass(row, begin, end, top), self.floats, where + 2)

    def _top(self, row: Row, begin: Value, end: Value) -> Value:
        """The largest scaled logit; NaN if there is one."""
        k = self.k
        top = k.variable(k.constant(-INFINITY, vector(F32)))
        with k.loop(begin, end, LANES) as at:
            top.value = k.largest(top.value, self._raw(row, at))
        return k.folded(top.value, k.largest) / row.heat

    def _raw(self, row: Row, at: Value) -> Value:
        return self.k.some(row.start, F32, at, self.width, -INFINITY)

    def scaled(self, row: Row, at: Value) -> Value:
        return self._raw(row, at) / row.heat

    def _see(self, row: Row, best: Best, at: Value) -> None:
        """The tokens of a vector take part, with their noise if there is any."""
        k = self.k
        scaled, columns = self.scaled(row, at), k.counting(at)
        with k.builder.if_else(row.hot.raw) as (hot, cold):
            with hot:
                self.see_noisy(row, best, scaled, at)
            with cold, k.when(k.any(scaled > best.least)):
                best.see(scaled, columns)

    def see_noisy(self, row: Row, best: Best, scaled: Value, at: Value) -> None:
        k, columns = self.k, self.k.counting(at)
        uniform = row.noise.uniform(self.tokens(columns, at))
        with k.when(k.any(scaled + row.noise.at_most(uniform) > best.least)):
            best.see(scaled + row.noise.gumbel(uniform), columns)

    def mass(self, row: Row, begin: Value | int, end: Value, top: Value, least: Value | None = None) -> Value:
        """What the tokens weigh together, one as likely as ``top`` being 1. least: of those that reach it."""
        k = self.k
        total = k.variable(k.constant(0.0, vector(F32)))
        base = k.select(top > -INFINITY, top, 0.0)
        with k.loop(begin, end, LANES) as at:
            scaled = self.scaled(row, at)
            weight = k.exp(scaled - base)
            total.value = total.value + (weight if least is None else k.select(scaled >= least, weight, 0.0))
        return k.total(total.value)

    # -- settle -----------------------------------------------------------------------------------------------------

    def settle(self, row: Row) -> None:
        """The token of a row."""
        k = self.k
        first = row.number * self.pieces
        token, top = self._merged(first)
        broken = top.differs(top) | (top >= INFINITY) | (top <= -INFINITY)
        found = k.variable(k.select(broken, BROKEN, k.integer(token, I64)))
        with k.when(row.filtered & (found.value >= 0)), k.when(self.logit(row, found.value) < top):
            Search(self, row, top).run(found, self._total(first, top))
        if self.own_ids:
            with k.when(found.value >= 0):
                found.value = k.load(self.ids, I64, found.value)
        k.store(found.value, self.sampled, row.number)

    def logit(self, row: Row, token: Value) -> Value:
        return self.k.load(row.start, F32, token) / row.heat

    def _merged(self, first: Value) -> tuple[Value, Value]:
        """The row's winner, and its largest scaled logit."""
        k = self.k
        best, winner = k.variable(k.constant(-INFINITY, F32)), k.variable(k.load(self.winners, I32, first))
        top = k.variable(k.constant(-INFINITY, F32))
        with k.loop(0, self.pieces) as piece:
            value = k.load(self.floats, F32, (first + piece) * 3)
            better = value > best.value
            winner.value = k.select(better, k.load(self.winners, I32, first + piece), winner.value)
            best.value = k.select(better, value, best.value)
            top.value = k.largest(top.value, k.load(self.floats, F32, (first + piece) * 3 + 1))
        return winner.value, top.value

    def _total(self, first: Value, top: Value) -> Value:
        """The mass of a row; of no use where top-p is off."""
        k = self.k
        total = k.variable(k.constant(0.0, F32))
        with k.loop(0, self.pieces) as piece:
            at = (first + piece) * 3
            total.value = total.value + k.load(self.floats, F32, at + 2) * k.exp(k.load(self.floats, F32, at + 1) - top)
        return total.value


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
