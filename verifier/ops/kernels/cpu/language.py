"""Triton's language for a CPU: a kernel is run once as Python, and its operations are emitted as loops.

A kernel shared by both compilers is a Triton function; here a :class:`Language` is its ``tl``. A block is an expression
until it is stored or summed, so a kernel's work on a row is one loop over it, vector by vector::

    a loop     is bounded by ``counting < number`` in a mask; conditions of a mask that do not depend on the loop are a
               branch around it, the others a branch inside, number by number
    a sum      lane by lane, then over the lanes, then the rest; sums of products are chains of FMAs
    a store    of a whole block: afterwards the block is what was stored
    a barrier  what was loaded before it is saved before its memory is stored to

The subset: no branch on a run-time number, loops (``tl.range``) that change only what is stored or ``updated``, half
types only converted, sums along the last axis, with vectors contiguous memory. All else is refused when it is written.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from types import FunctionType
from typing import Any

import llvmlite.ir as ir

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.blocks import COMPARED, Block, Consecutive, Index, Mask, Pointer, shape_of
from foresay.verifier.ops.kernels.cpu.functions import OWN, Functions
from foresay.verifier.ops.kernels.cpu.values import (
    BF16,
    E4M3,
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    Value,
    element,
    lanes_of,
    vector,
)

_WHOLE = (I1, I8, I16, I32, I64)
#: The longest loop whose length LLVM sees: unrolling longer ones takes it seconds.
_UNROLLED = 256


class Language(Functions):
    """The ``tl`` of kernels. programs: the ids of this program. vectors: whether last axes are processed in vectors."""

    float32, int32, int64, int8, constexpr, static_range = F32, I32, I64, I8, object, range
    div_rn = staticmethod(operator.truediv)

    def __init__(self, k: Kernel, programs: Sequence[Value], vectors: bool) -> None:
        self.k, self.programs, self.vectors = k, programs, vectors
        self._zero = k.constant(0)
        self._read: dict[tuple[int, Index], tuple[Block, Value]] = {}
        self._known: list[Block] = []
        self._loads: list[tuple[str, Block]] = []
        self._held: list[tuple[str, Block]] = []
        self._stores: dict[str, int] = {}

    def run(self, jit: Any, *arguments: Any, **constants: Any) -> Any:
        """Run a function of Triton's in this language."""
        names = {name: self._meant(value) for name, value in jit.fn.__globals__.items()}
        return FunctionType(jit.fn.__code__, names, jit.fn.__name__, jit.fn.__defaults__)(*arguments, **constants)

    def _meant(self, value: Any) -> Any:
        """The meaning of a name of a kernel's module in this language."""
        if hasattr(value, "fn") and hasattr(value, "arg_names"):
            own = getattr(self, value.fn.__name__, None) if value.fn.__name__ in OWN else None
            return own or (lambda *arguments, **constants: self.run(value, *arguments, **constants))
        if type(value).__name__ == "constexpr":
            return value.value
        return self if getattr(value, "__name__", "") == "triton.language" else value

    def pointer(self, name: str, base: Value, of: ir.Type) -> Pointer:
        """An argument."""
        return Pointer(name, base, of, self.full((), 0, I64))

    def number(self, value: Value) -> Block:
        """A run-time number."""
        return Block(self, value.type, (), lambda _: value)

    # -- expressions ------------------------------------------------------------------------------------------------

    def read(self, block: Block, index: Index) -> Value:
        """A block's value at an index: emitted once in each loop body."""
        if not block.shape:
            return block.at(())
        own = zip(block.shape, index[len(index) - len(block.shape) :], strict=True)
        key = id(block), tuple(self._zero if size == 1 else at for size, at in own)
        if key not in self._read:
            self._read[key] = block, block.at(key[1])  # the block too: while it lives no other has its id
        return self._read[key][1]

    def made(self, of: ir.Type, make: Callable[..., Value], *blocks: Block) -> Block:
        """A block computed elementwise from blocks."""
        return Block(self, of, shape_of(*blocks), lambda index: make(*(self.read(each, index) for each in blocks)))

    def converted(self, value: Value, of: ir.Type, exact: bool = False) -> Value:
        """As another type. exact: denormal numbers too, as in ``narrowed``."""
        k, mine = self.k, element(value.type)
        if mine is of:
            return value
        if mine is I1:
            return self.converted(Value(k, k.builder.zext(value.raw, k.like(value, I32))), of)
        if mine in _WHOLE and of in _WHOLE:
            return k.integer(value, of)
        if of is E4M3 and mine in _WHOLE:
            return k.bits(k.integer(value, I8), k.like(value, of))
        return k.narrowed(k.as_float(value) if mine is I32 else k.widened(value), of, exact)

    def _alike(self, one: Any, other: Any) -> tuple[Block, Block, ir.Type]:
        """Both as blocks of one type."""
        types = [each.dtype for each in (one, other) if isinstance(each, Block)]
        if isinstance(one, float) or isinstance(other, float):
            types.append(F32)
        assert not {F16, BF16, E4M3} & set(types), "half types are only converted"
        of = F32 if F32 in types else max(types, key=lambda each: each.width)
        first, second = (each.to(of) if isinstance(each, Block) else self.full((), each, of) for each in (one, other))
        return first, second, of

    def combined(self, name: str, one: Any, other: Any) -> Any:
        """The result of an operator on a block and another one, or a number."""
        if isinstance(one, bool) or isinstance(other, bool):
            assert name == "and_", "of what is known only masks are made"
            return (other if one else False) if isinstance(one, bool) else (one if other else False)
        if name == "lt" and isinstance(one, Block) and isinstance(other, int) and one.below <= other:
            return True
        first, second, of = self._alike(one, other)
        if name in COMPARED:
            made = self.made(I1, COMPARED[name], first, second)
            if name == "lt" and first.counts is not None and not second.shape:
                made.limit = first.counts, first, second
            return made
        made = self.made(of, getattr(operator, name), first, second)
        if name == "and_" and of is I1:
            made.parts = [*first.parts, *second.parts]
        if name == "mul":
            made.factors = first, second
        if name in ("add", "sub") and not second.shape:
            made.counts = first.counts
        if name == "add" and not first.shape:
            made.counts = second.counts
        return made

    def where(self, condition: Mask, yes: Any, no: Any) -> Any:
        """``yes`` where the condition holds."""
        if isinstance(condition, bool):
            return yes if condition else no
        if isinstance(yes, Pointer):
            first, second = (self.k.at(each.base, self.read(each.offset, ()), each.of) for each in (yes, no))
            base = self.k.select(self.read(condition, ()), first, second)
            return self.pointer(f"{yes.name} or {no.name}", base, yes.of)
        if not isinstance(yes, Block) and not isinstance(no, Block):
            yes = self.full((), yes, F32 if isinstance(yes, float) else I64)
        if not (isinstance(yes, Block) and isinstance(no, Block) and yes.dtype is no.dtype):
            yes, no, _ = self._alike(yes, no)
        return self.made(yes.dtype, self.k.select, condition, yes, no)

    def minimum(self, one: Any, other: Any) -> Block:
        """The smaller one."""
        first, second, of = self._alike(one, other)
        return self.made(of, self.k.smallest, first, second)

    def maximum(self, one: Any, other: Any) -> Block:
        """The larger one."""
        first, second, of = self._alike(one, other)
        return self.made(of, self.k.larger, first, second)

    def fma(self, one: Block, two: Block, three: Block) -> Block:
        """``one * two + three``, rounded once."""
        return self.made(F32, self._fused, one, two, three)

    def _fused(self, *values: Value) -> Value:
        widest = max(values, key=lambda value: lanes_of(value.type))
        return self.k.fma(*(self.k.alike(value, widest)[0] for value in values))

    def cast(self, value: Any, of: ir.Type) -> Any:
        """As another type."""
        return value.to(of) if isinstance(value, Block) else value

    def full(self, shape: Sequence[int], value: float, of: ir.Type) -> Block:
        """A block of equal numbers."""
        return Block(self, of, tuple(shape), lambda _: self.k.constant(value, of))

    def zeros(self, shape: Sequence[int], of: ir.Type) -> Block:
        """Zeros."""
        return self.full(shape, 0, of)

    def program_id(self, axis: int) -> Block:
        """The id of this program."""
        return self.number(self.programs[axis])

    def arange(self, first: int, end: int) -> Block:
        """Consecutive numbers."""
        assert first == 0, "from none"
        made = Block(self, I64, (end,), lambda index: index[0])
        made.counts, made.below = -1, end
        return made

    def range(self, count: int | Block) -> Iterator[Block]:
        """A loop of the machine: its body is emitted once, and changes only what is ``updated`` or stored."""
        end = self.read(count.to(I64), ()) if isinstance(count, Block) else count
        with self.k.loop(0, end) as at, self._knowing():
            yield self.number(at)

    # -- loops ------------------------------------------------------------------------------------------------------

    def _each(self, shape: tuple[int, ...], mask: Mask, body: Callable[[Index], None], vectors: bool,
              index: Index = ()) -> None:  # fmt: skip
        """Emit a body for all indices of a shape where the mask holds. index: of the outer axes."""
        if mask is False:
            return
        left, parts, outside, limits = len(shape) - len(index), self._unknown(mask), [], []
        for part in parts:
            if math.prod(part.shape[max(len(part.shape) - left, 0) :]) == 1:
                outside.append(part)
            elif part.limit is not None and part.limit[0] == -left:
                limits.append(part)
        begin = (*index, *[self._zero] * left)
        branch = self.k.when(self._all(outside, begin)) if outside else nullcontext()
        with branch, self._knowing(*outside, *limits):
            if not left:
                body(index)
            elif shape[-left] == 1:
                self._each(shape, mask, body, vectors, (*index, self._zero))
            elif vectors and left == 1 and len(parts) == len(outside) + len(limits):
                self.k.across(self._end(shape[-1], limits, begin, _UNROLLED), self._walked(body, index))
            else:
                with self.k.loop(0, self._end(shape[-left], limits, begin)) as at, self._knowing():
                    self._each(shape, mask, body, vectors, (*index, at))

    def _walked(self, body: Callable[[Index], None], index: Index) -> Callable[[Value, int], None]:
        def write(at: Value, lanes: int) -> None:
            with self._knowing():
                body((*index, at if lanes == 1 else Consecutive(self.k, at)))

        return write

    def _end(self, size: int, limits: Sequence[Block], begin: Index, known: int = 0) -> Value:
        """The end of a loop. known: the largest bound that LLVM sees."""
        end = self.k.constant(size) if size <= known else self.k.hidden(size)
        for _, less, more in (part.limit for part in limits if part.limit is not None):
            end = self.k.smallest(self.read(more, ()) - self.read(less, begin), end)
        return end

    @contextmanager
    def _knowing(self, *parts: Block) -> Iterator[None]:
        """In the block these conditions hold; values read there are not reused afterwards."""
        before = self._known, self._read
        self._known, self._read = [*self._known, *parts], {}
        yield
        self._known, self._read = before

    def _unknown(self, mask: Mask) -> list[Block]:
        """The conditions of a mask that no loop or branch guarantees yet."""
        parts = [] if isinstance(mask, bool) else mask.parts
        return [part for part in parts if not any(part is each for each in self._known)]

    def _all(self, parts: Sequence[Block], index: Index) -> Value:
        return reduce(operator.and_, (self.read(part, index) for part in parts))

    # -- memory -----------------------------------------------------------------------------------------------------

    def load(self, pointer: Pointer, mask: Mask = True, other: float | None = None) -> Block:
        """The loaded values; ``other``, or 0, where the mask does not hold."""
        if mask is False:
            return self.full((), other or 0, pointer.of)
        stores, of = self._stores.get(pointer.name, 0), pointer.of

        def at(index: Index) -> Value:
            assert self._stores.get(pointer.name, 0) == stores, f"{pointer.name} is read after it was stored to"
            parts, position = self._unknown(mask), self.read(pointer.offset, index)
            where = self.k.at(pointer.base, position.first if isinstance(position, Consecutive) else position, of)
            if parts:
                there = self._all(parts, index)
                if lanes_of(there.type):
                    return self.k.masked(where, of, there, other or 0)
                where = self.k.select(there, where, self.k.filled(of, other or 0))
            return self.k.load(where, vector(of) if isinstance(position, Consecutive) else of)

        made = Block(self, of, shape_of(pointer.offset, mask), at)
        made.within = mask if other is None else True
        if made.shape:
            self._loads.append((pointer.name, made))
        return made

    def store(self, pointer: Pointer, value: Any, mask: Mask = True) -> None:
        """Store where the mask holds."""
        held = [each for name, each in self._held if name == pointer.name]
        self._held = [pair for pair in self._held if pair[0] != pointer.name]
        for each in held:
            self.kept(each)
        self._stored(pointer, value, mask, self.vectors)

    def _stored(self, pointer: Pointer, value: Any, mask: Mask, vectors: bool) -> None:
        block = value if isinstance(value, Block) else self.full((), value, pointer.of)

        def write(index: Index) -> None:
            number = self.converted(self.read(block, index), pointer.of, exact=True)
            position = self.read(pointer.offset, index)
            if isinstance(position, Consecutive):
                number, position = number if lanes_of(number.type) else self.k.spread(number), position.first
            self.k.store(number, pointer.base, position)

        self._each(shape_of(pointer.offset, block, mask), mask, write, vectors)
        self._stores[pointer.name] = self._stores.get(pointer.name, 0) + 1
        if mask is True and block.shape == pointer.offset.shape != () and block.dtype is pointer.of:
            block.at, block.factors = self.load(pointer).at, None  # what it was made of may be stored to

    def debug_barrier(self) -> None:
        """All have loaded before one stores."""
        self._held = list(self._loads)

    def kept(self, block: Block, vectors: bool | None = None) -> Block:
        """The same, saved in this program's own memory."""
        index: Any = self.full((), 0, I64)
        for axis, size in enumerate(block.shape):
            key = tuple(slice(None) if at == axis else None for at in range(len(block.shape)))
            index = index * size + self.arange(0, size)[key]
        room = self.k.array(block.dtype, math.prod(block.shape))
        block.home = Pointer(f"block {len(self._stores)}", room, block.dtype, index)
        self._stored(block.home, block, block.within, self.vectors if vectors is None else vectors)
        block.at = self.load(block.home).at
        return block

    def updated(self, before: Block, after: Block) -> Block:
        """A kept block, written over number by number."""
        assert before.home is not None and before.shape == after.shape, "it was kept in this shape"
        self._stored(before.home, after, True, self.vectors)
        before.at = self.load(before.home).at
        return before

    # -- sums -------------------------------------------------------------------------------------------------------

    def sum(self, x: Block, axis: int) -> Block:
        """The sum along the last axis."""

        def add(total: Value, at: Index) -> Value:
            if x.factors is None or x.dtype is not F32:
                return total + self.read(x, at)
            return self._fused(*(self.read(each, at) for each in x.factors), total)

        return self._folded(x, axis, 0, add, operator.add)

    def max(self, x: Block, axis: int) -> Block:
        """The largest along the last axis; NaN is left out."""
        least = -math.inf if x.dtype is F32 else -(1 << (x.dtype.width - 1))
        return self._folded(x, axis, least, lambda total, at: self.k.larger(self.read(x, at), total), self.k.larger)

    def min(self, x: Block, axis: int) -> Block:
        """The smallest along the last axis, of integers."""
        most, smaller = (1 << (x.dtype.width - 1)) - 1, self.k.smallest
        return self._folded(x, axis, most, lambda total, at: smaller(self.read(x, at), total), smaller)

    def whole_sum(self, x: Block) -> Block:
        """The sum of all numbers, one after the other."""
        total = self.k.variable(self.k.constant(0, x.dtype))

        def add(index: Index) -> None:
            total.value = total.value + self.read(x, index)

        self._each(x.shape, True, add, False)
        return self.number(total.value)

    def _folded(self, x: Block, axis: int, start: float, add: Callable[[Value, Index], Value],
                join: Callable[[Value, Value], Value]) -> Block:  # fmt: skip
        assert axis == len(x.shape) - 1, "along the last axis"
        k, of = self.k, x.dtype

        def fold(index: Index) -> Value:
            rest = k.variable(k.constant(start, of))
            whole = k.variable(k.constant(start, vector(of))) if self.vectors else rest

            def more(at: Index) -> None:
                total = whole if isinstance(at[-1], Consecutive) else rest
                total.value = add(total.value, at)

            self._each(x.shape, True, more, self.vectors, index)
            return join(k.folded(whole.value, join), rest.value) if self.vectors else rest.value

        made = Block(self, of, x.shape[:-1], fold)
        return self.kept(made, vectors=False) if made.shape else made

    def cumsum(self, x: Block, axis: int) -> Block:
        """Cumulative sums along the only axis."""
        assert axis == 0 and not self.vectors, "number by number"
        total = self.k.variable(self.k.constant(0, x.dtype))

        def add(index: Index) -> Value:
            total.value = total.value + self.read(x, index)
            return total.value

        return self.kept(Block(self, x.dtype, x.shape, add))
