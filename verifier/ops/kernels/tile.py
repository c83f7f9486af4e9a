"""The product of one tile of outputs and rows: a chain of MMAs in order of k, each with as many rows as the tile.

A tile of 16, 32, 64 or 128 rows R is multiplied by one instruction for each 16 of k: on ``sm_90`` wgmma of m64nRk16,
whose sums of a row are the same for each R. NVIDIA does not guarantee that: it was observed on an H200, is tested on
every GPU that the kernels' tests run on, and is probed when a server starts. Before ``sm_90`` every instruction has 8
rows, whatever the tile's.

Weights have the layout of :mod:`foresay.verifier.ops.kernels.blocked`. Integers are converted to 16-bit floats by bits:
after the exponent of 2^23 they are fp32 plus 2^23, which is subtracted together with the zero point. e4m3 has the bits
of fp32 except for an exponent that is 120 lower, e2m1 for one that is 126 lower. All are exact, up to the scale. Sums
of a block are multiplied by its group's scale in fp32, and added in order; a weight with one scale for each output is
multiplied by it at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.verifier.ops.kernels.pdl import prefetch_l2


@triton.jit
def _halves(words, zero, KIND: tl.constexpr, kind: tl.constexpr):
    """Values in the dtype of x. words: int32[TILE, N], one each. zero: fp32[TILE, 1], the zero point plus 2^23."""
    if KIND == "e4m3":  # copies of the sign are above
        moved = (words << 20) & -0x78100000
        return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(kind)  # 2^120
    if KIND == "e2m1":  # doubled, and scales are halved
        moved = ((words & 7) << 22) | ((words & 8) << 28)
        return (moved.to(tl.float32, bitcast=True) * 1.7014118346046923e38).to(kind)  # 2^127
    return ((words | 0x4B000000).to(tl.float32, bitcast=True) - zero).to(kind)


@triton.jit
def _inputs(x, rows, base, offset, R, K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH]: a group's inputs from ``offset`` on, of ``rows``; zeros after its end. base: where the group
    begins."""
    inner = offset + tl.arange(0, WIDTH)
    where = rows.to(tl.int64)[:, None] * K + base + inner[None, :]
    return tl.load(x + where, mask=(rows < R)[:, None] & (inner < GROUP)[None, :], other=0.0)


@triton.jit
def nothing(TILE: tl.constexpr, ROWS: tl.constexpr):
    """-0.0, which does not change any number it is added to."""
    # From its bits: Triton drops the sign of a zero float.
    return tl.full([TILE, ROWS], -0x80000000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _more(left, x, rows, base, offset, R, K: tl.constexpr, GROUP: tl.constexpr, sums):
    """``sums`` plus a block's products. left: [TILE, WIDTH] of the weight."""
    right = _inputs(x, rows, base, offset, R, K, GROUP, left.shape[1])
    return tl.dot(left, tl.trans(right), sums, input_precision="ieee")


@triton.jit
def _read(multiples, group, columns, inside, OUTER: tl.constexpr):
    return tl.load(multiples + tl.cast(group, tl.int64) * OUTER + columns, mask=inside, other=0)


@triton.jit
def _half_of_power(exponents):
    """fp32: half of MXFP4's scales, 2^(exponent - 128), made of two powers since some have no exponent in fp32."""
    exponents = exponents.to(tl.int32)
    one = ((exponents >> 1) + 63) << 23
    other = (exponents - (exponents >> 1) + 63) << 23
    return one.to(tl.float32, bitcast=True) * other.to(tl.float32, bitcast=True)


@triton.jit
def _stepped(multiples, steps, group, columns, inside, OUTER: tl.constexpr, SPAN: tl.constexpr):
    """fp32[TILE]: a group's scales or minimums. SPAN: groups of a step; 0: there are no steps."""
    found = _read(multiples, group, columns, inside, OUTER).to(tl.float32)
    if SPAN > 0:
        there = steps + tl.cast(group // SPAN, tl.int64) * OUTER + columns
        found = found * tl.load(there, mask=inside, other=0).to(tl.float32)
    return found


@triton.jit
def _of_group(scales, offsets, steps, group, columns, inside, KIND: tl.constexpr, OUTER: tl.constexpr,
              GROUPS: tl.constexpr, SPAN: tl.constexpr, OFFSETS: tl.constexpr):  # fmt: skip
    """fp32[TILE] each: a group's scale; its minimum, if it has one; its zero point plus 2^23."""
    if KIND == "e2m1":
        scale = _half_of_power(_read(scales, group, columns, inside, OUTER))
    else:
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
def float_block(weight, columns, start, OUTER: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """[TILE, BLOCK]: a block of a float weight, [O, K]."""
    inner = start + tl.arange(0, BLOCK)
    where = columns.to(tl.int64)[:, None] * K + inner[None, :]
    return tl.load(weight + where, mask=(columns < OUTER)[:, None] & (inner < K)[None, :], other=0.0)


@triton.jit
def _floats(x, weight, rows, columns, begin, end, R, OUTER: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, early):
    """The sums for a float weight. early: its first block, if that was loaded before."""
    sums, after = tl.full([columns.shape[0], rows.shape[0]], 0.0, tl.float32), begin
    if early is not None:
        sums, after = _more(early, x, rows, 0, begin, R, K, K, sums), begin + BLOCK
    for start in tl.range(after, end, BLOCK):
        sums = _more(float_block(weight, columns, start, OUTER, K, BLOCK), x, rows, 0, start, R, K, K, sums)
    return sums


@triton.jit
def columns_of(tile, OUTER: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr):
    """The outputs of a tile: TILE consecutive ones, or if gated alternating groups of eight gates and their eight up
    outputs."""
    number = tl.arange(0, TILE)
    columns = tile * TILE + number
    if GATED:
        columns = tile * (TILE // 2) + number // 16 * 8 + number % 8 + number % 16 // 8 * (OUTER // 2)
    return columns


@triton.jit
def bring_tile(weight, columns, begin, end, OUTER: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
               KIND: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Prefetch the first AHEAD blocks of a tile's weight, or as many as it has, into the L2, in lines of 128 bytes. GPU
    weights have 16 bits."""
    last, inside = end - BLOCK, tl.minimum(columns, OUTER - 1).to(tl.int64)[:, None]
    lines: tl.constexpr = BLOCK * 2 // 128
    width: tl.constexpr = BLOCK // 2 if KIND == "int4" or KIND == "uint4" or KIND == "e2m1" else BLOCK
    for number in tl.static_range(AHEAD):
        start = tl.minimum(begin + number * BLOCK, last)
        if KIND == "floats":
            prefetch_l2(weight + inside * K + tl.minimum(start + 64 * tl.arange(0, lines)[None, :], K - 1))
        else:
            prefetch_l2(weight + (tl.cast(start // BLOCK, tl.int64) * OUTER + inside) * width)


@triton.jit
def tile_product(x, weight, scales, offsets, steps, rows, columns, begin, end, R, OUTER: tl.constexpr,
                 K: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
                 OFFSETS: tl.constexpr, early=None):  # fmt: skip
    """fp32[TILE, ROWS]: of outputs ``columns`` and of ``rows`` of x, those below R, sums over begin .. end - 1 of the
    filled inner width, in order of k. early: of floats the first block, or None."""
    if KIND == "floats":
        return _floats(x, weight, rows, columns, begin, end, R, OUTER, K, BLOCK, early)
    group_size: tl.constexpr = K // GROUPS
    blocks: tl.constexpr = (group_size + BLOCK - 1) // BLOCK
    parts: tl.constexpr = 2 if KIND == "int4" or KIND == "uint4" or KIND == "e2m1" else 1
    width: tl.constexpr = BLOCK // parts
    folded: tl.constexpr = GROUPS > 1 or OFFSETS == "minimums"
    kind: tl.constexpr = x.dtype.element_ty
    inside = columns < OUTER
    none = tl.full([columns.shape[0], rows.shape[0]], 0.0, tl.float32)
    totals = none
    scale, minimum, zero = _of_group(
        scales, offsets, steps, begin // BLOCK // blocks, columns, inside, KIND, OUTER, GROUPS, SPAN, OFFSETS
    )
    for block in tl.range(begin // BLOCK, end // BLOCK):
        group, offset = block // blocks, block % blocks * BLOCK
        base = group * group_size
        where = (tl.cast(block, tl.int64) * OUTER + columns)[:, None] * width + tl.arange(0, width)[None, :]
        words = tl.load(weight + where, mask=inside[:, None], other=0)
        if KIND == "e4m3":
            words = words.to(tl.int8, bitcast=True)
        words = words.to(tl.int32)
        sums = none if folded else totals
        inputs = none
        for half in tl.static_range(parts):
            at = offset + half * width
            left = _halves((words >> 4 * half) & 15 if parts == 2 else words, zero[:, None], KIND, kind)
            sums = _more(left, x, rows, base, at, R, K, group_size, sums)
            if OFFSETS == "minimums":  # summed by MMAs too: no order is left to a reduction over threads
                inputs = _more(tl.full(left.shape, 1.0, kind), x, rows, base, at, R, K, group_size, inputs)
        if folded:
            sums = _folded(totals, sums, scale)
            if OFFSETS == "minimums":
                sums = _folded(sums, inputs, -minimum)
            later = tl.minimum(block + 1, end // BLOCK - 1) // blocks  # loaded before it is needed
            scale, minimum, zero = _of_group(
                scales, offsets, steps, later, columns, inside, KIND, OUTER, GROUPS, SPAN, OFFSETS
            )
        totals = sums
    return totals if folded else totals * scale[:, None]


@triton.jit
def _folded(totals, sums, scale):
    """``totals + sums * scale``, rounded once. scale: fp32[TILE]."""
    return tl.fma(sums, tl.broadcast_to(scale[:, None], sums.shape), totals)
