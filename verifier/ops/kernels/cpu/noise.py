"""Gumbel noise where it is needed: the integers of :mod:`foresay.spec.sample` bit for bit, its logarithms to an ulp or
two. A token's noise is one function of (seed, position, token id), whatever lane computes it."""

from __future__ import annotations

from foresay.spec.sample import hashed
from foresay.spec.sampling import mix64
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.values import I32, Value


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
        """fp32 between 0 and 1, both left out."""
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
        """fp32: no less than the noise and found at once, close above where noise is large: ``-log`` of the power of 2
        below u, or below the exponential of u, which is closer."""
        k = self._k
        power = k.bits(uniform, k.like(uniform, I32)) >> 23
        return k.as_float(power * -1 + 127) * 0.6931472 + 0.0001
