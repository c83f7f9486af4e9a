"""Writes kernels: Python that runs once, and whose values stand for those of the machine.

``x * y + 1`` emits a product and a sum; ``with k.loop(0, rows) as row`` emits a loop around what the block emits.
Numbers are as wide as their types say; a scalar beside a vector becomes a vector, a Python number what the other is.
Nothing is reordered or contracted by the compiler: sums run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
import torch

from verifier.ops.kernels.cpu.jit import Code, Processor

LANES = 16


class _Bf16(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


_Bf16._create_instance()
F32, F16, BF16 = ir.FloatType(), ir.HalfType(), _Bf16()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
POINTER, VOID = ir.PointerType(), ir.VoidType()
OF_TORCH = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16, torch.int32: I32, torch.int64: I64}
_BYTES = {F32: 4, F16: 2, BF16: 2, I8: 1, I16: 2, I32: 4, I64: 8}
_SHORT = {F32: "f32", F16: "f16", BF16: "bf16", I16: "i16", I32: "i32", I64: "i64"}


def vector(element: ir.Type, lanes: int = LANES) -> ir.Type:
    """So many numbers side by side."""
    return ir.VectorType(element, lanes)


def element(of: ir.Type) -> ir.Type:
    """What a vector is made of; a scalar's own type."""
    return of.element if isinstance(of, ir.VectorType) else of


def _lanes(of: ir.Type) -> int:
    return of.count if isinstance(of, ir.VectorType) else 0


def _suffix(of: ir.Type) -> str:
    """How intrinsics name a type."""
    return (f"v{of.count}" if isinstance(of, ir.VectorType) else "") + _SHORT[element(of)]


@dataclass(frozen=True, eq=False)
class Value:
    """A number, a vector or a pointer while a kernel runs."""

    kernel: Kernel
    raw: Any

    @property
    def type(self) -> ir.Type:
        """Its type."""
        return self.raw.type

    @property
    def floats(self) -> bool:
        """Whether it is made of fp32."""
        return element(self.type) is F32

    def __add__(self, other: Operand) -> Value:
        return self._with(other, "fadd", "add")

    def __sub__(self, other: Operand) -> Value:
        return self._with(other, "fsub", "sub")

    def __mul__(self, other: Operand) -> Value:
        return self._with(other, "fmul", "mul")

    def __truediv__(self, other: Operand) -> Value:
        return self._with(other, "fdiv", "sdiv")

    def __floordiv__(self, other: Operand) -> Value:
        return self._with(other, "", "sdiv")

    def __mod__(self, other: Operand) -> Value:
        return self._with(other, "", "srem")

    def __and__(self, other: Operand) -> Value:
        return self._with(other, "", "and_")

    def __or__(self, other: Operand) -> Value:
        return self._with(other, "", "or_")

    def __xor__(self, other: Operand) -> Value:
        return self._with(other, "", "xor")

    def __lshift__(self, other: Operand) -> Value:
        return self._with(other, "", "shl")

    def __rshift__(self, other: Operand) -> Value:
        return self._with(other, "", "lshr")

    def __lt__(self, other: Operand) -> Value:
        return self._compared("<", other)

    def __le__(self, other: Operand) -> Value:
        return self._compared("<=", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compared(">", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compared(">=", other)

    def equals(self, other: Operand) -> Value:
        """Whether both are the same number."""
        return self._compared("==", other)

    def differs(self, other: Operand) -> Value:
        """Whether they are not; of fp32 NaN differs from itself."""
        if self.floats:
            mine, its = self.kernel.alike(self, other)
            return Value(self.kernel, self.kernel.builder.fcmp_unordered("!=", mine.raw, its.raw))
        return self._compared("!=", other)

    def _with(self, other: Operand, of_floats: str, of_integers: str) -> Value:
        mine, its = self.kernel.alike(self, other)
        emit = getattr(self.kernel.builder, of_floats if self.floats else of_integers)
        return Value(self.kernel, emit(mine.raw, its.raw))

    def _compared(self, how: str, other: Operand) -> Value:
        mine, its = self.kernel.alike(self, other)
        builder = self.kernel.builder
        compare = builder.fcmp_ordered if self.floats else builder.icmp_signed
        return Value(self.kernel, compare(how, mine.raw, its.raw))


Operand = Value | int | float


class Variable:
    """A value that changes; it lives in a register."""

    def __init__(self, kernel: Kernel, initial: Value) -> None:
        self._kernel = kernel
        self._place = kernel.allocated(initial.type)
        self._type = initial.type
        self.value = initial

    @property
    def value(self) -> Value:
        """What it is now."""
        return Value(self._kernel, self._kernel.builder.load(self._place, typ=self._type))

    @value.setter
    def value(self, new: Value) -> None:
        self._kernel.builder.store(new.raw, self._place)


class Kernel:
    """A function ``void(int64 *arguments, int64 thread, int64 threads)`` while it is written."""

    def __init__(self, name: str, processor: Processor | None = None) -> None:
        self.name, self.processor = name, processor or Processor.here()
        self.module = ir.Module(name=name)
        of = ir.FunctionType(VOID, [POINTER, I64, I64])
        self._function = ir.Function(self.module, of, name=name)
        self._allocations = ir.IRBuilder(self._function.append_basic_block("variables"))
        self._first = self._function.append_basic_block("begin")
        self.builder = ir.IRBuilder(self._first)
        self._arguments, self.thread, self.threads = (Value(self, raw) for raw in self._function.args)

    def code(self) -> Code:
        """Compile it. Nothing can be added any more."""
        self.builder.ret_void()
        self._allocations.branch(self._first)
        return Code(str(self.module), self.processor)

    # -- arguments and constants ------------------------------------------------------------------------------------

    def number(self, index: int) -> Value:
        """Argument number ``index``, an int64."""
        return self.load(self._arguments, I64, index)

    def pointer(self, index: int) -> Value:
        """Argument number ``index``, an address."""
        return Value(self, self.builder.inttoptr(self.number(index).raw, POINTER))

    def counted(self, index: int) -> Value:
        """The int64 that argument number ``index`` points to, read now."""
        return self.load(self.pointer(index), I64)

    def constant(self, value: float, of: ir.Type = I64) -> Value:
        """A number, or a vector of equal ones."""
        lanes = _lanes(of)
        return Value(self, ir.Constant(of, [value] * lanes if lanes else value))

    def places(self, numbers: Sequence[int]) -> Value:
        """A vector of int32."""
        return Value(self, ir.Constant(vector(I32, len(numbers)), list(numbers)))

    def alike(self, first: Value, second: Operand) -> tuple[Value, Value]:
        """Both as one type: scalars are spread over the other's lanes."""
        if not isinstance(second, Value):
            return first, self.constant(second, first.type)
        if _lanes(first.type) == _lanes(second.type):
            return first, second
        if _lanes(first.type):
            return first, self.spread(second, _lanes(first.type))
        return self.spread(first, _lanes(second.type)), second

    # -- control ----------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, begin: Operand, end: Operand, step: int = 1) -> Iterator[Value]:
        """``for i in range(begin, end, step)``."""
        builder, start = self.builder, self._index(begin)
        head, body, behind = (self._function.append_basic_block(name) for name in ("head", "body", "behind"))
        before = builder.block
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        index.add_incoming(start.raw, before)
        builder.cbranch(builder.icmp_signed("<", index, self._index(end).raw), body, behind)
        builder.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(builder.add(index, ir.Constant(I64, step)), builder.block)
        builder.branch(head)
        builder.position_at_end(behind)

    def across(self, width: Operand, body: Callable[[Value, int], None]) -> None:
        """``body(index, lanes)`` over a row: vectors as long as there are whole ones, then number by number."""
        whole = self._index(width) // LANES * LANES
        with self.loop(0, whole, LANES) as index:
            body(index, LANES)
        with self.loop(whole, width) as index:
            body(index, 1)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """``if condition``."""
        with self.builder.if_then(condition.raw):
            yield

    @contextmanager
    def share(self, count: Operand) -> Iterator[Value]:
        """The part of ``range(count)`` that is this thread's, in one piece."""
        whole = self._index(count)
        with self.loop(whole * self.thread // self.threads, whole * (self.thread + 1) // self.threads) as index:
            yield index

    def variable(self, initial: Value) -> Variable:
        """A value that changes."""
        return Variable(self, initial)

    def allocated(self, of: ir.Type, count: int = 1) -> Any:
        """Room on the stack, as a raw pointer."""
        room = self._allocations.alloca(of, size=count if count > 1 else None)
        room.type = POINTER  # llvmlite still makes typed ones here
        return room

    def array(self, of: ir.Type, count: int) -> Value:
        """Room for so many on the stack; a pointer."""
        room = self.allocated(of, count)
        room.align = 64
        return Value(self, room)

    def _index(self, value: Operand) -> Value:
        return value if isinstance(value, Value) else self.constant(value, I64)

    # -- memory -----------------------------------------------------------------------------------------------------

    def at(self, pointer: Value, index: Operand, of: ir.Type) -> Value:
        """The address of number ``index`` of an array."""
        return Value(self, self.builder.gep(pointer.raw, [self._index(index).raw], source_etype=element(of)))

    def bytes_at(self, pointer: Value, count: Operand) -> Value:
        """The address so many bytes further."""
        return self.at(pointer, count, I8)

    def load(self, pointer: Value, of: ir.Type, index: Operand = 0) -> Value:
        """Number ``index`` of an array; or, of a vector type, the vector that begins there."""
        raw = self.builder.load(self.at(pointer, index, of).raw, typ=of)
        raw.align = _BYTES[element(of)]
        return Value(self, raw)

    def store(self, value: Value, pointer: Value, index: Operand = 0) -> None:
        """The reverse."""
        raw = self.builder.store(value.raw, self.at(pointer, index, value.type).raw)
        raw.align = _BYTES[element(value.type)]

    def copy(self, source: Value, destination: Value, count: Operand) -> None:
        """So many bytes."""
        count = self._index(count)
        self.call("llvm.memcpy.p0.p0.i64", VOID, destination, source, count, self.constant(0, I1))

    def prefetch(self, pointer: Value) -> None:
        """Ask for what lies there."""
        self.call("llvm.prefetch.p0", VOID, pointer, *(self.constant(flag, I32) for flag in (0, 3, 1)))

    def read(self, pointer: Value, of: ir.Type, index: Operand, lanes: int = LANES) -> Value:
        """What is kept in another type, as fp32: a vector, or of one lane a number."""
        return self.widened(self.load(pointer, of if lanes == 1 else vector(of, lanes), index))

    def write(self, value: Value, pointer: Value, of: ir.Type, index: Operand) -> None:
        """fp32 into what is kept in another type."""
        self.store(self.narrowed(value, of), pointer, index)

    # -- conversions ------------------------------------------------------------------------------------------------

    def spread(self, value: Value, lanes: int = LANES) -> Value:
        """A vector of equal ones."""
        of = vector(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(of, ir.Undefined), value.raw, ir.Constant(I32, 0))
        return Value(self, self.builder.shuffle_vector(one, one, self.places([0] * lanes).raw))

    def bits(self, value: Value, of: ir.Type) -> Value:
        """The same bits as another type."""
        return Value(self, self.builder.bitcast(value.raw, of))

    def like(self, value: Value, of: ir.Type) -> ir.Type:
        """Type ``of`` with as many lanes as the value."""
        return vector(of, _lanes(value.type)) if _lanes(value.type) else of

    def widened(self, value: Value) -> Value:
        """As fp32."""
        if value.floats:
            return value
        if element(value.type) is BF16:
            whole = self.builder.zext(self.bits(value, self.like(value, I16)).raw, self.like(value, I32))
            return self.bits(Value(self, whole) << 16, self.like(value, F32))
        return Value(self, self.builder.fpext(value.raw, self.like(value, F32)))

    def narrowed(self, value: Value, of: ir.Type) -> Value:
        """fp32 as another type, to the nearest, ties to even."""
        if of is F32:
            return value
        if of is BF16 and not self.processor.multiplies_bf16:
            return self._narrowed_by_hand(value)
        return Value(self, self.builder.fptrunc(value.raw, self.like(value, of)))

    def _narrowed_by_hand(self, value: Value) -> Value:
        bits = self.bits(value, self.like(value, I32))
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = self.select(value.differs(value), (bits >> 16) | 0x40, rounded)  # NaN stays NaN
        return self.bits(Value(self, self.builder.trunc(kept.raw, self.like(value, I16))), self.like(value, BF16))

    def rounded(self, value: Value, of: ir.Type) -> Value:
        """fp32 with the digits that another type has."""
        return self.widened(self.narrowed(value, of))

    def integer(self, value: Value, of: ir.Type) -> Value:
        """Another size of integer, the sign kept."""
        emit = self.builder.sext if _BYTES[element(of)] > _BYTES[element(value.type)] else self.builder.trunc
        return Value(self, emit(value.raw, self.like(value, of)))

    def as_float(self, value: Operand) -> Value:
        """An integer as fp32."""
        return Value(self, self.builder.sitofp(self._index(value).raw, F32))

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def call(self, name: str, of: ir.Type, *values: Value) -> Value:
        """A function or intrinsic."""
        known = self.module.globals.get(name)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(of, [value.type for value in values]), name=name)
        return Value(self, self.builder.call(known, [value.raw for value in values]))

    def fma(self, first: Value, second: Value, third: Value) -> Value:
        """``first * second + third``, rounded once."""
        return self.call(f"llvm.fma.{_suffix(first.type)}", first.type, first, second, third)

    def sqrt(self, value: Value) -> Value:
        """The square root."""
        return self.call(f"llvm.sqrt.{_suffix(value.type)}", value.type, value)

    def largest(self, first: Value, second: Value) -> Value:
        """The larger one; NaN if either is."""
        return self.call(f"llvm.maximum.{_suffix(first.type)}", first.type, first, second)

    def smallest(self, first: Value, second: Operand) -> Value:
        """The smaller of two integers."""
        mine, its = self.alike(first, second)
        return self.select(mine < its, mine, its)

    def select(self, condition: Value, yes: Operand, no: Operand) -> Value:
        """``yes`` where the condition holds."""
        if not isinstance(yes, Value):
            assert isinstance(no, Value), "one of both says what type it is"
            no, yes = self.alike(no, yes)
        else:
            yes, no = self.alike(yes, no)
        return Value(self, self.builder.select(condition.raw, yes.raw, no.raw))

    def shuffled(self, first: Value, second: Value, lanes: Sequence[int]) -> Value:
        """Lanes of two vectors, those of the second counted on from the first's."""
        return Value(self, self.builder.shuffle_vector(first.raw, second.raw, self.places(lanes).raw))

    def folded(self, value: Value, combine: Any) -> Value:
        """Halves combined until one number is left: always in the same order."""
        lanes = _lanes(value.type)
        while lanes > 1:
            lanes //= 2
            low, high = (self.shuffled(value, value, range(begin, begin + lanes)) for begin in (0, lanes))
            value = combine(low, high)
        return Value(self, self.builder.extract_element(value.raw, ir.Constant(I32, 0)))

    def sums(self, parts: Sequence[Value]) -> Value:
        """One vector whose lane n is the sum of the lanes of ``parts[n]``, 16 of 16 lanes, each always added alike."""
        level = list(parts)
        while len(level) > 1:
            reach = len(level) // 2
            low, high = ([*_interleaved(reach, at)] for at in (0, reach))
            level = [
                self.shuffled(level[n], level[n + reach], low) + self.shuffled(level[n], level[n + reach], high)
                for n in range(reach)
            ]
        return level[0]

    def total(self, value: Value) -> Value:
        """The sum of the lanes."""
        return self.folded(value, Value.__add__)

    def exp(self, value: Value) -> Value:
        """e to the power of fp32, within an ulp or two; zero below -87, infinity above 88.7, NaN for NaN."""
        log2 = self.call(f"llvm.roundeven.{_suffix(value.type)}", value.type, value * 1.44269504088896341)
        rest = self.fma(log2, self.constant(-0.693145751953125, value.type), value)
        rest = self.fma(log2, self.constant(-1.42860682030941723e-6, value.type), rest)
        series = self.constant(_EXP[0], value.type)
        for factor in _EXP[1:]:
            series = self.fma(series, rest, self.constant(factor, value.type))
        return self._scaled(series, log2, value)

    def _scaled(self, series: Value, log2: Value, value: Value) -> Value:
        """``series`` times two to the power of ``log2``, whose ends lie beyond fp32's exponents."""
        whole = self.like(value, I32)
        power = self.call(f"llvm.fptosi.sat.{_suffix(whole)}.{_suffix(value.type)}", whole, log2)  # of NaN 0
        half = power // 2
        result = series
        for part in (half, power - half):
            result = result * self.bits((part + 127) << 23, value.type)
        result = self.select(value < -87.0, 0.0, result)
        return self.select(value > 88.7, float("inf"), result)


def _interleaved(reach: int, at: int) -> Iterator[int]:
    """Of each 2 * reach lanes of a first vector ``reach``, from ``at`` on, then the same of a second."""
    for begin in range(0, LANES, 2 * reach):
        for first in (0, LANES):
            yield from range(first + begin + at, first + begin + at + reach)


#: Taylor's, from the sixth power down: enough where the rest is below half of ln 2.
_EXP = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
