"""What a number is in another type.

What a processor has no instruction for is done with integers here: LLVM would call functions that need not be there.
"""

from __future__ import annotations

import llvmlite.ir as ir

from foresay.verifier.ops.kernels.cpu.types import BF16, BYTES, E4M3, F16, F32, I8, I16, I32, element
from foresay.verifier.ops.kernels.cpu.values import Instructions, Operand, Value

#: Of fp16.
_INFINITY = 0x7C00
#: Between 2^23 and 2^24, with room on both sides: what is added to it is rounded to an integer, in its last bits.
UNITS, UNITS_BITS = 12582912.0, 0x4B400000


class Conversions(Instructions):
    """Emits conversions."""

    def widened(self, value: Value) -> Value:
        """As fp32."""
        if value.floats:
            return value
        if element(value.type) is BF16:
            return self.bits(self._word(value) << 16, self.like(value, F32))
        if element(value.type) is I8:
            return self.as_float(self.integer(value, I32))
        if (
            element(value.type) is E4M3
        ):  # its exponents begin 120 lower: a product moves them, and makes denormals normal
            word = (self.integer(value, I32) << 20) & -0x78100000  # the sign and seven bits
            return self.bits(word, self.like(value, F32)) * 2.0**120
        if self.processor.converts_fp16:
            return Value(self, self.builder.fpext(value.raw, self.like(value, F32)))
        return self._widened_fp16(self._word(value))

    def narrowed(self, value: Value, of: ir.Type) -> Value:
        """fp32 as another type, to the nearest, ties to even; of 8 bits: what is not beyond their largest number."""
        if of is F32:
            return value
        if of is I8:
            return self.integer(self.bits(value + UNITS, self.like(value, I32)) - UNITS_BITS, I8)
        if of is E4M3:
            return self.bits(self.integer(self._narrowed_e4m3(value), I8), self.like(value, of))
        if of is BF16 and not self.processor.multiplies_bf16:
            return self._half_word(self._narrowed_bf16(value), of)
        if of is F16 and not self.processor.converts_fp16:
            return self._half_word(self._narrowed_fp16(value), of)
        return Value(self, self.builder.fptrunc(value.raw, self.like(value, of)))

    def _word(self, value: Value) -> Value:
        """The bits of a number of 16 bits, in an int32."""
        return Value(self, self.builder.zext(self.bits(value, self.like(value, I16)).raw, self.like(value, I32)))

    def _half_word(self, word: Value, of: ir.Type) -> Value:
        """The reverse."""
        return self.bits(Value(self, self.builder.trunc(word.raw, self.like(word, I16))), self.like(word, of))

    def _narrowed_bf16(self, value: Value) -> Value:
        bits = self.bits(value, self.like(value, I32))
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return self.select(value.differs(value), (bits >> 16) | 0x40, rounded)  # NaN stays NaN

    def _widened_fp16(self, word: Value) -> Value:
        """Exponents of fp16 begin 112 lower: a product moves them, and makes denormals normal."""
        moved = self.bits((word & 0x7FFF) << 13, self.like(word, F32)) * 2.0**112
        size = self.bits(moved, word.type)
        finite = (word & _INFINITY).differs(_INFINITY)
        return self.bits(self.select(finite, size, size | 0x7F800000) | ((word & 0x8000) << 16), moved.type)

    def _narrowed_fp16(self, value: Value) -> Value:
        bits = self.bits(value, self.like(value, I32))
        size = bits & 0x7FFFFFFF
        rounded = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13
        # The sum with a half has the last digit where denormals have theirs, and is rounded there.
        small = self.bits(self.bits(size, value.type) + 0.5, bits.type) - (126 << 23)
        beyond = self.select(size > 0x7F800000, ((size >> 13) & 0x3FF) | 0x7E00, _INFINITY)
        finite = self.select(size < (113 << 23), small, rounded)
        return self.select(size < (143 << 23), finite, beyond) | ((bits >> 16) & 0x8000)

    def _narrowed_e4m3(self, value: Value) -> Value:
        bits = self.bits(value, self.like(value, I32))
        size = bits & 0x7FFFFFFF
        rounded = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        # The sum with 2^14 has the last digit where denormals have theirs.
        small = self.bits(self.bits(size, value.type) + 2.0**14, bits.type) - (141 << 23)
        return self.select(size < (121 << 23), small, rounded) | ((bits >> 24) & 0x80)

    def rounded(self, value: Value, of: ir.Type) -> Value:
        """fp32 with the digits that another type has."""
        return self.widened(self.narrowed(value, of))

    def integer(self, value: Value, of: ir.Type) -> Value:
        """Another size of integer, the sign kept."""
        emit = self.builder.sext if BYTES[element(of)] > BYTES[element(value.type)] else self.builder.trunc
        return Value(self, emit(value.raw, self.like(value, of)))

    def as_float(self, value: Operand) -> Value:
        """An integer as fp32."""
        whole = self.index(value)
        return Value(self, self.builder.sitofp(whole.raw, self.like(whole, F32)))
