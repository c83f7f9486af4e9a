"""Functions of numbers. Whatever runs over several lanes does so in one order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.ir as ir

from foresay.verifier.ops.kernels.cpu.conversions import UNITS, UNITS_BITS, Conversions
from foresay.verifier.ops.kernels.cpu.types import I32, lanes_of, suffix
from foresay.verifier.ops.kernels.cpu.values import Operand, Value

#: Taylor's, from the sixth power down: enough where the rest is below half of ln 2.
_EXP = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
#: Cephes's, from the eighth power of the rest down to the third.
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
#: Cephes's, from the ninth power down to the third.
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
        """The larger one; the second if either is NaN: one instruction where :meth:`largest` takes several."""
        return self.select(first > second, first, second)

    def smallest(self, first: Value, second: Operand) -> Value:
        """The smaller of two integers."""
        mine, its = self.alike(first, second)
        return self.select(mine < its, mine, its)

    def folded(self, value: Value, combine: Any) -> Value:
        """Halves combined until one number is left: always in the same order."""
        lanes = lanes_of(value.type)
        while lanes > 1:
            lanes //= 2
            low, high = (self.shuffled(value, value, range(begin, begin + lanes)) for begin in (0, lanes))
            value = combine(low, high)
        return Value(self, self.builder.extract_element(value.raw, ir.Constant(I32, 0)))

    def zipped(self, first: Value, second: Value) -> tuple[Value, Value]:
        """The lanes of two vectors in turns: those of their first halves, those of their second."""
        lanes = lanes_of(first.type)
        low, high = (
            [lane for at in range(begin, begin + lanes // 2) for lane in (at, at + lanes)] for begin in (0, lanes // 2)
        )
        return self.shuffled(first, second, low), self.shuffled(first, second, high)

    def turned(self, rows: Sequence[Value]) -> list[Value]:
        """16 vectors of 16 lanes as columns: lane m of number n becomes lane n of number m."""
        level, half = list(rows), len(rows) // 2
        while half:  # each time a bit of the row's number becomes one of the lane's
            pairs = zip(level[: len(rows) // 2], level[len(rows) // 2 :], strict=True)
            level, half = [both for pair in pairs for both in self.zipped(*pair)], half // 2
        return level

    def total(self, value: Value) -> Value:
        """The sum of the lanes."""
        return self.folded(value, Value.__add__)

    def exp(self, value: Value) -> Value:
        """e to the power of fp32, within an ulp or two; zero below -87, infinity above 88.7, NaN for NaN."""
        # Where fp32 has no more digits than units, a sum is rounded to an integer, and that is in its last bits.
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
        # The mantissa lies between the roots of 1/2 and of 2, so that the rest is small and of both signs.
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
        """``series`` times two to this power, whose ends lie beyond fp32's exponents."""
        half = ((power + 254) >> 1) - 127
        result = series
        for part in (half, power - half):
            result = result * self.bits((part + 127) << 23, value.type)
        result = self.select(value < -87.0, 0.0, result)
        return self.select(value > 88.7, float("inf"), result)
