"""Functions of numbers, and conversions between types. Reductions over lanes have a fixed order.

Without an instruction of the processor, integers are used here: LLVM would call functions that may not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.ir as ir

from foresay.verifier.ops.kernels.cpu.values import (
    BF16,
    BYTES,
    E4M3,
    F16,
    F32,
    I8,
    I16,
    I32,
    Instructions,
    Operand,
    Value,
    element,
    lanes_of,
    suffix,
)

#: Infinity of fp16.
_INFINITY = 0x7C00
#: Between 2^23 and 2^24, with room on both sides: a number added to it is rounded to an integer, in its last bits.
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
        ):  # its exponents are 120 lower: a product shifts them, and makes denormals normal
            word = (self.integer(value, I32) << 20) & -0x78100000  # the sign and seven bits
            return self.bits(word, self.like(value, F32)) * 2.0**120
        if self.processor.converts_fp16:
            return Value(self, self.builder.fpext(value.raw, self.like(value, F32)))
        return self._widened_fp16(self._word(value))

    def narrowed(self, value: Value, of: ir.Type, exact: bool = False) -> Value:
        """fp32 as another type, to the nearest, ties to even; for 8 bits: only numbers in its range. exact: denormal
        numbers too, which the instruction for bf16 makes zero."""
        if of is F32:
            return value
        if of is I8:
            return self.integer(self.bits(value + UNITS, self.like(value, I32)) - UNITS_BITS, I8)
        if of is E4M3:
            return self.bits(self.integer(self._narrowed_e4m3(value), I8), self.like(value, of))
        if of is BF16 and (exact or not self.processor.multiplies_bf16):
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
        """Exponents of fp16 are 112 lower: a product shifts them, and makes denormals normal."""
        moved = self.bits((word & 0x7FFF) << 13, self.like(word, F32)) * 2.0**112
        size = self.bits(moved, word.type)
        finite = (word & _INFINITY).differs(_INFINITY)
        return self.bits(self.select(finite, size, size | 0x7F800000) | ((word & 0x8000) << 16), moved.type)

    def _narrowed_fp16(self, value: Value) -> Value:
        bits = self.bits(value, self.like(value, I32))
        size = bits & 0x7FFFFFFF
        rounded = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13
        # The sum with a half has its last digit where denormals have theirs, and is rounded there.
        small = self.bits(self.bits(size, value.type) + 0.5, bits.type) - (126 << 23)
        beyond = self.select(size > 0x7F800000, ((size >> 13) & 0x3FF) | 0x7E00, _INFINITY)
        finite = self.select(size < (113 << 23), small, rounded)
        return self.select(size < (143 << 23), finite, beyond) | ((bits >> 16) & 0x8000)

    def _narrowed_e4m3(self, value: Value) -> Value:
        bits = self.bits(value, self.like(value, I32))
        size = bits & 0x7FFFFFFF
        rounded = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        # The sum with 2^14 has its last digit where denormals have theirs.
        small = self.bits(self.bits(size, value.type) + 2.0**14, bits.type) - (141 << 23)
        return self.select(size < (121 << 23), small, rounded) | ((bits >> 24) & 0x80)

    def rounded(self, value: Value, of: ir.Type) -> Value:
        """fp32 rounded to the precision of another type."""
        return self.widened(self.narrowed(value, of))

    def integer(self, value: Value, of: ir.Type) -> Value:
        """Another size of integer, the sign kept."""
        emit = self.builder.sext if BYTES[element(of)] > BYTES[element(value.type)] else self.builder.trunc
        return Value(self, emit(value.raw, self.like(value, of)))

    def as_float(self, value: Operand) -> Value:
        """An integer as fp32."""
        whole = self.index(value)
        return Value(self, self.builder.sitofp(whole.raw, self.like(whole, F32)))


#: The lanes of two vectors of eight whose quarters are interleaved, of which an instruction takes half.
_ZIPPED = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
#: Taylor coefficients, from the sixth power down: enough if the rest is below half of ln 2.
_EXP = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
#: Cephes's coefficients, from the eighth power of the rest down to the third.
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
#: Cephes's coefficients, from the ninth power down to the third.
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


class Arithmetic(Conversions):
    """Emits functions."""

    def fma(self, first: Value, second: Value, third: Value) -> Value:
        """``first * second + third``, rounded once."""
        return self.call(f"llvm.fma.{suffix(first.type)}", first.type, first, second, third)

    def sqrt(self, value: Value) -> Value:
        """The square root."""
        return self.call(f"llvm.sqrt.{suffix(value.type)}", value.type, value)

    def largest(self, first: Value, second: Value) -> Value:
        """The larger one; NaN if either is."""
        return self.call(f"llvm.maximum.{suffix(first.type)}", first.type, first, second)

    def larger(self, first: Value, second: Value) -> Value:
        """The larger one; the second if either is NaN: one instruction, while :meth:`largest` takes several."""
        return self.select(first > second, first, second)

    def smallest(self, first: Value, second: Operand) -> Value:
        """The smaller of two integers."""
        mine, its = self.alike(first, second)
        return self.select(mine < its, mine, its)

    def folded(self, value: Value, combine: Any) -> Value:
        """Halves are combined until one number is left: always in the same order."""
        lanes = lanes_of(value.type)
        while lanes > 1:
            lanes //= 2
            low, high = (self.shuffled(value, value, range(begin, begin + lanes)) for begin in (0, lanes))
            value = combine(low, high)
        return Value(self, self.builder.extract_element(value.raw, ir.Constant(I32, 0)))

    def zipped(self, first: Value, second: Value) -> tuple[Value, Value]:
        """The interleaved lanes of two vectors: of their first halves, and of their second."""
        lanes = lanes_of(first.type)
        low, high = (
            [lane for at in range(begin, begin + lanes // 2) for lane in (at, at + lanes)] for begin in (0, lanes // 2)
        )
        return self.shuffled(first, second, low), self.shuffled(first, second, high)

    def turned(self, rows: Sequence[Value]) -> list[Value]:
        """16 vectors of 16 lanes as columns: lane m of number n becomes lane n of number m."""
        if not self.processor.wide:
            return self._turned_in_quarters(rows)
        level, half = list(rows), len(rows) // 2
        while half:  # each time a bit of the row's number is swapped with one of the lane's
            pairs = zip(level[: len(rows) // 2], level[len(rows) // 2 :], strict=True)
            level, half = [both for pair in pairs for both in self.zipped(*pair)], half // 2
        return level

    def _turned_in_quarters(self, rows: Sequence[Value]) -> list[Value]:
        """The same by eight numbers, of which one instruction of three crosses the middle of a register."""
        found = []
        for first in (0, 8):
            parts = [self.shuffled(row, row, range(first, first + 8)) for row in rows]
            both = zip(self._turned_quarter(parts[:8]), self._turned_quarter(parts[8:]), strict=True)
            found += [self.shuffled(low, high, range(16)) for low, high in both]
        return found

    def _turned_quarter(self, rows: Sequence[Value]) -> list[Value]:
        found = []
        for at in (0, 4):
            lanes = [*range(at, at + 4), *range(8 + at, 12 + at)]
            level = [self.shuffled(low, high, lanes) for low, high in zip(rows[:4], rows[4:], strict=True)]
            for _ in range(2):
                pairs = zip(level[:2], level[2:], strict=True)
                level = [self.shuffled(*pair, each) for pair in pairs for each in _ZIPPED]
            found += level
        return found

    def total(self, value: Value) -> Value:
        """The sum of the lanes."""
        return self.folded(value, Value.__add__)

    def exp(self, value: Value) -> Value:
        """e to the power of fp32, within an ulp or two; zero below -87, infinity above 88.7, NaN for NaN."""
        # Where fp32 has no fraction bits left, a sum is rounded to an integer, which is in its last bits.
        shifted = value * 1.44269504088896341 + UNITS
        log2 = shifted - UNITS
        rest = self.fma(log2, self.constant(-0.693145751953125, value.type), value)
        rest = self.fma(log2, self.constant(-1.42860682030941723e-6, value.type), rest)
        return self._scaled(self._series(rest), self.bits(shifted, self.like(value, I32)) - UNITS_BITS, value)

    def exp_below(self, value: Value) -> Value:
        """The same in fewer steps for numbers that are not above zero: within an ulp or two there, and four at -87."""
        shifted = self.fma(value, self.constant(1.44269504088896341, value.type), self.constant(UNITS, value.type))
        rest = self.fma(shifted - UNITS, self.constant(-0.693147180559945309, value.type), value)
        power = self.bits(shifted, self.like(value, I32)) << 23  # the bits of UNITS are moved out
        scale = self.bits(power + 0x3F800000, value.type)
        return self.select(value < -87.0, 0.0, self._series(rest) * scale)

    def _series(self, rest: Value) -> Value:
        series = self.constant(_EXP[0], rest.type)
        for factor in _EXP[1:]:
            series = self.fma(series, rest, self.constant(factor, rest.type))
        return series

    def tanh(self, value: Value) -> Value:
        """The hyperbolic tangent of fp32, within two ulps; NaN for NaN."""
        square, series = value * value, self.constant(_TANH[0], value.type)
        for factor in _TANH[1:]:
            series = self.fma(series, square, self.constant(factor, value.type))
        near = self.fma(value * square, series, value)
        far = self.constant(1.0, value.type) - self.constant(2.0, value.type) / (self.exp(value * 2.0) + 1.0)
        return self.select(square < 0.625 * 0.625, near, far)

    def softcapped(self, value: Value, cap: float) -> Value:
        """``cap * tanh(value / cap)``."""
        return self.tanh(value * (1.0 / cap)) * cap

    def log(self, value: Value) -> Value:
        """The natural logarithm of a positive, normal fp32, within an ulp or two."""
        whole = self.like(value, I32)
        word = self.bits(value, whole)
        # The mantissa is between the roots of 1/2 and of 2, so that the rest is small and of either sign.
        power = (word - 0x3F3504F3) >> 23
        power = self.select((word - 0x3F3504F3) < 0, power - 512, power)
        rest = self.bits(word - (power << 23), value.type) - 1.0
        series = self.constant(_LOG[0], value.type)
        for factor in _LOG[1:]:
            series = self.fma(series, rest, self.constant(factor, value.type))
        square, power = rest * rest, self.as_float(power)
        low = self.fma(power, self.constant(-2.12194440e-4, value.type), series * rest * square)
        low = self.fma(square, self.constant(-0.5, value.type), low)
        return self.fma(power, self.constant(0.693359375, value.type), rest + low)

    def _scaled(self, series: Value, power: Value, value: Value) -> Value:
        """``series`` times two to this power, whose range exceeds fp32's exponents."""
        half = ((power + 254) >> 1) - 127
        result = series
        for part in (half, power - half):
            result = result * self.bits((part + 127) << 23, value.type)
        result = self.select(value < -87.0, 0.0, result)
        return self.select(value > 88.7, float("inf"), result)
