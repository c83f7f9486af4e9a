"""The values of Triton kernels on a CPU: blocks of numbers, and pointers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.ir as ir

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.values import F32, I64, Value, lanes_of

#: Operators, by the names of their methods.
COMPARED: dict[str, Callable[[Value, Value], Value]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": Value.equals, "ne": Value.differs
}  # fmt: skip
_COMPUTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift")


class Consecutive(Value):
    """A vector of consecutive int64 from ``first``: adjacent elements."""

    first: Value

    def __init__(self, k: Kernel, first: Value) -> None:
        super().__init__(k, k.integer(k.counting(first), I64).raw)
        object.__setattr__(self, "first", first)

    def __add__(self, other: Any) -> Value:
        return self._moved(other, operator.add)

    def __sub__(self, other: Any) -> Value:
        return self._moved(other, operator.sub)

    __radd__ = __add__

    def _moved(self, other: Value, how: Callable[[Value, Value], Value]) -> Value:
        alone = Value(self.kernel, self.raw)
        return how(alone, other) if lanes_of(other.type) else Consecutive(self.kernel, how(self.first, other))  # type: ignore[arg-type]


#: The index of a read in a block: a number for each axis, or lanes for the last.
Index = tuple[Value, ...]


class Block:
    """Numbers of a type and a shape, for which ``at`` emits code where they are read.

    parts: of a mask, the conditions that must all hold. limit: of the condition ``counting < number``: the axis,
    counted from the last, which is -1, and both sides. counts: the axis along which numbers increase by one. below: a
    known upper bound of all. factors: of a product. within: the mask outside of which nothing is read. home: where it
    is kept.
    """

    def __init__(self, tl: Any, of: ir.Type, shape: tuple[int, ...], at: Callable[[Index], Value]) -> None:
        self.tl, self.dtype, self.shape, self.at = tl, of, shape, at
        self.parts: Sequence[Block] = (self,)
        self.limit: tuple[int, Block, Block] | None = None
        self.counts: int | None = None
        self.below: float = math.inf
        self.factors: tuple[Block, Block] | None = None
        self.within: Mask = True
        self.home: Pointer | None = None
        if not shape:  # a number is known from here on
            value = at(())
            self.at = lambda _: value

    def __getitem__(self, key: tuple[slice | None, ...]) -> Block:
        """The same with a new axis of size 1 for each None."""
        kept, sizes = [at for at, each in enumerate(key) if each is not None], iter(self.shape)
        shape = tuple(1 if each is None else next(sizes) for each in key)
        made = Block(self.tl, self.dtype, shape, lambda index: self.tl.read(self, tuple(index[at] for at in kept)))
        made.below = self.below
        if self.counts is not None:
            made.counts = kept[self.counts] - len(key)
        if self.limit is not None:
            axis, less, more = self.limit
            made.limit = kept[axis] - len(key), less[key], more
        if len(self.parts) > 1:
            made.parts = [part[key] for part in self.parts]
        return made

    def __bool__(self) -> bool:
        raise TypeError("no branch may depend on a number of the machine")

    def __invert__(self) -> Any:
        return self.tl.made(self.dtype, lambda value: value ^ -1, self)

    def __neg__(self) -> Any:
        return self.tl.combined("mul", self, -1.0 if self.dtype is F32 else -1)

    def to(self, of: ir.Type, bitcast: bool = False) -> Any:
        """As another type."""
        k = self.tl.k
        if bitcast:
            return self.tl.made(of, lambda value: k.bits(value, k.like(value, of)), self)
        return self if of is self.dtype else self.tl.made(of, lambda value: self.tl.converted(value, of), self)


def _operator(name: str, turned: bool) -> Callable[[Block, Any], Any]:
    def apply(self: Block, other: Any) -> Any:
        return self.tl.combined(name, other, self) if turned else self.tl.combined(name, self, other)

    return apply


for _name in (*_COMPUTED, *COMPARED):
    setattr(Block, f"__{_name.strip('_')}__", _operator(_name, False))
    setattr(Block, f"__r{_name.strip('_')}__", _operator(_name, True))

#: Where an operation applies: everywhere, nowhere, or where conditions hold.
Mask = bool | Block


@dataclass(frozen=True, slots=True)
class Pointer:
    """Elements of an argument's memory. base: its address."""

    name: str
    base: Value
    of: ir.Type
    offset: Any

    def __add__(self, other: Any) -> Pointer:
        return replace(self, offset=self.offset + other)

    def __sub__(self, other: Any) -> Pointer:
        return replace(self, offset=self.offset - other)

    @property
    def dtype(self) -> Pointer:
        """A type with an ``element_ty``, like Triton's."""
        return self

    @property
    def element_ty(self) -> ir.Type:
        """The type of the elements."""
        return self.of


def shape_of(*blocks: Mask) -> tuple[int, ...]:
    """The broadcast shape of all, with missing axes added in front."""
    shapes = [block.shape for block in blocks if isinstance(block, Block)]
    filled = [(1,) * (max(map(len, shapes)) - len(shape)) + shape for shape in shapes]
    return tuple(map(max, zip(*filled, strict=True)))
