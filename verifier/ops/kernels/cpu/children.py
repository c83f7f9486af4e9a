"""The likeliest children of each row in two entries, without sorting the vocabulary.

::

    list    pieces x rows   the largest of a piece of a row, with noise or without, and the sum of their exponentials
    merge   rows            the lists of the row's pieces; where filters are on, what they keep of the 64 likeliest

A row that filters is listed without noise, which is added to what its filters keep. Where they keep more than 64, the row
is listed anew, with noise, by the thread that merges it. Noise is made piece by piece, and used again by the next row at
the same position, as siblings are. Every sum of a row runs in the order of its columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifier.ops.children import MOST
from verifier.ops.draw import COLDEST
from verifier.ops.kernels.cpu import launch
from verifier.ops.kernels.cpu.asm import Kernel
from verifier.ops.kernels.cpu.largest import Largest
from verifier.ops.kernels.cpu.launch import Compiled
from verifier.ops.kernels.cpu.noise import PositionNoise
from verifier.ops.kernels.cpu.types import F32, I32, I64, LANES, vector
from verifier.ops.kernels.cpu.values import Value

if TYPE_CHECKING:
    from verifier.ops.draw import RowSampling

#: Columns of a piece; the order of a row's sums follows from it.
PIECE = 2048
_LOWEST = float("-inf")


def best_children(
    logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None, count_rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`verifier.ops.children.best_children`."""
    rows, width = logits.shape
    s = sampling
    asked = (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)
    assert all(one.is_contiguous() for one in (logits, *asked)), "a recording would read a copy of what was there"
    pieces = -(-width // PIECE)
    values, columns = (launch.room((rows, pieces, MOST), of) for of in (torch.float32, torch.int32))
    tops, masses = (launch.room((rows, pieces), torch.float32) for _ in range(2))
    tokens, chances = launch.room((rows, count), torch.int64), launch.room((rows, count), torch.float32)
    arguments = (
        logits, 0 if token_ids is None else token_ids, *asked, values, columns, tops, masses, tokens, chances,
        width, count, launch.counted(count_rows, rows),
    )  # fmt: skip
    shape = (PIECE, token_ids is not None)
    _listing(*shape)(*arguments)
    _merging(*shape)(*arguments)
    return tokens, chances


class _Call:
    """What both kernels are given."""

    def __init__(self, k: Kernel, piece: int, own_ids: bool) -> None:
        self.k, self.piece, self.own_ids = k, piece, own_ids
        self.logits, self.token_ids, *self.arrays = (k.pointer(index) for index in range(8))
        self.values, self.columns, self.tops, self.masses, self.tokens, self.chances = (
            k.pointer(index) for index in range(8, 14)
        )
        self.width, self.count, self.rows = k.number(14), k.number(15), k.counted(16)
        self.pieces = (self.width + (piece - 1)) // piece

    def asked_of(self, row: Value) -> _Asked:
        """What is asked of a row."""
        k = self.k
        heat, top_k, p, min_p, seed, position = (
            k.load(array, of, row) for array, of in zip(self.arrays, (F32, I32, F32, F32, I64, I64), strict=True)
        )
        greedy, by_k = heat < COLDEST, (top_k > 0) & (top_k <= MOST)
        filters = (greedy | (by_k | (p < 1.0) | (min_p > 0.0)).equals(0)).equals(0)
        kept = k.select(by_k, k.integer(top_k, I64), MOST)
        return _Asked(row, k.select(greedy, 1.0, heat), greedy, filters, by_k, kept, p, min_p, seed, position)

    def place(self, row: Value, piece: Value) -> Value:
        """Where the numbers of a piece of a row are."""
        return row * self.pieces + piece

    def list_at(self, place: Value) -> tuple[Value, Value]:
        """Where its list is."""
        return self.k.at(self.values, place * MOST, F32), self.k.at(self.columns, place * MOST, I32)


@dataclass(frozen=True)
class _Asked:
    """``kept``: how many of the likeliest the filters look at."""

    row: Value
    heat: Value
    greedy: Value
    filters: Value
    by_k: Value
    kept: Value
    p: Value
    min_p: Value
    seed: Value
    position: Value


class _Lister:
    """Lists a piece of a row: its largest, and the sum of the exponentials relative to its largest logit."""

    def __init__(self, call: _Call) -> None:
        k = self.k = call.k
        self.call, room = call, call.piece + LANES
        self.list = Largest(k)
        self.scaled, self.exponentials, self.ids = k.array(F32, room), k.array(F32, room), k.array(I32, room)
        self.made = [k.variable(k.constant(-1)) for _ in range(3)]  # piece, seed and position of the exponentials

    def write(self, asked: _Asked, piece: Value, count: Value, noisy: bool) -> None:
        """List the ``count`` largest."""
        k, call = self.k, self.call
        begin = piece * call.piece
        length = k.smallest(call.width - begin, call.piece)
        top = self._scale(asked, begin, length)
        noise = PositionNoise(k, asked.seed, asked.position)
        if noisy:
            self._make(noise, (piece, asked.seed, asked.position), begin, length)
        self.list.clear(count)
        mass = k.variable(k.constant(0.0, vector(F32)))
        reference = k.spread(_or_zero(k, top))
        with k.loop(0, length, LANES) as at:
            scaled = k.load(self.scaled, vector(F32), at)
            columns = k.spread(k.integer(begin + at, I32)) + k.places(range(LANES))
            weight = k.exp(scaled - reference)
            if noisy:
                exponential = k.load(self.exponentials, vector(F32), at)
                weight = weight / exponential
                with k.when(self.list.may_hold(scaled + noise.at_most(exponential))):
                    self.list.offer(scaled + noise.of_exponential(exponential), columns)
            else:
                with k.when(self.list.may_hold(scaled)):
                    self.list.offer(scaled, columns)
            mass.value = mass.value + weight
        place = call.place(asked.row, piece)
        self.list.store(*call.list_at(place))
        k.store(top, call.tops, place)
        k.store(k.total(mass.value), call.masses, place)

    def _scale(self, asked: _Asked, begin: Value, length: Value) -> Value:
        """Write the scaled logits, then minus infinity to the end of the last vector; returns the largest."""
        k = self.k
        source = k.at(self.call.logits, asked.row * self.call.width + begin, F32)
        tops = {
            lanes: k.variable(k.constant(_LOWEST, vector(F32, lanes) if lanes > 1 else F32)) for lanes in (1, LANES)
        }
        k.store(k.constant(_LOWEST, vector(F32)), self.scaled, length // LANES * LANES)

        def scale(index: Value, lanes: int) -> None:
            raw = k.read(source, F32, index, lanes)
            scaled = k.select(raw < float("inf"), raw, _LOWEST) / asked.heat
            k.store(scaled, self.scaled, index)
            tops[lanes].value = _larger(scaled, tops[lanes].value)

        k.across(length, scale)
        return _larger(tops[1].value, k.folded(tops[LANES].value, _larger))

    def _make(self, noise: PositionNoise, wanted: tuple[Value, ...], begin: Value, length: Value) -> None:
        """Write the exponentials, if they are not there yet."""
        k = self.k
        others = [made.value.differs(value) for made, value in zip(self.made, wanted, strict=True)]
        with k.when(others[0] | others[1] | others[2]):
            for made, value in zip(self.made, wanted, strict=True):
                made.value = value
            if self.call.own_ids:
                self._copy_ids(begin, length)
            with k.loop(0, length, LANES) as at:
                columns = k.spread(k.integer(begin + at, I32)) + k.places(range(LANES))
                ids = k.load(self.ids, vector(I32), at) if self.call.own_ids else columns
                k.store(noise.exponential(noise.uniform(ids)), self.exponentials, at)

    def _copy_ids(self, begin: Value, length: Value) -> None:
        k = self.k
        k.store(k.constant(0, vector(I32)), self.ids, length // LANES * LANES)
        source = k.at(self.call.token_ids, begin, I64)

        def copy(index: Value, lanes: int) -> None:
            ids = k.load(source, I64 if lanes == 1 else vector(I64, lanes), index)
            k.store(k.integer(ids, I32), self.ids, index)

        k.across(length, copy)


@Compiled
def _listing(piece: int, own_ids: bool) -> Kernel:
    k = Kernel("list_children")
    call = _Call(k, piece, own_ids)
    lister = _Lister(call)
    with k.share(call.pieces * call.rows) as unit:
        asked, at = call.asked_of(unit % call.rows), unit // call.rows
        plain = asked.greedy | asked.filters
        with k.when(plain):
            lister.write(asked, at, k.select(asked.filters, asked.kept, call.count), noisy=False)
        with k.when(plain.equals(0)):
            lister.write(asked, at, call.count, noisy=True)
    return k


@Compiled
def _merging(piece: int, own_ids: bool) -> Kernel:
    return _Merger(_Call(Kernel("merge_children"), piece, own_ids)).write()


class _Merger:
    """Merges the lists of a row, and writes its children."""

    def __init__(self, call: _Call) -> None:
        k = self.k = call.k
        self.call, self.lister = call, _Lister(call)
        self.best, self.likeliest = self.lister.list, Largest(k)
        self.weights, self.kept, self.ids = k.array(F32, MOST), k.array(F32, MOST), k.array(I32, MOST)

    def write(self) -> Kernel:
        k, call = self.k, self.call
        with k.share(call.rows) as row:
            asked, whole = call.asked_of(row), k.variable(k.constant(1))
            with k.when(asked.filters):
                whole.value = self._kept_whole(asked)
                with k.when(whole.value.differs(0)), k.loop(0, call.pieces) as piece:
                    self.lister.write(asked, piece, call.count, noisy=True)
            with k.when(whole.value.differs(0)):
                top = self._merge(self.best, row, call.count)
                self._write_row(row, top + k.log(self._mass(row, _or_zero(k, top))))
        return k

    def _merge(self, into: Largest, row: Value, count: Value) -> Value:
        """The largest of the row's lists; returns the largest of the pieces' tops."""
        k, call = self.k, self.call
        into.clear(count)
        top = k.variable(k.constant(_LOWEST, F32))
        with k.loop(call.place(row, k.constant(0)), call.place(row + 1, k.constant(0))) as place:
            into.offer_stored(*call.list_at(place))
            top.value = _larger(k.load(call.tops, F32, place), top.value)
        return top.value

    def _mass(self, row: Value, top: Value) -> Value:
        """The sum of the row's exponentials, relative to ``top``."""
        k, call = self.k, self.call
        mass = k.variable(k.constant(0.0, F32))
        with k.loop(call.place(row, k.constant(0)), call.place(row + 1, k.constant(0))) as place:
            weight = k.exp(k.load(call.tops, F32, place) - top)
            mass.value = k.fma(k.load(call.masses, F32, place), weight, mass.value)
        return mass.value

    # -- filters ----------------------------------------------------------------------------------------------------

    def _kept_whole(self, asked: _Asked) -> Value:
        """Write the children of a row whose filters keep no more than the likeliest; returns, int64, whether more."""
        k = self.k
        top = _or_zero(k, self._merge(self.likeliest, asked.row, asked.kept))
        whole = k.select(self._filter(asked, top), k.constant(1), 0)
        with k.when(whole.equals(0)):
            self._add_noise(asked)
            largest = _or_zero(k, k.load(self.best.values, F32))
            mass = k.variable(k.constant(0.0, vector(F32)))
            with k.loop(0, MOST, LANES) as at:
                mass.value = mass.value + k.exp(k.load(self.best.values, vector(F32), at) - largest)
            self._write_row(asked.row, largest + k.log(k.total(mass.value)))
        return whole

    def _filter(self, asked: _Asked, top: Value) -> Value:
        """Write the likeliest that are kept, minus infinity for others; returns whether the filters are for naught."""
        k = self.k
        by_k = k.variable(k.constant(0.0, F32))
        with k.loop(0, MOST, LANES) as at:
            k.store(k.exp(k.load(self.likeliest.values, vector(F32), at) - top), self.weights, at)
            k.store(k.constant(_LOWEST, vector(F32)), self.kept, at)
        with k.loop(0, asked.kept) as rank:
            by_k.value = by_k.value + k.load(self.weights, F32, rank)
        enough = asked.p * k.select(asked.by_k, by_k.value, self._mass(asked.row, top))
        before, left_out = k.variable(k.constant(0.0, F32)), k.variable(asked.by_k)
        with k.loop(0, asked.kept) as rank:
            value, weight = k.load(self.likeliest.values, F32, rank), k.load(self.weights, F32, rank)
            stays = ((before.value < enough) | (asked.p >= 1.0)) & (weight >= asked.min_p) & (value > _LOWEST)
            before.value = before.value + weight
            k.store(k.select(stays, value, _LOWEST), self.kept, rank)
            left_out.value = left_out.value | stays.equals(0)
        return left_out.value.equals(0)

    def _add_noise(self, asked: _Asked) -> None:
        """Put what is kept in the order of its noisy logits."""
        k = self.k
        noise = PositionNoise(k, asked.seed, asked.position)
        self.best.clear(k.constant(MOST))
        with k.loop(0, asked.kept, LANES) as at:
            columns = k.load(self.likeliest.columns, vector(I32), at)
            ids = columns
            if self.call.own_ids:
                with k.loop(at, at + LANES) as rank:
                    k.store(k.integer(self._token(k.load(self.likeliest.columns, I32, rank)), I32), self.ids, rank)
                ids = k.load(self.ids, vector(I32), at)
            self.best.offer(k.load(self.kept, vector(F32), at) + noise.gumbel(noise.uniform(ids)), columns)

    # -- results ----------------------------------------------------------------------------------------------------

    def _token(self, column: Value) -> Value:
        place = self.k.integer(column, I64)
        return self.k.load(self.call.token_ids, I64, place) if self.call.own_ids else place

    def _write_row(self, row: Value, log_sum: Value) -> None:
        """The first entries; one that is minus infinity is none."""
        k, call = self.k, self.call
        with k.loop(0, call.count) as rank:
            value, place = k.load(self.best.values, F32, rank), row * call.count + rank
            token = self._token(k.load(self.best.columns, I32, rank))
            k.store(k.select(value > _LOWEST, token, 0), call.tokens, place)
            k.store(k.select(value > _LOWEST, value - log_sum, _LOWEST), call.chances, place)


def _larger(first: Value, second: Value) -> Value:
    """Of two that are not NaN."""
    return first.kernel.select(first > second, first, second)


def _or_zero(k: Kernel, top: Value) -> Value:
    """What exponentials are relative to: any number where there is nothing but minus infinity."""
    return k.select(top > _LOWEST, top, 0.0)
