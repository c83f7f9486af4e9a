"""What the kernels that find children are given, and the way through a piece of a row (see children.py)."""

from __future__ import annotations

from dataclasses import dataclass

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.largest import Largest
from foresay.verifier.ops.kernels.cpu.noise import PositionNoise
from foresay.verifier.ops.kernels.cpu.types import F32, I32, I64, LANES, vector
from foresay.verifier.ops.kernels.cpu.values import Value
from foresay.verifier.ops.records import COLDEST, MOST_CHILDREN

LOWEST = float("-inf")


class Call:
    """What both kernels are given."""

    def __init__(self, k: Kernel, piece: int, own_ids: bool) -> None:
        self.k, self.piece, self.own_ids = k, piece, own_ids
        self.logits, self.token_ids, *self.arrays = (k.pointer(index) for index in range(8))
        self.values, self.columns, self.threads, self.tops, self.masses, self.tokens, self.chances = (
            k.pointer(index) for index in range(8, 15)
        )
        self.width, self.count, self.most_rows, self.rows = k.number(15), k.number(16), k.number(17), k.counted(18)
        self.pieces = (self.width + (piece - 1)) // piece

    def asked_of(self, row: Value) -> Asked:
        """What is asked of a row."""
        k = self.k
        heat, top_k, p, min_p, seed, position = (
            k.load(array, of, row) for array, of in zip(self.arrays, (F32, I32, F32, F32, I64, I64), strict=True)
        )
        greedy, by_k = heat < COLDEST, (top_k > 0) & (top_k <= MOST_CHILDREN)
        filters = (by_k | (p < 1.0) | (min_p > 0.0)) & greedy.equals(0)
        kept = k.select(by_k, k.integer(top_k, I64), MOST_CHILDREN)
        return Asked(row, k.select(greedy, 1.0, heat), greedy, filters, by_k, kept, p, min_p, seed, position)

    def list_of(self, thread: Value, row: Value) -> Value:
        """The number of the list that a thread has of a row."""
        return thread * self.most_rows + row

    def places(self, row: Value) -> tuple[Value, Value]:
        """Where the tops and masses of a row's pieces begin and end."""
        return row * self.pieces, (row + 1) * self.pieces


@dataclass(frozen=True)
class Asked:
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


class Lister:
    """Goes through a piece of a row: its largest into a list, and the sum of its exponentials, relative to its largest
    logit."""

    def __init__(self, call: Call, largest: Largest) -> None:
        k = self.k = call.k
        self.call, self.largest, room = call, largest, call.piece + LANES
        self.scaled, self.exponentials, self.ids = k.array(F32, room), k.array(F32, room), k.array(I32, room)
        self.made = [k.variable(k.constant(-1)) for _ in range(3)]  # piece, seed and position of the exponentials

    def write(self, asked: Asked, piece: Value, noisy: bool) -> None:
        """Go through it, with noise or without."""
        k, call = self.k, self.call
        begin = piece * call.piece
        length = k.smallest(call.width - begin, call.piece)
        top = self._scale(asked, begin, length)
        noise = PositionNoise(k, asked.seed, asked.position)
        if noisy:
            self._make(noise, (piece, asked.seed, asked.position), begin, length)
        mass = k.variable(k.constant(0.0, vector(F32)))
        reference = k.spread(or_zero(top))
        with k.loop(0, length, LANES) as at:
            scaled = k.load(self.scaled, vector(F32), at)
            weight = k.exp(scaled - reference)
            if noisy:
                exponential = k.load(self.exponentials, vector(F32), at)
                weight = weight / exponential
                with k.when(self.largest.may_hold(scaled + noise.at_most(exponential))):
                    self.largest.offer(scaled + noise.of_exponential(exponential), self._columns(begin + at))
            else:
                with k.when(self.largest.may_hold(scaled)):
                    self.largest.offer(scaled, self._columns(begin + at))
            mass.value = mass.value + weight
        place = call.places(asked.row)[0] + piece
        k.store(top, call.tops, place)
        k.store(k.total(mass.value), call.masses, place)

    def _columns(self, first: Value) -> Value:
        return self.k.spread(self.k.integer(first, I32)) + self.k.places(range(LANES))

    def _scale(self, asked: Asked, begin: Value, length: Value) -> Value:
        """Write the scaled logits, then minus infinity to the end of the last vector; returns the largest."""
        k = self.k
        source = k.at(self.call.logits, asked.row * self.call.width + begin, F32)
        tops = {lanes: k.variable(k.constant(LOWEST, vector(F32, lanes) if lanes > 1 else F32)) for lanes in (1, LANES)}
        k.store(k.constant(LOWEST, vector(F32)), self.scaled, length // LANES * LANES)

        def scale(index: Value, lanes: int) -> None:
            raw = k.read(source, F32, index, lanes)
            scaled = k.select(raw < float("inf"), raw, LOWEST) / asked.heat
            k.store(scaled, self.scaled, index)
            tops[lanes].value = larger(scaled, tops[lanes].value)

        k.across(length, scale)
        return larger(tops[1].value, k.folded(tops[LANES].value, larger))

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
                ids = k.load(self.ids, vector(I32), at) if self.call.own_ids else self._columns(begin + at)
                k.store(noise.exponential(noise.uniform(ids)), self.exponentials, at)

    def _copy_ids(self, begin: Value, length: Value) -> None:
        k = self.k
        k.store(k.constant(0, vector(I32)), self.ids, length // LANES * LANES)
        source = k.at(self.call.token_ids, begin, I64)

        def copy(index: Value, lanes: int) -> None:
            ids = k.load(source, I64 if lanes == 1 else vector(I64, lanes), index)
            k.store(k.integer(ids, I32), self.ids, index)

        k.across(length, copy)


def larger(first: Value, second: Value) -> Value:
    """Of two that are not NaN."""
    return first.kernel.select(first > second, first, second)


def or_zero(top: Value) -> Value:
    """What exponentials are relative to: any number where there is nothing but minus infinity."""
    return top.kernel.select(top > LOWEST, top, 0.0)
