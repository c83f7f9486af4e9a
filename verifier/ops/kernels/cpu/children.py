"""The likeliest children of each row in two entries, without sorting the vocabulary.

::

    list    pieces x rows   the largest of a piece of a row, with noise or without, and the sum of the exponentials
    merge   rows            the lists of a row; where filters are on, what they keep of the 64 likeliest

A thread has one list for each row, which goes on from piece to piece. A row that filters is listed without noise, which
is added to what its filters keep; where they keep more than 64, the thread that merges the row goes through it again,
with noise. The noise of a piece is used again by the next row at the same position, as siblings are. A row's sums run
in the order of its columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu import launch, threads
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.largest import ROOM, Largest
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.listing import LOWEST, Asked, Call, Lister, larger, or_zero
from foresay.verifier.ops.kernels.cpu.noise import PositionNoise
from foresay.verifier.ops.kernels.cpu.types import F32, I32, I64, LANES, vector
from foresay.verifier.ops.kernels.cpu.values import Value
from foresay.verifier.ops.records import MOST_CHILDREN

if TYPE_CHECKING:
    from foresay.verifier.ops.records import RowSampling

#: Columns of a piece; the order of a row's sums follows from it.
PIECE = 2048


def best_children(logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.children.best_children`."""
    rows, width = logits.shape
    s = sampling
    asked = (s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)
    assert all(one.is_contiguous() for one in (logits, *asked)), "a recording would read a copy of what was there"
    pieces = -(-width // PIECE)
    lists = (launch.room((threads.MOST, rows, ROOM), of) for of in (torch.float32, torch.int32))
    numbers = (launch.room((1,), torch.int64), *(launch.room((rows, pieces), torch.float32) for _ in range(2)))
    tokens, chances = launch.room((rows, count), torch.int64), launch.room((rows, count), torch.float32)
    arguments = (
        logits, 0 if token_ids is None else token_ids.contiguous(), *asked, *lists, *numbers, tokens, chances,
        width, count, rows, launch.counted(None, rows),
    )  # fmt: skip
    shape = (PIECE, token_ids is not None)
    _listing(*shape)(*arguments)
    _merging(*shape)(*arguments)
    return tokens, chances


@Compiled
def _listing(piece: int, own_ids: bool) -> Kernel:
    k = Kernel("list_children")
    call = Call(k, piece, own_ids)
    lister = Lister(call, Largest(k, call.values, call.columns))
    k.store(k.threads, call.threads)  # each says the same
    with k.loop(0, call.rows) as row:
        lister.largest.clear(call.list_of(k.thread, row))
    with k.share(call.pieces * call.rows) as unit:
        asked, at = call.asked_of(unit % call.rows), unit // call.rows
        lister.largest.turn_to(call.list_of(k.thread, asked.row), k.select(asked.filters, asked.kept, call.count))
        plain = asked.greedy | asked.filters
        with k.when(plain):
            lister.write(asked, at, noisy=False)
        with k.when(plain.equals(0)):
            lister.write(asked, at, noisy=True)
    return k


@Compiled
def _merging(piece: int, own_ids: bool) -> Kernel:
    return _Merger(Call(Kernel("merge_children"), piece, own_ids)).write()


class _Merger:
    """Merges the lists of a row, and writes its children."""

    def __init__(self, call: Call) -> None:
        k = self.k = call.k
        self.call, self.lists = call, Largest(k, call.values, call.columns)
        self.best, self.likeliest = (Largest(k, k.array(F32, ROOM), k.array(I32, ROOM)) for _ in range(2))
        self.lister = Lister(call, self.best)
        self.weights, self.kept, self.ids = (
            k.array(F32, MOST_CHILDREN),
            k.array(F32, MOST_CHILDREN),
            k.array(I32, MOST_CHILDREN),
        )

    def write(self) -> Kernel:
        k, call = self.k, self.call
        with k.share(call.rows) as row:
            asked, whole = call.asked_of(row), k.variable(k.constant(1))
            with k.when(asked.filters):
                whole.value = self._kept_whole(asked)
            with k.when(asked.filters.equals(0)):
                self._merge(self.best, row, call.count)
            with k.when(whole.value.differs(0)):
                top = self._top(row)
                self._write_row(row, top + k.log(self._mass(row, or_zero(top))))
        return k

    def _merge(self, into: Largest, row: Value, count: Value) -> None:
        """The largest of the row's lists."""
        k, call = self.k, self.call
        self._begin(into, count)
        with k.loop(0, k.load(call.threads, I64)) as thread:
            into.take_in(*self.lists.list_at(call.list_of(thread, row)))

    def _begin(self, largest: Largest, count: Value) -> None:
        first = self.k.constant(0)
        largest.clear(first)
        largest.turn_to(first, count)

    def _top(self, row: Value) -> Value:
        """The row's largest scaled logit."""
        k = self.k
        top = k.variable(k.constant(LOWEST, F32))
        with k.loop(*self.call.places(row)) as place:
            top.value = larger(k.load(self.call.tops, F32, place), top.value)
        return top.value

    def _mass(self, row: Value, top: Value) -> Value:
        """The sum of the row's exponentials, relative to ``top``."""
        k = self.k
        mass = k.variable(k.constant(0.0, F32))
        with k.loop(*self.call.places(row)) as place:
            weight = k.exp(k.load(self.call.tops, F32, place) - top)
            mass.value = k.fma(k.load(self.call.masses, F32, place), weight, mass.value)
        return mass.value

    # -- filters ----------------------------------------------------------------------------------------------------

    def _kept_whole(self, asked: Asked) -> Value:
        """Write the children of a row whose filters keep no more than the likeliest, or find the best of all; returns,
        int64, whether it is all."""
        k, call = self.k, self.call
        self._merge(self.likeliest, asked.row, asked.kept)
        whole = k.select(self._filter(asked, or_zero(k.load(self.likeliest.values, F32))), k.constant(1), 0)
        with k.when(whole.equals(0)):
            self._add_noise(asked)
            largest = or_zero(k.load(self.best.values, F32))
            mass = k.variable(k.constant(0.0, vector(F32)))
            with k.loop(0, MOST_CHILDREN, LANES) as at:
                mass.value = mass.value + k.exp(k.load(self.best.values, vector(F32), at) - largest)
            self._write_row(asked.row, largest + k.log(k.total(mass.value)))
        with k.when(whole.differs(0)):
            self._begin(self.best, call.count)
            with k.loop(0, call.pieces) as piece:
                self.lister.write(asked, piece, noisy=True)
        return whole

    def _filter(self, asked: Asked, top: Value) -> Value:
        """Write the likeliest that are kept, minus infinity for others; returns whether the filters are for naught."""
        k = self.k
        by_k = k.variable(k.constant(0.0, F32))
        with k.loop(0, MOST_CHILDREN, LANES) as at:
            k.store(k.exp(k.load(self.likeliest.values, vector(F32), at) - top), self.weights, at)
            k.store(k.constant(LOWEST, vector(F32)), self.kept, at)
        with k.loop(0, asked.kept) as rank:
            by_k.value = by_k.value + k.load(self.weights, F32, rank)
        enough = asked.p * k.select(asked.by_k, by_k.value, self._mass(asked.row, top))
        before, left_out = k.variable(k.constant(0.0, F32)), k.variable(asked.by_k)
        with k.loop(0, asked.kept) as rank:
            value, weight = k.load(self.likeliest.values, F32, rank), k.load(self.weights, F32, rank)
            stays = ((before.value < enough) | (asked.p >= 1.0)) & (weight >= asked.min_p) & (value > LOWEST)
            before.value = before.value + weight
            k.store(k.select(stays, value, LOWEST), self.kept, rank)
            left_out.value = left_out.value | stays.equals(0)
        return left_out.value.equals(0)

    def _add_noise(self, asked: Asked) -> None:
        """Put what is kept in the order of its noisy logits."""
        k = self.k
        noise = PositionNoise(k, asked.seed, asked.position)
        self._begin(self.best, k.constant(MOST_CHILDREN))
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
            k.store(k.select(value > LOWEST, token, 0), call.tokens, place)
            k.store(k.select(value > LOWEST, value - log_sum, LOWEST), call.chances, place)
