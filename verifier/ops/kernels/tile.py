"""The product of one tile of outputs and rows: a chain of MMAs in order of k, whatever rows there are.

Weights stand as :mod:`verifier.ops.kernels.blocked` has them. Whole numbers become halves by bits: behind the exponent
of 2^23 they are fp32 of 2^23 more, which a difference takes away, with what means zero. e4m3 has the bits of fp32 but
for an exponent that begins 120 lower. Either is exact, and the halves are what was meant but for the scale. Sums of a
block are multiplied by its group's scale in fp32, and added in order; a weight with one scale for each output is
multiplied by it at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _halves(words, zero, KIND: tl.constexpr, kind: tl.constexpr):
    """Values as the dtype of x. words: int32[TILE, N], a value in each. zero: fp32[TILE, 1], 2^23 more than what means
    zero.
    """
    if KIND == "e4m3":  # copies of the sign stand above
        moved = (words << 20) & -0x78100000
        return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(kind)  # 2^120
    return ((words | 0x4B000000).to(tl.float32, bitcast=True) - zero).to(kind)


@triton.jit
def _inputs(x, rows, base, offset, R, K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """[TILE rows, WIDTH]: a group's inputs from ``offset`` on; none behind its end. base: where the group begins."""
    inner = offset + tl.arange(0, WIDTH)
    where = rows.to(tl.int64)[:, None] * K + base + inner[None, :]
    return tl.load(x + where, mask=(rows < R)[:, None] & (inner < GROUP)[None, :], other=0.0)


@triton.jit
def _stepped(multiples, steps, group, columns, inside, OUTER: tl.constexpr, SPAN: tl.constexpr):
    """fp32[TILE]: a group's scales or minimums. SPAN: groups of a step; 0: there are no steps."""
    found = tl.load(multiples + tl.cast(group, tl.int64) * OUTER + columns, mask=inside, other=0).to(tl.float32)
    if SPAN > 0:
        there = steps + tl.cast(group // SPAN, tl.int64) * OUTER + columns
        found = found * tl.load(there, mask=inside, other=0).to(tl.float32)
    return found


@triton.jit
def _of_group(scales, offsets, steps, group, columns, inside, KIND: tl.constexpr, OUTER: tl.constexpr,
              GROUPS: tl.constexpr, SPAN: tl.constexpr, OFFSETS: tl.constexpr):  # fmt: skip
    """fp32[TILE] each: a group's scale; its minimum, if it has one; 2^23 more than what means zero."""
    scale = _stepped(scales, steps, group, columns, inside, OUTER, SPAN)
    added: tl.constexpr = 128.0 if KIND == "int8" else (8.0 if KIND == "int4" else 0.0)
    zero = tl.full(columns.shape, 8388608.0 + added, tl.float32)
    minimum = zero
    if OFFSETS == "minimums":
        minimum = _stepped(offsets, steps + (GROUPS // SPAN) * OUTER, group, columns, inside, OUTER, SPAN)
    if OFFSETS == "zeros":
        zero = zero + _stepped(offsets, steps, group, columns, inside, OUTER, 0)
    return scale, minimum, zero


@triton.jit
def _floats(x, weight, rows, columns, begin, end, R, OUTER: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """fp32[TILE outputs, TILE rows]: of a weight of floats, [O, K]."""
    total = tl.full([TILE, TILE], 0.0, tl.float32)
    for start in tl.range(begin, end, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        where = columns.to(tl.int64)[:, None] * K + inner[None, :]
        left = tl.load(weight + where, mask=(columns < OUTER)[:, None] & (inner < K)[None, :], other=0.0)
        right = _inputs(x, rows, 0, start, R, K, K, BLOCK)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit
def tile_product(x, weight, scales, offsets, steps, rows, columns, begin, end, R, OUTER: tl.constexpr, K: tl.constexpr,
                 TILE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
                 OFFSETS: tl.constexpr):  # fmt: skip
    """fp32[TILE outputs, TILE rows]: sums over begin .. end - 1 of the filled inner width, in order of k."""
    if KIND == "floats":
        return _floats(x, weight, rows, columns, begin, end, R, OUTER, K, TILE, BLOCK)
    group_size: tl.constexpr = K // GROUPS
    blocks: tl.constexpr = (group_size + BLOCK - 1) // BLOCK
    parts: tl.constexpr = 2 if KIND == "int4" or KIND == "uint4" else 1
    width: tl.constexpr = BLOCK // parts
    folded: tl.constexpr = GROUPS > 1 or OFFSETS == "minimums"
    inside = columns < OUTER
    total = tl.full([TILE, TILE], 0.0, tl.float32)
    scale, minimum, zero = _of_group(
        scales, offsets, steps, begin // BLOCK // blocks, columns, inside, KIND, OUTER, GROUPS, SPAN, OFFSETS
    )
    for block in tl.range(begin // BLOCK, end // BLOCK):
        group, offset = block // blocks, block % blocks * BLOCK
        where = (tl.cast(block, tl.int64) * OUTER + columns)[:, None] * width + tl.arange(0, width)[None, :]
        words = tl.load(weight + where, mask=inside[:, None], other=0)
        if KIND == "e4m3":
            words = words.to(tl.int8, bitcast=True)
        words = words.to(tl.int32)
        right = _inputs(x, rows, group * group_size, offset, R, K, group_size, width)
        kind: tl.constexpr = right.dtype
        before = tl.full([TILE, TILE], 0.0, tl.float32) if folded else total
        left = _halves(words & 15 if parts == 2 else words, zero[:, None], KIND, kind)
        part = tl.dot(left, tl.trans(right), before, input_precision="ieee")
        sums = tl.sum(right.to(tl.float32), 1)
        if parts == 2:
            right = _inputs(x, rows, group * group_size, offset + width, R, K, group_size, width)
            part = tl.dot(_halves(words >> 4, zero[:, None], KIND, kind), tl.trans(right), part, input_precision="ieee")
            sums = sums + tl.sum(right.to(tl.float32), 1)
        if folded:
            total = tl.fma(part, scale[:, None], total)
            if OFFSETS == "minimums":
                total = tl.fma(minimum[:, None], -sums[None, :], total)
            later = tl.minimum(block + 1, end // BLOCK - 1) // blocks  # asked for before it is needed
            scale, minimum, zero = _of_group(
                scales, offsets, steps, later, columns, inside, KIND, OUTER, GROUPS, SPAN, OFFSETS
            )
        else:
            total = part
    return total if folded else total * scale[:, None]
