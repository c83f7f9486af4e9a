"""Kernels of :mod:`foresay.verifier.ops.sample` and their parts: masks, noise, and sorted lists of a row's largest
values; and which children of a level are kept, small enough for one thread per sequence.

Gumbel noise is computed where it is needed: the integers of :mod:`foresay.spec.sample` bit for bit, its logarithms to
an ulp or two. A token's noise is a function of (seed, position, token id), whichever lane computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.spec.sample import hashed
from foresay.spec.sampling import mix64
from foresay.verifier.ops.kernels.cpu import launch
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import F32, I1, I16, I32, I64, LANES, Value, vector
from foresay.verifier.ops.records import MOST_CHILDREN, Above, Kept, Pieces

#: Vectors of entries: for as many children as a node may have, and one to detect whether there are more.
_VECTORS = MOST_CHILDREN // LANES + 1
#: The size of a list, in numbers, for its values and its columns each.
ROOM = LANES * (1 + _VECTORS)


class Largest:
    """Entries of a value, fp32, and a column, int32: largest value first, and of equal ones the lowest column.

    ::

        one vector     larger than all
        five vectors   the entries, then minus infinity

    Such lists are consecutive in memory; this is the current one.
    """

    def __init__(self, kernel: Kernel, values: Value, columns: Value) -> None:
        """values, columns: where the first list begins."""
        self._k, self._first = kernel, (values, columns)
        self._least = kernel.variable(kernel.constant(float("-inf"), F32))
        self._number, self._count = (kernel.variable(kernel.constant(value)) for value in (0, 1))
        self._offered = kernel.array(F32, LANES), kernel.array(I32, LANES)

    def turn_to(self, number: Value, count: Value) -> None:
        """Switch to a list, and keep its ``count`` largest, 1 to 65. Both are int64."""
        self._number.value, self._count.value = number, count
        self._least.value = self._k.load(self.values, F32, count - 1)

    @property
    def values(self) -> Value:
        """Where the values of the list's entries are."""
        return self.list_at(self._number.value)[0]

    @property
    def columns(self) -> Value:
        """Where their columns are."""
        return self.list_at(self._number.value)[1]

    def clear(self, number: Value) -> None:
        """Clear a list. Call :meth:`turn_to` for it afterwards."""
        k = self._k
        values, columns = self.list_at(number)
        for room, of, beyond, nothing in ((values, F32, float("inf"), float("-inf")), (columns, I32, -1, 0)):
            k.store(k.constant(beyond, vector(of)), room, -LANES)
            for at in range(0, _VECTORS * LANES, LANES):
                k.store(k.constant(nothing, vector(of)), room, at)

    def begin(self, count: Value) -> None:
        """Clear the first list, and switch to it."""
        self.clear(self._k.constant(0))
        self.turn_to(self._k.constant(0), count)

    def may_hold(self, values: Value) -> Value:
        """Whether any lane is larger than the least entry."""
        return self._lanes(values).differs(0)

    def offer(self, values: Value, columns: Value) -> None:
        """Insert the lanes that are larger than the least entry, without NaN. Columns increase from call to call, or
        there is room for all."""
        k = self._k
        lanes = k.variable(self._lanes(values))
        for source, room in zip((values, columns), self._offered, strict=True):
            k.store(source, room)
        with k.during(lanes):
            lane = k.call("llvm.cttz.i64", I64, lanes.value, k.constant(0, I1))
            self._insert(*(k.load(room, of, lane) for room, of in zip(self._offered, (F32, I32), strict=True)))
            lanes.value = lanes.value & (lanes.value - 1)

    def take_in(self, values: Value, columns: Value) -> None:
        """Offer the entries of another list, of the same length."""
        k = self._k
        with k.loop(0, self._count.value, LANES) as at:
            self.offer(k.load(values, vector(F32), at), k.load(columns, vector(I32), at))

    def list_at(self, number: Value) -> tuple[Value, Value]:
        """Where the entries of a list are."""
        values, columns = self._first
        at = number * ROOM + LANES
        return self._k.at(values, at, F32), self._k.at(columns, at, I32)

    def _lanes(self, values: Value) -> Value:
        """A bit for each lane that is larger than the least entry, int64."""
        return self._k.integer(self._k.bits(values > self._least.value, I16), I64) & 0xFFFF

    def _insert(self, value: Value, column: Value) -> None:
        """Every entry after its position moves by one, the last vector first; the last entry is lost."""
        k = self._k

        def stays(values: Value, columns: Value) -> Value:
            return (values > value) | (values.equals(value) & (columns < column))

        vectors = (self._count.value + (LANES - 1)) // LANES
        with k.loop(0, vectors) as done:
            at = (vectors - 1 - done) * LANES
            mine, before = (self._entries(at - back) for back in (0, LANES))
            moved = [k.shuffled(*pair, range(LANES - 1, 2 * LANES - 1)) for pair in zip(before, mine, strict=True)]
            stay, move = stays(*mine), stays(*moved)
            rooms = self.values, self.columns
            for room, old, new, from_before in zip(rooms, mine, (value, column), moved, strict=True):
                k.store(k.select(stay, old, k.select(move, new, from_before)), room, at)
        self._least.value = k.load(self.values, F32, self._count.value - 1)

    def _entries(self, at: Value) -> tuple[Value, Value]:
        """Sixteen entries, from ``at`` on."""
        return self._k.load(self.values, vector(F32), at), self._k.load(self.columns, vector(I32), at)


#: Logits that a thread processes at a time: whole words of a mask.
_COLUMNS = 4096


def keep_allowed(logits: Tensor, allowed: Tensor) -> None:
    """As :func:`foresay.verifier.ops.sample.keep_allowed`; both contiguous."""
    words = allowed.shape[1] if len(allowed) > 1 else 0
    _keeping()(logits, allowed, logits.shape[1], words, len(logits))


@Compiled
def _keeping() -> Kernel:
    k = Kernel("keep_allowed")
    width, pieces = k.number(2), (k.number(2) + (_COLUMNS - 1)) // _COLUMNS
    with k.share(k.number(4) * pieces) as unit:
        row, begin = unit // pieces, unit % pieces * _COLUMNS
        piece = k.at(k.pointer(0), row * width + begin, F32)
        words = k.at(k.pointer(1), row * k.number(3) + begin // 32, I32)

        def keep(index: Value, lanes: int) -> None:
            word, first = k.load(words, I32, index // 32), index % 32
            bits = k.spread(word) >> k.counting(first) if lanes > 1 else word >> k.integer(first, I32)
            value = k.read(piece, F32, index, lanes)
            k.store(k.select((bits & 1).differs(0), value, -float("inf")), piece, index)

        k.across(k.smallest(width - begin, _COLUMNS), keep)
    return k


class PositionNoise:
    """The noise of the tokens at one position. seed, position: int64."""

    def __init__(self, kernel: Kernel, seed: Value, position: Value) -> None:
        key: Value = mix64(mix64(seed) ^ position)  # type: ignore[arg-type, operator]
        self._k, self._low, self._high = kernel, kernel.integer(key, I32), kernel.integer(key >> 32, I32)

    def bits(self, ids: Value) -> Value:
        """31 random bits for each token. ids: int32."""
        bits: Value = hashed(ids, self._low, self._high)
        return bits

    def uniform(self, ids: Value) -> Value:
        """fp32 between 0 and 1, both excluded."""
        k = self._k
        exact = k.as_float(self.bits(ids)) * 2.0**-31 + 2.0**-32
        return k.select(exact < 1.0, exact, 1.0 - 2.0**-24)

    def gumbel(self, uniform: Value) -> Value:
        """fp32: the noise that belongs to a uniform number, ``-log(-log1p(-u))``."""
        return self._k.log(self.exponential(uniform)) * -1.0

    def exponential(self, uniform: Value) -> Value:
        """fp32: ``-log1p(-u)``, at least 2^-32.

        The logarithm is Kahan's: where ``1 - u`` rounds to 1 it is u itself; elsewhere the factor undoes that rounding.
        """
        k = self._k
        rest = k.constant(1.0, uniform.type) - uniform
        lost = k.constant(1.0, uniform.type) - rest
        same = rest.equals(1.0)
        return k.select(same, uniform, k.log(rest) * -1.0 * (uniform / k.select(same, 1.0, lost)))

    def at_most(self, uniform: Value) -> Value:
        """fp32: a cheap upper bound of the noise, tight where noise is large: ``-log`` of the power of 2 below u, or
        below the exponential of u, which is tighter."""
        k = self._k
        power = k.bits(uniform, k.like(uniform, I32)) >> 23
        return k.as_float(power * -1 + 127) * 0.6931472 + 0.0001


_LOWEST = float("-inf")
#: Knots of curves, including infinite ones.
_KNOTS = 2 * LANES


def keep_children(children: Tensor, chances: Tensor, above: Above, marks: Tensor, curves: Pieces) -> Kept:
    """As :func:`foresay.verifier.ops.sample.keep_children`."""
    (sequences, rows, looked), (front, count) = children.shape, (above.scores.shape[1], len(marks))
    assert front <= MOST_CHILDREN and looked <= MOST_CHILDREN, "a tree has no more nodes"
    kept = Kept(*(launch.arena((sequences, count), of) for of in (torch.int64,) * 3 + (torch.float32, torch.int64)))
    knots, slopes, shifts, pieces, least = curves
    _keeping_children(slopes.shape[1] // pieces, pieces, least)(
        children, chances, *above, marks, knots, slopes, shifts, *kept,
        sequences, rows, front, looked, count,
    )  # fmt: skip
    return kept


@Compiled
def _keeping_children(groups: int, pieces: int, least: float) -> Kernel:
    return _Keeper(Kernel("keep_children"), (groups, pieces, least)).write()


class _Keeper:
    """Arguments: the op's arguments, its results, and the numbers S, R, F, k, W."""

    def __init__(self, k: Kernel, curves: tuple[int, int, float]) -> None:
        self.k, self.curves = k, curves
        self.children, self.chances, self.scores, self.words, self.numbers, self.marks = (
            k.pointer(index) for index in range(6)
        )
        self.knots, self.slopes, self.shifts = (k.pointer(index) for index in range(6, 9))
        self.out = Kept(*(k.pointer(index) for index in range(9, 14)))  # type: ignore[arg-type]
        self.sequences, self.rows, self.front, self.looked, self.count = (k.number(index) for index in range(14, 19))
        self.room = k.array(F32, MOST_CHILDREN * MOST_CHILDREN + LANES)

    def write(self) -> Kernel:
        k = self.k
        largest = Largest(k, k.array(F32, ROOM), k.array(I32, ROOM))
        with k.share(self.sequences) as sequence:
            self._score(sequence)
            self._rank(largest)
            with k.loop(0, self.count) as rank:
                self._keep(sequence, rank, largest)
        return k

    def _row(self, sequence: Value, node: Value) -> Value:
        """The offset of a node's children; they are the same for all nodes if there is one row."""
        own = self.k.select(self.rows > 1, node, 0)
        return (sequence * self.rows + own) * self.looked

    def _score(self, sequence: Value) -> None:
        """Write the scores of all children."""
        k = self.k
        with k.loop(0, self.front) as node:
            above, row = k.load(self.scores, F32, sequence * self.front + node), self._row(sequence, node)
            with k.loop(0, self.looked) as rank:
                chance = k.load(self.chances, F32, row + rank)
                hit = self._hit(sequence, rank, chance)
                k.store(k.select(hit < 0.0, hit, 0.0) + above, self.room, node * self.looked + rank)
        k.store(k.constant(_LOWEST, vector(F32)), self.room, self.front * self.looked)

    def _hit(self, sequence: Value, rank: Value, chance: Value) -> Value:
        k, (groups, pieces, least) = self.k, self.curves
        sound = k.select(chance > least, chance, least)
        below = k.constant(0)
        for at in range(0, _KNOTS, LANES):
            lower = k.load(self.knots, vector(F32), at) < sound
            below = below + k.call("llvm.ctpop.i64", I64, k.integer(k.bits(lower, I16), I64) & 0xFFFF)
        group = k.select(rank < groups - 1, rank, groups - 1)
        index = (sequence * groups + group) * pieces + below
        made = k.load(self.slopes, F32, index) * sound + k.load(self.shifts, F32, index)
        return k.select(chance > _LOWEST, made, _LOWEST)

    def _rank(self, largest: Largest) -> None:
        k, first = self.k, self.k.constant(0)
        largest.clear(first)
        largest.turn_to(first, self.count)
        with k.loop(0, self.front * self.looked, LANES) as at:
            scores = k.load(self.room, vector(F32), at)
            with k.when(largest.may_hold(scores)):
                largest.offer(scores, k.spread(k.integer(at, I32)) + k.lane_numbers(range(LANES)))

    def _keep(self, sequence: Value, rank: Value, largest: Largest) -> None:
        """Write one of the kept."""
        k, at = self.k, sequence * self.count + rank
        index = k.integer(k.load(largest.columns, I32, rank), I64)
        node, child = index // self.looked, index % self.looked
        score = k.load(largest.values, F32, rank)
        word = k.load(self.words, I64, sequence * self.front + node) | k.load(self.marks, I64, rank)
        token = k.load(self.children, I64, self._row(sequence, node) + child)
        found = Kept(token, node, k.load(self.numbers, I64, node), score, word)  # type: ignore[arg-type]
        for value, out in zip(found, self.out, strict=True):
            k.store(value, out, at)  # type: ignore[arg-type]
