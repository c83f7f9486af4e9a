"""Products with a quantised weight with scales: numbers are widened in registers, sums are in fp32.

::

    packed    8 bits   [O / B][K / 2][B / 16][2][16] where pairs of bf16 are multiplied, else [O / B][K][B]; of floats
                       (e4m3) [O / B][K / 2][B / 16][16][2] where pairs are
              4 bits   [O / B][K / 2][16][2] words of 16 bits: word (i, p) has k = 2 n + p of the outputs i, 16 + i, ..
                       where pairs of bf16 are multiplied; else [O / B][K / 8][B] words of 32 bits, k from the low end;
                         floats (e2m1) too
    scales    [O / B][G][B], and so zeros
    a sum     for each group of k the sum of its terms, in order of k; times the scale, added in order of the groups

8-bit integers are exact in bf16, so a pair of them is multiplied as a pair of bf16. With zero points a group's sum of
inputs is also computed: ``sum(x * (q - z)) = sum(x * q) - z * sum(x)``. The same holds for minimums. Scales and
minimums that are multiples of steps are multiplied by these after a group's sum.

Legend: R rows, K inner width, O outer width, G groups, B outputs of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu import integer_product, rounded
from foresay.verifier.ops.kernels.cpu.integer_product import OFFSET, QUARTERS, IntegerShape
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import arena, counted
from foresay.verifier.ops.kernels.cpu.linear import packed_bias, plain_bias
from foresay.verifier.ops.kernels.cpu.product import (
    block_of,
    filled,
    from_turns,
    in_blocks,
    in_turns,
    only_rows,
    replace_rows,
)
from foresay.verifier.ops.kernels.cpu.values import LANES
from foresay.verifier.ops.linear import rounded_product
from foresay.verifier.ops.quant_groups import piece_of
from foresay.verifier.ops.quantized import E8M0, FP8, QuantizedMatrix, packed
from foresay.verifier.ops.records import Gate, gate_parts


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """A :class:`~foresay.verifier.ops.linear.PackedWeight`. data: int8, int16 or int32, see above; of e4m3 int8.
    scales: of their own dtype. zeros, minimums: int8 or None; minimums without steps are fp16. steps, minimum_steps:
    fp16, fp32 of e2m1, or None, [O / B][S][B]. bias: fp32 or None. pairs: whether pairs of bf16 are multiplied.
    rounds: whether inputs are rounded, and data has the layout of :mod:`~foresay.verifier.ops.kernels.cpu.rounded`.
    experts: how many, whose weights are consecutive; 0: a single weight.
    """

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    bits: int
    inner: int
    outer: int
    gated: Gate
    pairs: bool
    minimums: Tensor | None = None
    steps: Tensor | None = None
    minimum_steps: Tensor | None = None
    floats: bool = False
    rounds: bool = False
    experts: int = 0

    @property
    def block(self) -> int:
        """B."""
        return int(self.scales.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and the other data of groups and spans."""
        beside = (self.scales, self.zeros, self.minimums, self.steps, self.minimum_steps)
        each = sum(one.shape[1] * one.dtype.itemsize for one in beside if one is not None)
        return self.outer * (self.inner * self.bits // 8 + each)

    @classmethod
    def pack(
        cls,
        weight: QuantizedMatrix,
        bias: Tensor | None,
        gated: Gate,
        compute: torch.dtype,
        rounds: bool = False,
        experts: int = 0,
    ) -> PackedIntegers:
        """Pack it for inputs of this dtype, which are rounded if requested."""
        processor, weight = Processor.here(), _without_ones(weight)
        pairs = compute is torch.bfloat16 and processor.multiplies_bf16 and not rounds
        # Numbers are widened once for eight rows; four-bit ones are in quarters of a word.
        block = block_of(processor, rounded.VECTORS if rounds else QUARTERS if weight.bits == 4 else 3)
        form = _Form(6 if rounds and _fits_six(weight) else weight.bits, pairs, weight.floats, rounds)
        data = in_turns(lambda part: _packed(_numbers(part, form), form, block), weight, gated, experts)
        bits = weight.scales.view(torch.uint8) if weight.e2m1 else weight.scales
        scales = in_turns(lambda part: in_blocks(part, block), bits, gated, experts).view(weight.scales.dtype)
        others = (weight.zeros, weight.minimums, weight.steps, weight.minimum_steps)
        zeros, minimums, steps, minimum_steps = (
            None if one is None else in_turns(lambda part: in_blocks(part, block), one, gated, experts)
            for one in others
        )
        outer, inner = weight.shape
        added = packed_bias(bias, block, gated, experts)
        kind = form.bits, inner, outer, gated, pairs
        return cls(data, scales, zeros, added, *kind, minimums, steps, minimum_steps, weight.floats, rounds, experts)

    @property
    def rows_apart(self) -> bool:
        """See :class:`~foresay.verifier.ops.linear.PackedWeight`."""
        return not self.pairs

    def select_rows(self, rows: Tensor) -> PackedIntegers:
        """See :class:`~foresay.verifier.ops.linear.PackedWeight`."""
        found: dict[str, Any] = {name: only_rows(blocks, rows) for name, blocks in self._blocks.items()}
        return replace(self, outer=len(rows), **found)

    def replace(self, rows: Tensor, other: PackedIntegers, numbers: Tensor) -> None:
        """See :class:`~foresay.verifier.ops.linear.PackedWeight`."""
        for blocks, source in zip(self._blocks.values(), other._blocks.values(), strict=True):
            replace_rows(blocks, rows, source, numbers)

    @property
    def _blocks(self) -> dict[str, Tensor]:
        """What has a part for each output."""
        names = ("data", "scales", "zeros", "minimums", "steps", "minimum_steps")
        return {name: blocks for name in names if (blocks := getattr(self, name)) is not None}

    def plain(self) -> Tensor:
        """fp32[O, K]: the dequantised weight."""
        return self.matrix().plain()

    def matrix(self) -> QuantizedMatrix:
        """The quantised weight, one number per byte."""

        def rows(blocks: Tensor | None) -> Tensor | None:
            if blocks is None:
                return None
            kind = self.gated, self.outer, self.experts
            return from_turns(lambda part: part.transpose(1, 2).flatten(0, 1), blocks, *kind)

        form = _Form(self.bits, self.pairs, self.floats, self.rounds)
        numbers = from_turns(lambda part: _unpacked(part, form), self.data, self.gated, self.outer, self.experts)
        scales = rows(self.scales)
        assert scales is not None, "all groups have scales"
        if self.e2m1:
            return QuantizedMatrix(packed(numbers), scales, None, 4, self.inner, steps=rows(self.steps))
        if self.rounds:
            numbers = numbers - _more(self.bits, self.signed)
        elif not self.signed:
            numbers = numbers & 15
        if self.floats:
            numbers = numbers.view(FP8)
        more = (rows(one) for one in (self.minimums, self.steps, self.minimum_steps))
        return QuantizedMatrix(numbers, scales, rows(self.zeros), 8, self.inner, *more)

    @property
    def e2m1(self) -> bool:
        """Whether values are floats of 4 bits."""
        return self.bits == 4 and self.scales.dtype in (E8M0, FP8)

    @property
    def signed(self) -> bool:
        """Whether values have a sign."""
        return self.bits != 4 or self.minimums is None

    def rounded(self, x: Tensor) -> Tensor | None:
        """See :class:`~foresay.verifier.ops.linear.PackedWeight`."""
        return rounded_product(x, self.matrix(), self.plain_bias()) if self.rounds else None

    def plain_bias(self) -> Tensor | None:
        """fp32[O]: the bias as it was."""
        return plain_bias(self.bias, self.block, self.gated, self.outer, self.experts)

    def product(self, x: Tensor, dtype: torch.dtype, count: Tensor | None, heads: int = 0) -> Tensor:
        """See :class:`~foresay.verifier.ops.linear.PackedWeight`."""
        each = gate_parts(self.gated) * max(1, self.experts)
        out, compute, piece = arena((len(x), self.outer // each * max(1, heads)), dtype), x.dtype, 0
        count, more = counted(count, len(x)), list[Tensor]()
        if self.rounds:
            compute, piece = torch.int8, piece_of(self.inner // self.scales.shape[1])
            rows = count[2:] if self.experts else count
            offset = OFFSET if self.e2m1 else _more(self.bits, self.signed)
            x, *more = rounded.round_rows(x, piece, offset, rows)
        minimums, steps = self.minimums is not None, self.steps is not None
        has = self.bias is not None, self.bits, self.scales.dtype, self.zeros is not None, self.pairs, minimums, steps
        groups, spans = self.scales.shape[1], 1 if self.steps is None else self.steps.shape[1]
        others = (self.scales, self.zeros, self.minimums, self.steps, self.minimum_steps)
        kind = self.block, compute, out.dtype, self.gated, *has, self.floats, piece
        shape = IntegerShape(*kind, experts=self.experts > 0 and not heads, heads=heads)
        (rounded if self.rounds else integer_product).kernel_of(shape)(
            x, self.data, out, 0 if self.bias is None else self.bias, count,
            len(self.data) // each, self.outer // each, self.inner,
            *(0 if one is None else one for one in others), groups, self.inner // groups, spans, groups // spans, *more,
        )  # fmt: skip
        return out


def _without_ones(weight: QuantizedMatrix) -> QuantizedMatrix:
    """The same with steps as scales, if each group has its own step with a multiple of one, as in Q4_1."""
    multiples = [one for one in (weight.scales, weight.minimums) if one is not None]
    if weight.steps is None or weight.span != weight.group or not all((one == 1).all() for one in multiples):
        return weight
    return replace(weight, scales=weight.steps, minimums=weight.minimum_steps, steps=None, minimum_steps=None)


@dataclass(frozen=True, slots=True)
class _Form:
    """The parameters of a layout."""

    bits: int
    pairs: bool
    floats: bool
    rounds: bool


def _fits_six(weight: QuantizedMatrix) -> bool:
    """Whether numbers of 8 bits are small enough for 6, as those of Q5 and Q6 are."""
    if weight.bits != 8 or weight.floats or piece_of(weight.group) % 16:
        return False
    least, most = weight.values.aminmax()
    return int(least) >= -32 and int(most) < 32


def _numbers(weight: QuantizedMatrix, form: _Form) -> Tensor:
    """int8[O, K]: as they are packed."""
    if weight.e2m1:
        return weight.codes()
    numbers = weight.numbers().view(torch.int8)
    return numbers + _more(form.bits, weight.signed) if form.rounds else numbers


def _more(bits: int, signed: bool) -> int:
    """The offset that makes numbers unsigned, for rounded inputs."""
    return (1 << (bits - 1)) if signed else 0


def _packed(numbers: Tensor, form: _Form, block: int) -> Tensor:
    """int8[O, K] in blocks."""
    shaped = filled(numbers, block)
    if form.rounds:
        words: Tensor = shaped.unflatten(2, (-1, 4)).transpose(1, 2)
        if form.bits == 8:
            return words
        if form.bits == 6:
            fours: Tensor = words.unflatten(1, (-1, 4))
            lower, upper = (fours & 15).unflatten(2, (2, 2)), fours >> 4
            high = sum((upper[:, :, at] << 2 * at for at in range(1, 4)), upper[:, :, 0])
            return torch.cat((lower[:, :, :, 0] | lower[:, :, :, 1] << 4, high.unsqueeze(2)), dim=2).flatten(1, 2)
        pairs: Tensor = words.unflatten(1, (-1, 2))
        return pairs[:, :, 0] | pairs[:, :, 1] << 4
    if form.bits == 8:
        if not form.pairs:
            return shaped.transpose(1, 2)
        apart = shaped.unflatten(2, (-1, 2)).unflatten(1, (-1, LANES))
        whole: Tensor = apart.permute(0, 3, 1, 2, 4) if form.floats else apart.permute(0, 3, 1, 4, 2)
        return whole
    if form.pairs:
        return _words(shaped.unflatten(2, (-1, 2)).unflatten(1, (QUARTERS, -1)).permute(0, 3, 2, 4, 1), torch.int16)
    return _words(shaped.unflatten(2, (-1, 8)).transpose(1, 2), torch.int32)


def _unpacked(blocks: Tensor, form: _Form) -> Tensor:
    """The reverse: int8[padded O, K]."""
    if form.rounds:
        return _whole(blocks, form.bits).transpose(1, 2).flatten(2).flatten(0, 1)
    if form.bits == 8:
        if not form.pairs:
            return blocks.transpose(1, 2).flatten(0, 1)
        apart = blocks if form.floats else blocks.transpose(3, 4)
        return apart.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 2)
    numbers = _parts(blocks)
    if form.pairs:
        return numbers.permute(0, 4, 2, 1, 3).flatten(0, 2).flatten(1)
    return numbers.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)


def _whole(blocks: Tensor, bits: int) -> Tensor:
    """int8[O / B, K / 4, B, 4]: the unsigned numbers of the layout for rounded inputs."""
    if bits == 8:
        return blocks
    halves, upper = blocks, None
    if bits == 6:
        fours = blocks.unflatten(1, (-1, 3))
        halves, upper = fours[:, :, :2].flatten(1, 2), fours[:, :, 2]
    lower = torch.stack((halves & 15, (halves >> 4) & 15), dim=2).flatten(1, 2)
    if upper is None:
        return lower
    return lower | (torch.stack([upper >> 2 * at & 3 for at in range(4)], dim=2) << 4).flatten(1, 2)


def _words(numbers: Tensor, of: torch.dtype) -> Tensor:
    """Four-bit numbers, [.., N], in words: the first in the lowest bits."""
    total = torch.zeros(numbers.shape[:-1], dtype=of)
    for at, part in enumerate(numbers.unbind(-1)):
        total |= (part.to(of) & 15) << 4 * at
    return total


def _parts(words: Tensor) -> Tensor:
    """int8[.., N]: the reverse."""
    size = 8 * words.dtype.itemsize
    return torch.stack([(words << (size - 4 - at)) >> (size - 4) for at in range(0, size, 4)], dim=-1).to(torch.int8)
