"""The types of LLVM's numbers, and how its intrinsics name them."""

from __future__ import annotations

from functools import cache

import llvmlite.ir as ir
import torch

LANES = 16


class _Bf16(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


class _E4m3(ir.types.Type):  # type: ignore[misc]
    """fp8 with four bits of exponent and three behind the point, which LLVM has no name for: its bits."""

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


@cache  # as constants are: what a type or a constant looks like in LLVM's language is kept with it
def vector(element: ir.Type, lanes: int = LANES) -> ir.Type:
    """So many numbers side by side."""
    return ir.VectorType(element, lanes)


def element(of: ir.Type) -> ir.Type:
    """What a vector is made of; a scalar's own type."""
    return of.element if isinstance(of, ir.VectorType) else of


def lanes_of(of: ir.Type) -> int:
    """How many a vector has; a scalar none."""
    return of.count if isinstance(of, ir.VectorType) else 0


def suffix(of: ir.Type) -> str:
    """How intrinsics name a type."""
    return (f"v{of.count}" if isinstance(of, ir.VectorType) else "") + _NAMES[element(of)]
