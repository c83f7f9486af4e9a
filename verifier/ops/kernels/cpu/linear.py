"""Products with a float weight: each sum runs over k in order, in one accumulator, whatever the other rows are.

::

    packed   [O / B][K / 2][B][2] where pairs of bf16 are multiplied, [O / B][K][B] where single numbers are

Legend: R rows, K inner width, O outer width, B outputs of a block (:mod:`~foresay.verifier.ops.kernels.cpu.product`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.kernels.cpu.asm import Kernel, Variable
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import Compiled, arena, counted
from foresay.verifier.ops.kernels.cpu.product import (
    MANY,
    ProductKernel,
    ProductShape,
    block_of,
    filled,
    from_turns,
    in_blocks,
    in_turns,
    only_rows,
    replace_rows,
)
from foresay.verifier.ops.kernels.cpu.values import BF16, F32, I16, I32, LANES, OF_TORCH, Value, vector
from foresay.verifier.ops.records import Gate, gate_parts


@dataclass(frozen=True, slots=True)
class PackedFloats:
    """A :class:`~foresay.verifier.ops.linear.PackedWeight`. data: of its own dtype. bias: fp32[O, padded to
    blocks] or None. pairs: whether k is in pairs. experts: how many, whose weights are consecutive; 0: a single weight.
    """

    data: Tensor
    bias: Tensor | None
    inner: int
    outer: int
    gated: Gate
    pairs: bool
    experts: int = 0

    @property
    def block(self) -> int:
        """B."""
        return int(self.data.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return self.inner * self.outer * self.data.dtype.itemsize

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, gated: Gate, experts: int = 0) -> PackedFloats:
        """Pack a weight [O, K] in 16 or 32 bits."""
        pairs, block = weight.dtype is torch.bfloat16, block_of(Processor.here())
        data = in_turns(lambda part: _packed(part, block, pairs), weight, gated, experts)
        packed = packed_bias(bias, block, gated, experts)
        return cls(data, packed, weight.shape[1], len(weight), gated, pairs, experts)

    def plain(self) -> Tensor:
        """[O, K]: the weight as it was."""
        inside = (0, 2, 1, 3) if self.pairs else (0, 2, 1)

        def rows(blocks: Tensor) -> Tensor:
            return blocks.permute(*inside).flatten(0, 1).flatten(1)

        return from_turns(rows, self.data, self.gated, self.outer, self.experts)[:, : self.inner]

    rows_apart: ClassVar = True

    def select_rows(self, rows: Tensor) -> PackedFloats:
        """See :class:`~foresay.verifier.ops.linear.PackedWeight`."""
        return replace(self, data=only_rows(self.data, rows), outer=len(rows))

    def replace(self, rows: Tensor, other: PackedFloats, numbers: Tensor) -> None:
        """See :class:`~foresay.verifier.ops.linear.PackedWeight`."""
        replace_rows(self.data, rows, other.data, numbers)

    def rounded(self, x: Tensor) -> None:
        """Rows are not rounded."""

    def plain_bias(self) -> Tensor | None:
        """fp32[O]: the bias as it was."""
        return plain_bias(self.bias, self.block, self.gated, self.outer, self.experts)

    def product(self, x: Tensor, dtype: torch.dtype, count: Tensor | None, heads: int = 0) -> Tensor:
        """See :class:`~foresay.verifier.ops.linear.PackedWeight`."""
        each = gate_parts(self.gated) * max(1, self.experts)
        out = arena((len(x), self.outer // each * max(1, heads)), dtype)
        odd, has_bias = self.pairs and self.inner % 2 == 1, self.bias is not None
        shape = self.block, x.dtype, out.dtype, self.gated, has_bias, self.data.dtype, odd
        _kernel(FloatShape(*shape, experts=self.experts > 0 and not heads, heads=heads))(
            x, self.data, out, 0 if self.bias is None else self.bias, counted(count, len(x)),
            len(self.data) // each, self.outer // each, self.inner,
        )  # fmt: skip
        return out


def packed_bias(bias: Tensor | None, block: int, gated: Gate, experts: int = 0) -> Tensor | None:
    """fp32, padded to blocks, in their order."""
    return None if bias is None else in_turns(lambda part: filled(part, block), bias.float(), gated, experts).flatten()


def plain_bias(bias: Tensor | None, block: int, gated: Gate, outer: int, experts: int = 0) -> Tensor | None:
    """The reverse."""
    return None if bias is None else from_turns(Tensor.flatten, bias.view(-1, block), gated, outer, experts)


def _packed(weight: Tensor, block: int, pairs: bool) -> Tensor:
    if not pairs:
        return in_blocks(weight, block)
    whole = functional.pad(weight, (0, weight.shape[1] % 2))
    pairs_of_k: Tensor = filled(whole, block).unflatten(2, (-1, 2))
    return pairs_of_k.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class FloatShape(ProductShape):
    """weight: its dtype. odd: whether the last of a row's inputs is half of a pair."""

    weight: torch.dtype
    odd: bool


@Compiled
def _kernel(shape: FloatShape, most: int = MANY) -> Kernel:
    return _FloatProduct(Kernel("multiply"), shape).write(most)


class _FloatProduct(ProductKernel):
    """Writes the kernel."""

    shape: FloatShape

    def __init__(self, kernel: Kernel, shape: FloatShape) -> None:
        super().__init__(kernel, shape)
        self.pairs = shape.weight is torch.bfloat16
        self.dot = self.pairs and shape.compute is torch.bfloat16 and kernel.processor.multiplies_bf16

    def _sum(self, block: Value, row: Value, rows: int, room: Value) -> None:
        for index, total in enumerate(self._summed(block, row, rows)):
            self.k.store(total.value, room, index * LANES)

    def _summed(self, block: Value, row: Value, rows: int) -> list[Variable]:
        """The sums of ``rows`` rows, row by row, vector by vector."""
        k, shape = self.k, self.shape
        steps = self.inner // 2 if self.pairs else self.inner
        item = I32 if self.pairs else OF_TORCH[shape.weight]
        weights = k.at(self.weight, block * (steps + int(shape.odd)) * shape.block, item)
        inputs = self._rows(row, rows)
        sums = [k.variable(self._begun(block, at)) for _ in range(rows) for at in range(self.vectors)]
        for step in self._steps(steps):
            self._add(sums, k.at(weights, step * shape.block, item), inputs, step)
        if shape.odd:
            self._add(sums, k.at(weights, steps * shape.block, item), inputs, steps, half=True)
        return sums

    def _add(self, sums: list[Variable], line: Value, rows: list[Value], step: Value, half: bool = False) -> None:
        """The terms of one step: the weights of a line, times each row's inputs."""
        columns = self._columns(line)
        for number, row in enumerate(rows):
            factors = self._inputs(row, step, half)
            for at, column in enumerate(columns):
                for factor, weight in zip(factors, column, strict=True):
                    self._added(sums[number * self.vectors + at], factor, weight)

    def _columns(self, line: Value) -> list[list[Value]]:
        """The weights of one step, vector by vector: a pair of bf16 for each output, or numbers in fp32, one or two."""
        self._prefetch(line, self.shape.block * (4 if self.pairs else self.shape.weight.itemsize))
        return [self._weights(line, at * LANES) for at in range(self.vectors)]

    def _weights(self, line: Value, at: int) -> list[Value]:
        k = self.k
        if not self.pairs:
            return [k.read(line, OF_TORCH[self.shape.weight], at)]
        words = k.load(line, vector(I32), at)
        return [k.bits(words, vector(BF16, 2 * LANES))] if self.dot else self._halves(words)

    def _inputs(self, row: Value, step: Value, half: bool = False) -> list[Value]:
        """The same for a row's inputs, each in all lanes. half: the row ends after the first of the pair."""
        k, compute = self.k, OF_TORCH[self.shape.compute]
        if self.dot:
            return [self._dotted(self._two(row, step, half))]
        if self.pairs and compute is BF16:
            return [k.spread(each) for each in self._halves(self._two(row, step, half))]
        indices = [step * 2, step * 2 + 1] if self.pairs else [step]
        found = [k.widened(k.load(row, compute, index)) for index in indices[: 1 if half else None]]
        return [k.spread(each) for each in (*found, *[k.constant(0.0, F32)] * half)]

    def _two(self, row: Value, step: Value, half: bool) -> Value:
        """Two bf16 in one word."""
        if half:
            return self.k.integer(self.k.load(row, I16, step * 2), I32) & 0xFFFF
        return self._pair(row, step, self.shape.odd)
