"""Kernels of :mod:`foresay.verifier.ops.sample` and their parts: masks, noise, and sorted lists of a row's largest
values.

Gumbel noise is computed where it is needed: the integers of :mod:`foresay.spec.sample` bit for bit, its logarithms to
an ulp or two. A token's noise is a function of (seed, position, token id), whichever lane computes it.
"""

from __future__ import annotations

from torch import Tensor

from foresay.spec.sample import hashed
from foresay.spec.sampling import mix64
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import F32, I1, I16, I32, I64, LANES, Value, vector
from foresay.verifier.ops.records import MOST_CHILDREN

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
