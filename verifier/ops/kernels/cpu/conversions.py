"""What a number is in another type.

What a processor has no instruction for is done with integers here: LLVM would call functions that need not be there.
"""

from __future__ import annotations

import llvmlite.ir as ir

from verifier.ops.kernels.cpu.types import BF16, BYTES, F32, I16, I32, element
from verifier.ops.kernels.cpu.values import Instructions, Operand, Value


class Conversions(Instructions):
    """Emits conversions."""

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
        emit = self.builder.sext if BYTES[element(of)] > BYTES[element(value.type)] else self.builder.trunc
        return Value(self, emit(value.raw, self.like(value, of)))

    def as_float(self, value: Operand) -> Value:
        """An integer as fp32."""
        return Value(self, self.builder.sitofp(self.index(value).raw, F32))
