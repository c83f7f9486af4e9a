"""The largest of what a row of a kernel has met, in order: a list so short that it is moved at every entry."""

from __future__ import annotations

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.values import F32, I1, I16, I32, I64, LANES, Value, vector
from foresay.verifier.ops.records import MOST_CHILDREN

#: Vectors of entries: of as many children as a node may have, and one to see whether there are more.
_VECTORS = MOST_CHILDREN // LANES + 1
#: Numbers that a list takes room for, of its values and of its columns.
ROOM = LANES * (1 + _VECTORS)


class Largest:
    """Entries of a value, fp32, and a column, int32: largest value first, and of equal ones the lowest column.

    ::

        one vector     what is larger than all
        five vectors   the entries, then minus infinity

    Such lists stand one behind the other in memory; this is the one that is worked on.
    """

    def __init__(self, kernel: Kernel, values: Value, columns: Value) -> None:
        """values, columns: where the first list begins."""
        self._k, self._first = kernel, (values, columns)
        self._least = kernel.variable(kernel.constant(float("-inf"), F32))
        self._number, self._count = (kernel.variable(kernel.constant(value)) for value in (0, 1))
        self._offered = kernel.array(F32, LANES), kernel.array(I32, LANES)

    def turn_to(self, number: Value, count: Value) -> None:
        """Work on a list from now on, and keep the ``count`` largest, 1 to 65. Both are int64."""
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
        """Make one empty, whatever was there. It must be turned to behind that."""
        k = self._k
        values, columns = self.list_at(number)
        for room, of, beyond, nothing in ((values, F32, float("inf"), float("-inf")), (columns, I32, -1, 0)):
            k.store(k.constant(beyond, vector(of)), room, -LANES)
            for at in range(0, _VECTORS * LANES, LANES):
                k.store(k.constant(nothing, vector(of)), room, at)

    def begin(self, count: Value) -> None:
        """Make the first list empty, and work on it."""
        self.clear(self._k.constant(0))
        self.turn_to(self._k.constant(0), count)

    def may_hold(self, values: Value) -> Value:
        """Whether any lane is larger than the least entry."""
        return self._lanes(values).differs(0)

    def offer(self, values: Value, columns: Value) -> None:
        """Take in the lanes that are larger than the least entry, without NaN. Columns rise from call to call, or there
        is room for all that come."""
        k = self._k
        lanes = k.variable(self._lanes(values))
        for source, room in zip((values, columns), self._offered, strict=True):
            k.store(source, room)
        with k.during(lanes):
            lane = k.call("llvm.cttz.i64", I64, lanes.value, k.constant(0, I1))
            self._insert(*(k.load(room, of, lane) for room, of in zip(self._offered, (F32, I32), strict=True)))
            lanes.value = lanes.value & (lanes.value - 1)

    def take_in(self, values: Value, columns: Value) -> None:
        """Offer the entries of another list, which has kept as many."""
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
        """Every entry behind its place moves on by one, the last vector first; the last entry is lost."""
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
        """Sixteen, from ``at`` on."""
        return self._k.load(self.values, vector(F32), at), self._k.load(self.columns, vector(I32), at)
