"""The product of one tile of outputs and rows: chains of MMAs in order of k, each of 16 rows, however many there are.

A tile of 16 to 128 rows is one to eight such chains: one instruction (on ``sm_90`` wgmma of m64n16k16), so that a row's
sums are formed alike in a tile of any size.

Weights stand as :mod:`foresay.verifier.ops.kernels.blocked` has them. Whole numbers become halves by bits: behind the
exponent of 2^23 they are fp32 of 2^23 more, which a difference takes away, with what means zero. e4m3 has the bits of
fp32 but for an exponent that begins 120 lower. Either is exact, and the halves are what was meant but for the scale.
Sums of a block are multiplied by its group's scale in fp32, and added in order; a weight with one scale for each output
is multiplied by it at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.verifier.ops.kernels.chain import bring, bring_bytes

#: Rows of a chain.
DOT = tl.constexpr(16)


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
def _inputs(x, row, base, offset, R, K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """[DOT rows, WIDTH]: a group's inputs from ``offset`` on, of rows from ``row`` on; none behind its end. base: where
    the group begins."""
    rows, inner = row + tl.arange(0, DOT), offset + tl.arange(0, WIDTH)
    where = rows.to(tl.int64)[:, None] * K + base + inner[None, :]
    return tl.load(x + where, mask=(rows < R)[:, None] & (inner < GROUP)[None, :], other=0.0)


@triton.jit
def _sums(TILE: tl.constexpr, ROWS: tl.constexpr):
    """Nothing yet, of each chain: fp32[TILE, DOT]."""
    sums = ()
    for _ in tl.static_range(ROWS // DOT):
        sums += (tl.full([TILE, DOT], 0.0, tl.float32),)
    return sums


@triton.jit
def nothing(TILE: tl.constexpr, ROWS: tl.constexpr):
    """-0.0 of each chain, to which any number can be added and stays what it is."""
    sums = ()
    for _ in tl.static_range(ROWS // DOT):  # by its bits: of a float that is zero Triton takes the sign
        sums += (tl.full([TILE, DOT], -0x80000000, tl.int32).to(tl.float32, bitcast=True),)
    return sums


@triton.jit
def added(sums, more, ROWS: tl.constexpr):
    """``sums + more`` of each chain."""
    total = ()
    for chain in tl.static_range(ROWS // DOT):
        total += (sums[chain] + more[chain],)
    return total


@triton.jit
def _dots(left, x, row, base, offset, R, K: tl.constexpr, GROUP: tl.constexpr, sums, ROWS: tl.constexpr):
    """``sums`` and what a block adds to each of them. left: [TILE, WIDTH] of the weight."""
    more = ()
    for chain in tl.static_range(ROWS // DOT):
        right = _inputs(x, row + chain * DOT, base, offset, R, K, GROUP, left.shape[1])
        more += (tl.dot(left, tl.trans(right), sums[chain], input_precision="ieee"),)
    return more


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
def _floats(x, weight, row, columns, begin, end, R, OUTER: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Of a weight of floats, [O, K]."""
    sums = _sums(columns.shape[0], ROWS)
    for start in tl.range(begin, end, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        where = columns.to(tl.int64)[:, None] * K + inner[None, :]
        left = tl.load(weight + where, mask=(columns < OUTER)[:, None] & (inner < K)[None, :], other=0.0)
        if ROWS > DOT:  # brings it to registers: shared memory would be read again for each chain
            left = left + tl.full(left.shape, -0.0, left.dtype)
        sums = _dots(left, x, row, 0, start, R, K, K, sums, ROWS)
    return sums


@triton.jit
def columns_of(tile, OUTER: tl.constexpr, TILE: tl.constexpr, GATED: tl.constexpr):
    """The outputs of a tile: TILE in a row, or if gated eight gates and the eight that they are for, in turns."""
    number = tl.arange(0, TILE)
    columns = tile * TILE + number
    if GATED:
        columns = tile * (TILE // 2) + number // 16 * 8 + number % 8 + number % 16 // 8 * (OUTER // 2)
    return columns


@triton.jit
def bring_tile(weight, columns, begin, end, OUTER: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
               KIND: tl.constexpr, AHEAD: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """The first AHEAD blocks of a tile's weight, or as many as it has, into the L2. BULK: by two requests for each
    output, so one a thread; else one for each line of 128 bytes. Weights of a GPU have 16 bits."""
    last, inside = end - BLOCK, tl.minimum(columns, OUTER - 1).to(tl.int64)[:, None]
    if BULK and AHEAD > 0:
        half = tl.minimum(tl.minimum(end, K) - begin, AHEAD * BLOCK) // 2
        bring_bytes(weight + inside * K + begin + half * tl.arange(0, 2)[None, :], half * 2)
        return
    lines: tl.constexpr = BLOCK * 2 // 128
    width: tl.constexpr = BLOCK // 2 if KIND == "int4" or KIND == "uint4" else BLOCK
    for number in tl.static_range(AHEAD):
        start = tl.minimum(begin + number * BLOCK, last)
        if KIND == "floats":
            bring(weight + inside * K + tl.minimum(start + 64 * tl.arange(0, lines)[None, :], K - 1))
        else:
            bring(weight + (tl.cast(start // BLOCK, tl.int64) * OUTER + inside) * width)


@triton.jit
def tile_product(x, weight, scales, offsets, steps, row, columns, begin, end, R, OUTER: tl.constexpr, K: tl.constexpr,
                 ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
                 OFFSETS: tl.constexpr):  # fmt: skip
    """fp32[TILE outputs, DOT rows] for each DOT of ROWS rows from ``row`` on: sums over begin .. end - 1 of the filled
    inner width, in order of k."""
    if KIND == "floats":
        return _floats(x, weight, row, columns, begin, end, R, OUTER, K, ROWS, BLOCK)
    group_size: tl.constexpr = K // GROUPS
    blocks: tl.constexpr = (group_size + BLOCK - 1) // BLOCK
    parts: tl.constexpr = 2 if KIND == "int4" or KIND == "uint4" else 1
    width: tl.constexpr = BLOCK // parts
    folded: tl.constexpr = GROUPS > 1 or OFFSETS == "minimums"
    kind: tl.constexpr = x.dtype.element_ty
    inside = columns < OUTER
    TILE: tl.constexpr = columns.shape[0]
    totals = _sums(TILE, ROWS)
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
        none = _sums(TILE, ROWS)
        sums = none if folded else totals
        inputs = none
        for half in tl.static_range(parts):
            at = offset + half * width
            left = _halves((words >> 4 * half) & 15 if parts == 2 else words, zero[:, None], KIND, kind)
            sums = _dots(left, x, row, base, at, R, K, group_size, sums, ROWS)
            if OFFSETS == "minimums":  # summed as everything else is: no order is left to a reduction over threads
                inputs = _dots(tl.full(left.shape, 1.0, kind), x, row, base, at, R, K, group_size, inputs, ROWS)
        if folded:
            sums = _folded(totals, sums, scale, ROWS)
            if OFFSETS == "minimums":
                sums = _folded(sums, inputs, -minimum, ROWS)
            later = tl.minimum(block + 1, end // BLOCK - 1) // blocks  # asked for before it is needed
            scale, minimum, zero = _of_group(
                scales, offsets, steps, later, columns, inside, KIND, OUTER, GROUPS, SPAN, OFFSETS
            )
        totals = sums
    return totals if folded else _scaled(totals, scale, ROWS)


@triton.jit
def _folded(totals, sums, scale, ROWS: tl.constexpr):
    """``totals + sums * scale``, rounded once. scale: fp32[TILE]."""
    more = ()
    for chain in tl.static_range(ROWS // DOT):
        more += (tl.fma(sums[chain], tl.broadcast_to(scale[:, None], sums[chain].shape), totals[chain]),)
    return more


@triton.jit
def _scaled(totals, scale, ROWS: tl.constexpr):
    more = ()
    for chain in tl.static_range(ROWS // DOT):
        more += (totals[chain] * scale[:, None],)
    return more
