"""Values of a kernel that is being written, their operators, the basic instructions, and LLVM's number types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.ir as ir
import torch

from foresay.verifier.ops.kernels.cpu.jit import Processor

LANES = 16


class _Bf16(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not have."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


class _E4m3(ir.types.Type):  # type: ignore[misc]
    """fp8 with four exponent and three mantissa bits, which LLVM does not have: its bits."""

    def __str__(self) -> str:
        return "i8"


_Bf16._create_instance()
F32, F16, BF16, E4M3 = ir.FloatType(), ir.HalfType(), _Bf16(), _E4m3()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
POINTER, VOID = ir.PointerType(), ir.VoidType()
OF_TORCH = {
    torch.float32: F32,
    torch.float16: F16,
    torch.bfloat16: BF16,
    torch.float8_e4m3fn: E4M3,
    torch.int8: I8,
    torch.int16: I16,
    torch.int32: I32,
    torch.int64: I64,
}
BYTES = {F32: 4, F16: 2, BF16: 2, E4M3: 1, I8: 1, I16: 2, I32: 4, I64: 8}
_NAMES = {F32: "f32", F16: "f16", BF16: "bf16", I16: "i16", I32: "i32", I64: "i64"}


@cache  # like constants: the text of a type or constant in LLVM IR is cached with it
def vector(element: ir.Type, lanes: int = LANES) -> ir.Type:
    """A vector type."""
    return ir.VectorType(element, lanes)


def element(of: ir.Type) -> ir.Type:
    """A vector's element type; a scalar's own type."""
    return of.element if isinstance(of, ir.VectorType) else of


def lanes_of(of: ir.Type) -> int:
    """How many lanes a vector has; 0 for a scalar."""
    return of.count if isinstance(of, ir.VectorType) else 0


def suffix(of: ir.Type) -> str:
    """How intrinsics name a type."""
    return (f"v{of.count}" if isinstance(of, ir.VectorType) else "") + _NAMES[element(of)]


@dataclass(frozen=True, eq=False)
class Value:
    """A number, a vector or a pointer while a kernel runs."""

    kernel: Instructions
    raw: Any

    @property
    def type(self) -> ir.Type:
        """Its type."""
        return self.raw.type

    @property
    def floats(self) -> bool:
        """Whether its elements are fp32."""
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
        """Whether they are not; for fp32, NaN differs from itself."""
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


class Instructions:
    """Emits single instructions into ``module``, for a processor."""

    module: ir.Module
    builder: ir.IRBuilder
    processor: Processor

    def constant(self, value: float, of: ir.Type = I64) -> Value:
        """A number, or a vector of equal numbers."""
        return Value(self, _constant(of, value, repr(value)))

    def index(self, value: Operand) -> Value:
        """An int64."""
        return value if isinstance(value, Value) else self.constant(value)

    def lane_numbers(self, numbers: Sequence[int]) -> Value:
        """A vector of int32."""
        return Value(self, _lane_numbers(tuple(numbers)))

    def counting(self, first: Value) -> Value:
        """A vector of consecutive int32 from an integer."""
        word = self.builder.trunc(first.raw, I32) if first.type is I64 else first.raw
        return Value(self, word) + self.lane_numbers(range(LANES))

    def any(self, mask: Value) -> Value:
        """Whether a condition holds in any lane."""
        return self.call(f"llvm.vector.reduce.or.v{lanes_of(mask.type)}i1", I1, mask)

    def alike(self, first: Value, second: Operand) -> tuple[Value, Value]:
        """Both as one type: scalars are broadcast to the other's lanes."""
        if not isinstance(second, Value):
            return first, self.constant(second, first.type)
        if lanes_of(first.type) == lanes_of(second.type):
            return first, second
        if lanes_of(first.type):
            return first, self.spread(second, lanes_of(first.type))
        return self.spread(first, lanes_of(second.type)), second

    def spread(self, value: Value, lanes: int = LANES) -> Value:
        """A vector with this value in all lanes."""
        of = vector(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(of, ir.Undefined), value.raw, ir.Constant(I32, 0))
        return Value(self, self.builder.shuffle_vector(one, one, self.lane_numbers([0] * lanes).raw))

    def shuffled(self, first: Value, second: Value, lanes: Sequence[int]) -> Value:
        """Lanes of two vectors, those of the second numbered after the first's."""
        return Value(self, self.builder.shuffle_vector(first.raw, second.raw, self.lane_numbers(lanes).raw))

    def select(self, condition: Value, yes: Operand, no: Operand) -> Value:
        """``yes`` where the condition holds."""
        if not isinstance(yes, Value):
            assert isinstance(no, Value), "one of both says what type it is"
            no, yes = self.alike(no, yes)
        else:
            yes, no = self.alike(yes, no)
        return Value(self, self.builder.select(condition.raw, yes.raw, no.raw))

    def bits(self, value: Value, of: ir.Type) -> Value:
        """The same bits as another type."""
        return Value(self, self.builder.bitcast(value.raw, of))

    def like(self, value: Value, of: ir.Type) -> ir.Type:
        """Type ``of`` with as many lanes as the value."""
        return vector(of, lanes_of(value.type)) if lanes_of(value.type) else of

    def call(self, name: str, of: ir.Type, *values: Value) -> Value:
        """A function or intrinsic."""
        known = self.module.globals.get(name)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(of, [value.type for value in values]), name=name)
        return Value(self, self.builder.call(known, [value.raw for value in values]))


@cache
def _constant(of: ir.Type, value: float, spelled: str) -> ir.Constant:
    """spelled: 0.0 and -0.0 are equal, and so are 1 and True."""
    return _Splat(of, [value] * lanes) if (lanes := lanes_of(of)) else ir.Constant(of, value)


class _Splat(ir.Constant):  # type: ignore[misc]
    """A vector of equal numbers, in LLVM's short spelling: lane by lane they were half of a kernel's text."""

    def _get_reference(self) -> str:
        return f"splat ({self.constant[0]})"


@cache
def _lane_numbers(numbers: tuple[int, ...]) -> ir.Constant:
    return ir.Constant(vector(I32, len(numbers)), list(numbers) if any(numbers) else None)
