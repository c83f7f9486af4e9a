"""Writes the kernels that multiply with 4-bit floats (e2m1), laid out as in
:mod:`foresay.verifier.ops.kernels.cpu.integers`.

A number times its group's 8-bit scale is exact in bf16, or rounded to it if the row has a step too: so it is computed
in registers, and each sum runs over k as with floats (:mod:`~foresay.verifier.ops.kernels.cpu.linear`). It has the same
bits as with the weight dequantised to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.integer_product import IntegerProduct, IntegerShape
from foresay.verifier.ops.kernels.cpu.launch import Compiled
from foresay.verifier.ops.kernels.cpu.values import BF16, F32, I32, LANES, Value, vector
from foresay.verifier.ops.quantized import DOUBLED_E2M1

#: The offset of doubled numbers that makes them unsigned.
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
            first, row = ((block * count + at) * self.shape.block for count, at in ((self.groups, group), (1, 0)))
            of_row = [row + at * LANES if self.shape.steps else None for at in range(self.vectors)]
            self.factors = [self._scale(first + at * LANES, step) for at, step in enumerate(of_row)]
            with k.loop(group * steps, (group + 1) * steps) as step:
                line = k.bytes_at(weights, step * self.size)
                self._prefetch(line, self.size)
                for term, columns in enumerate(self._columns(line)):
                    self._add(sums, columns, inputs, step * self.terms + term)
        for index, total in enumerate(sums):
            k.store(total.value, room, index * LANES)

    def _columns(self, line: Value) -> Iterator[list[Value]]:
        for columns in super()._columns(line):
            yield [self._scaled(column, factor) for column, factor in zip(columns, self.factors, strict=True)]

    def _scaled(self, column: Value, factor: Value) -> Value:
        """The weights of a vector of outputs: numbers, or pairs, times the outputs' scales."""
        k = self.k
        if not self.shape.pairs:
            return self._exact(column * factor)
        halves = self._halves(k.bits(column, vector(I32)))
        low, high = (k.bits(self._exact(half * factor), vector(I32)) for half in halves)
        return k.bits((low >> 16) | high, vector(BF16, 2 * LANES))

    def _exact(self, weight: Value) -> Value:
        """A product that is a bf16: with steps it is rounded to one."""
        return self.k.rounded(weight, BF16) if self.shape.steps else weight

    def _eighth(self, words: Value, term: int) -> Value:
        """Four bits of each word as fp32, whose exponents are 127 lower: a product shifts them."""
        k, at = self.k, 4 * term
        sign, size = (words << (28 - at)) & -0x80000000, ((words >> at) & 7) << 22
        return k.bits(sign | size, vector(F32)) * 2.0**127
