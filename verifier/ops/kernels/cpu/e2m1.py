"""Writes the kernels that multiply with floats of 4 bits (e2m1), laid out as
:mod:`foresay.verifier.ops.kernels.cpu.integers` has them.

A number times its group's scale of 8 bits is one of bf16, without loss: so it is made in registers, and each sum runs
over k as that with floats does (:mod:`~foresay.verifier.ops.kernels.cpu.linear`). It has the bits that the weight has
that is written out in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.integer_product import IntegerProduct, IntegerShape
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import BF16, F32, I32, LANES, Value, vector
from foresay.verifier.ops.quantized import DOUBLED_E2M1

#: How much more numbers are, once doubled, where they have no sign.
OFFSET = 12


@Compiled
def kernel_of(shape: IntegerShape) -> Kernel:
    """The kernel of this shape."""
    return _FloatProduct(Kernel("multiply"), shape).write()


class _FloatProduct(IntegerProduct):
    """Writes the kernel, with the same arguments; numbers are doubled. factors: half the scales of a group, vector by
    vector."""

    factors: list[Value]

    def __init__(self, kernel: Kernel, shape: IntegerShape) -> None:
        super().__init__(kernel, shape)
        self.table = torch.tensor(DOUBLED_E2M1).bfloat16().view(torch.int16).tolist()

    def _sum(self, block: Value, row: Value, rows: int, room: Value) -> None:
        k, steps, inputs = self.k, self.group // self.wide, self._rows(row, rows)
        sums = [k.variable(self._begun(block, at)) for _ in range(rows) for at in range(self.vectors)]
        weights = k.bytes_at(self.weight, block * (self.inner // self.wide) * self.size)
        with k.loop(0, self.groups) as group:
            first = (block * self.groups + group) * self.shape.block
            self.factors = [self._half_scale(first + at * LANES) for at in range(self.vectors)]
            with k.loop(group * steps, (group + 1) * steps) as step:
                line = k.bytes_at(weights, step * self.size)
                self._prefetch(line, self.size)
                for term, columns in enumerate(self._columns(line)):
                    self._add(sums, columns, inputs, step * self.terms + term)
        for place, total in enumerate(sums):
            k.store(total.value, room, place * LANES)

    def _columns(self, line: Value) -> Iterator[list[Value]]:
        for columns in super()._columns(line):
            yield [self._scaled(column, factor) for column, factor in zip(columns, self.factors, strict=True)]

    def _scaled(self, column: Value, factor: Value) -> Value:
        """Weights of a vector of outputs: numbers, or pairs, times the outputs' scales."""
        k = self.k
        if not self.shape.pairs:
            return column * factor
        low, high = (k.bits(half * factor, vector(I32)) for half in self._halves(k.bits(column, vector(I32))))
        return k.bits((low >> 16) | high, vector(BF16, 2 * LANES))

    def _eighth(self, words: Value, term: int) -> Value:
        """Four bits of each word as fp32, whose exponents begin 127 lower: a product moves them."""
        k, at = self.k, 4 * term
        sign, size = (words << (28 - at)) & -0x80000000, ((words >> at) & 7) << 22
        return k.bits(sign | size, vector(F32)) * 2.0**127
