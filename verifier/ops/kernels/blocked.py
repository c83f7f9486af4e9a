"""Weights laid out for GPU kernels: a tile of consecutive outputs and one block of k is contiguous.

::

    floats    [O, K], as a checkpoint has them
    8 bits    uint8[K' / B][O][B]: whole numbers plus 128, or e4m3
    4 bits    uint8[K' / B][O][B / 2]: number k of a block in the low half of byte k, number B / 2 + k in the high one;
              plus 8 where they have a sign; or codes of e2m1
    scales    [G][O], of MXFP4's uint8 exponents; and so offsets: zeros or minimums, int8
    steps     fp16[1 or 2][S][O]: of the scales; of the minimums

A block belongs to one group: a group that is not a whole number of blocks is padded with zeros. The meaning of the
numbers: :mod:`foresay.verifier.ops.quantized`. NVFP4's groups are half of the least block of four bits: its numbers
become int8. Imports no triton.

Legend: R rows, K inner width, K' that of filled groups, O outer width, G groups, S spans, B numbers of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.quantized import E8M0, FP8, QuantizedMatrix, packed
from foresay.verifier.ops.records import Gate

#: Block sizes that are tried; a 16-bit tile is multiplied by at least 16 numbers.
LEAST_BLOCK = 16
_BLOCKS = (128, 64, 32, LEAST_BLOCK)
#: Outputs of a program.
TILE = 64
#: Programs wanted for one tile of rows: two for each SM of today's largest GPUs.
_PROGRAMS = 264
#: The least inner width of a segment: shorter ones spend their time filling the pipeline.
_LEAST = 512
#: Kinds of values, and the offset of signed ones.
FLOATS, E4M3, UNSIGNED, E2M1 = "floats", "e4m3", "uint4", "e2m1"
ADDED = {"int8": 128, "int4": 8, UNSIGNED: 0, E2M1: 0}


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """A :class:`~foresay.verifier.ops.linear.PackedWeight` for a GPU. offsets: minimums, if there are two rows of
    steps, else zero points. groups, block: G, B. bias: [O], of any dtype."""

    values: Tensor
    kind: str
    block: int
    inner: int
    gated: Gate
    bias: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None
    steps: Tensor | None = None
    experts: int = 0

    @classmethod
    def pack(
        cls, weight: Tensor | QuantizedMatrix, bias: Tensor | None = None, gated: Gate = "", experts: int = 0
    ) -> BlockedWeight:
        """Lay it out. Floats are unchanged."""
        if isinstance(weight, Tensor):
            return cls(weight, FLOATS, _BLOCKS[0], weight.shape[1], gated, bias, experts=experts)
        if weight.e2m1 and weight.scales.dtype is not E8M0:
            weight = weight.whole()
        kind, block = _kind(weight), block_of(weight.group, weight.bits)
        offsets, steps = weight.zeros if weight.minimums is None else weight.minimums, weight.steps
        if steps is not None and weight.minimum_steps is not None:
            steps = torch.stack((steps, weight.minimum_steps))
        values, scales = _blocks(weight, kind, block), weight.scales
        scales = scales.view(torch.uint8) if kind == E2M1 else scales
        scales, offsets, steps = (None if one is None else one.mT.contiguous() for one in (scales, offsets, steps))
        return cls(values, kind, block, weight.inner, gated, bias, scales, offsets, steps, experts)

    @property
    def outer(self) -> int:
        """O."""
        return len(self.values) if self.kind == FLOATS else self.values.shape[1]

    @property
    def groups(self) -> int:
        """G; 1 for floats, which have no scale."""
        return 1 if self.scales is None else len(self.scales)

    @property
    def spans(self) -> int:
        """S; 0 if scales are not multiples."""
        return 0 if self.steps is None else self.steps.shape[-2]

    @property
    def minimums(self) -> bool:
        """Whether groups have minimums."""
        return self.steps is not None and self.steps.dim() == 3

    @property
    def blocks(self) -> int:
        """K' / B."""
        return self.groups * -(-self.inner // self.groups // self.block)

    @property
    def cut(self) -> tuple[int, int]:
        """See :func:`segments_of`; of experts those of one alone."""
        return segments_of(self.outer // max(1, self.experts), self.blocks, self.block)

    def segments(self) -> list[slice]:
        """The segments of K."""
        count, length = self.cut
        filled, group = self.blocks * self.block // self.groups, self.inner // self.groups
        ends = [at // filled * group + min(at % filled, group) for at in range(0, count * length, length)]
        return [slice(*pair) for pair in pairwise([*ends, self.inner])]

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and the other data of groups and spans."""
        return sum(one.nbytes for one in (self.values, self.scales, self.offsets, self.steps) if one is not None)

    def plain(self) -> Tensor:
        """[O, K]: the dequantised weight."""
        if self.scales is None:
            return self.values
        scales, offsets, steps = (None if one is None else one.mT for one in (self.scales, self.offsets, self.steps))
        more = (None, offsets, *steps.unbind()) if self.minimums and steps is not None else (offsets, None, steps)
        assert scales is not None, "all groups have scales"
        if self.kind == E2M1:
            return QuantizedMatrix(packed(self._numbers()), scales.view(E8M0), None, 4, self.inner).plain()
        return QuantizedMatrix(self._numbers(), scales, more[0], 8, self.inner, *more[1:]).plain()

    def _numbers(self) -> Tensor:
        """int8 or e4m3 [O, K]; of e2m1 codes."""
        rows = self.values
        if self.kind in ("int4", UNSIGNED, E2M1):
            rows = torch.cat((rows & 15, rows >> 4), dim=2)
        whole = rows.transpose(0, 1).unflatten(1, (self.groups, -1)).flatten(2)[:, :, : self.inner // self.groups]
        bits: Tensor = whole.flatten(1)
        return bits.view(FP8) if self.kind == E4M3 else (bits - ADDED[self.kind]).view(torch.int8)

    def rounded(self, x: Tensor) -> None:
        """Rows are not rounded."""

    def plain_bias(self) -> Tensor | None:
        """[O]: the bias as it was."""
        return self.bias


def segments_of(outer: int, blocks: int, block: int) -> tuple[int, int]:
    """How many segments a weight with this many outputs is cut into, and the inner width of each, in whole blocks; this
    does not depend on rows. blocks: of the inner width. block: numbers of one.
    """
    wanted = max(1, _PROGRAMS // -(-outer // TILE))
    length = max(-(-blocks // wanted), min(_LEAST // block, blocks))
    return -(-blocks // length), length * block


def block_of(group: int, bits: int) -> int:
    """B: the largest size with which a group grows by at most a sixteenth, else the smallest there is."""
    sizes = [size for size in _BLOCKS if size * bits >= 128]  # each half of four bits is a separate tile
    return next((size for size in sizes if 16 * (-group % size) <= group), sizes[-1])


def _kind(weight: QuantizedMatrix) -> str:
    if weight.e2m1:
        return E2M1
    return E4M3 if weight.floats else f"int{weight.bits}" if weight.signed else UNSIGNED


def _blocks(weight: QuantizedMatrix, kind: str, block: int) -> Tensor:
    """uint8: the values in blocks."""
    numbers = weight.codes() if kind == E2M1 else weight.numbers()
    bits = numbers.view(torch.uint8) if kind == E4M3 else numbers.view(torch.uint8) + ADDED[kind]
    groups = bits.unflatten(1, (-1, weight.group))
    filled = functional.pad(groups, (0, -weight.group % block), value=ADDED.get(kind, 0))
    blocks: Tensor = filled.flatten(1).unflatten(1, (-1, block)).transpose(0, 1)
    if weight.bits == 4:
        low, high = blocks.chunk(2, dim=2)
        blocks = low | (high << 4)
    return blocks.contiguous()
