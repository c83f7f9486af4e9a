"""The largest of what a row of a kernel has met, in order: a list that is short enough to be moved at every entry."""

from __future__ import annotations

from verifier.ops.kernels.cpu.asm import Kernel
from verifier.ops.kernels.cpu.types import F32, I1, I16, I32, I64, LANES, vector
from verifier.ops.kernels.cpu.values import Value

#: Entries of a list at most.
MOST = 64


class Largest:
    """Entries of a value, fp32, and a column, int32: largest value first, and of equal ones the lowest column.

    ::

        -1    what is larger than all
         0    the entries, then minus infinity, in vectors of 16
    """

    def __init__(self, kernel: Kernel) -> None:
        k = self._k = kernel
        self._least = k.variable(k.constant(float("-inf"), F32))
        values, columns = k.array(F32, LANES + MOST), k.array(I32, LANES + MOST)
        k.store(k.constant(float("inf"), vector(F32)), values)
        k.store(k.constant(-1, vector(I32)), columns)
        self.values, self.columns = k.at(values, LANES, F32), k.at(columns, LANES, I32)
        self._offered = k.array(F32, LANES), k.array(I32, LANES)

    def clear(self, count: Value) -> None:
        """Begin anew, with room for the ``count`` largest, 1 to 64; an int64."""
        k = self._k
        self.count, self._vectors = count, (count + (LANES - 1)) // LANES
        self._least.value = k.constant(float("-inf"), F32)
        with k.loop(0, MOST, LANES) as at:
            k.store(k.constant(float("-inf"), vector(F32)), self.values, at)
            k.store(k.constant(0, vector(I32)), self.columns, at)

    def may_hold(self, values: Value) -> Value:
        """Whether any lane is larger than the least entry."""
        return self._lanes(values).differs(0)

    def offer(self, values: Value, columns: Value) -> None:
        """Take in the lanes that are larger than the least entry. No NaN; columns rise from call to call."""
        k = self._k
        lanes = k.variable(self._lanes(values))
        for source, room in zip((values, columns), self._offered, strict=True):
            k.store(source, room)
        with k.during(lanes):
            lane = k.call("llvm.cttz.i64", I64, lanes.value, k.constant(0, I1))
            self._insert(*(k.load(room, of, lane) for room, of in zip(self._offered, (F32, I32), strict=True)))
            lanes.value = lanes.value & (lanes.value - 1)

    def _lanes(self, values: Value) -> Value:
        """A bit for each lane that is larger than the least entry, int64."""
        return self._k.integer(self._k.bits(values > self._least.value, I16), I64) & 0xFFFF

    def _insert(self, value: Value, column: Value) -> None:
        """Every entry behind its place moves on by one, the last vector first; one that has no place there is lost."""
        k = self._k

        def stays(values: Value, columns: Value) -> Value:
            return (values > value) | (values.equals(value) & (columns < column))

        with k.loop(0, self._vectors) as done:
            at = (self._vectors - 1 - done) * LANES
            mine, before = (self._entries(at - back) for back in (0, LANES))
            moved = [k.shuffled(*pair, range(LANES - 1, 2 * LANES - 1)) for pair in zip(before, mine, strict=True)]
            stay, move = stays(*mine), stays(*moved)
            for room, old, new, from_before in zip(self._rooms(), mine, (value, column), moved, strict=True):
                k.store(k.select(stay, old, k.select(move, new, from_before)), room, at)
        self._least.value = k.load(self.values, F32, self.count - 1)

    def _rooms(self) -> tuple[Value, Value]:
        return self.values, self.columns

    def _entries(self, at: Value) -> tuple[Value, Value]:
        """Sixteen, from ``at`` on."""
        return self._k.load(self.values, vector(F32), at), self._k.load(self.columns, vector(I32), at)

    def store(self, values: Value, columns: Value) -> None:
        """The entries, in whole vectors."""
        k = self._k
        with k.loop(0, self.count, LANES) as at:
            for room, entries in zip((values, columns), self._entries(at), strict=True):
                k.store(entries, room, at)

    def offer_stored(self, values: Value, columns: Value) -> None:
        """What another list stored that had room for as many."""
        k = self._k
        with k.loop(0, self.count, LANES) as at:
            self.offer(k.load(values, vector(F32), at), k.load(columns, vector(I32), at))
