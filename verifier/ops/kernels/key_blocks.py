"""Key blocks: the common part of the attention kernels, and why a row has the same bits in each of them.

    position  0 .. 63   64 .. 127   ...        512 ..                         length
    block     |   0   |     1     | ... |   7  |   8   | ...  | committed rest + a row's own path |
    split     |                0               |                  1 ...

A *block* is the keys of positions ``64j .. 64j+63``; its partial (largest score, sum of weights, weighted values) is
a function of one row's query and of those keys in order of position. A *split* folds the partials of 8 blocks in
order, and the result folds the splits in order. Any program may compute any part of that sum; the sum itself is fixed.
docs/kernels.md has the whole argument.

Legend: S sequences, R rows, H query heads, G kv heads, D head dim, M stacked rows, B keys of a block, C value columns.

8-bit heads of keys and values and their scales are converted from fp32 and back as in :mod:`foresay.kvpaging.store`.
fp8 (e4m3) is converted with integer operations: the same on every GPU, and in the interpreter. Kernels see it as uint8.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.records import AttentionMetadata


@triton.jit
def widened(numbers):
    """fp32, without loss."""
    if numbers.dtype == tl.int8:
        return numbers.to(tl.float32)
    word = numbers.to(tl.int32)
    # Exponents are 120 lower: a product shifts them, and makes denormals normal.
    return (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def scale_of(low, high, LARGEST: tl.constexpr):
    """fp32[M]: the scales of heads, fp32[M, C] twice. Absolute values have the same order as integers, NaN being the
    largest."""
    sizes = tl.maximum(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.div_rn(tl.max(sizes, axis=1).to(tl.float32, bitcast=True), LARGEST)


@triton.jit
def narrowed(values, scale, kind: tl.constexpr, LARGEST: tl.constexpr):
    """Numbers of ``kind``: [M, C]. values: fp32[M, C]. scale: fp32[M]."""
    value = tl.div_rn(values, tl.where(scale > 0.0, scale, 1.0)[:, None])
    value = tl.where(value > -LARGEST, value, -LARGEST)
    value = tl.where(value < LARGEST, value, LARGEST)
    if kind == tl.int8:  # where fp32 has no fraction bits left, a sum is rounded to an integer, in its last bits
        word = (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        bits = value.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        rounded = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        # The sum with 2^14 has the last digit where denormals have theirs.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
        word = tl.where(size < (121 << 23), small, rounded) | ((bits >> 24) & 0x80)
    return word.to(kind)


#: Keys of a block.
BLOCK = 64
#: Blocks of a split: part of the order of sums. With fewer a program finishes sooner, but each row of a tree has more
#: partials: with 4, 64 rows write and read twice the bytes of the keys and values of a text of 32k.
SPLIT = 8
#: Pipeline stages of the loop over blocks. With 2 a program waits for a block after the one before; with 3 the next is
#: being loaded meanwhile, but two programs no longer fit in an SM of an H100.
STAGES = 2
#: Stacked rows (row x query head of one kv head) of a tile, in every kernel: one shape, so one kind of MMA.
TILE = 64
#: Value columns of a program; wider heads are split into such parts.
VALUE_COLUMNS = 128
#: The launch options of every kernel here. Fused multiply-adds are written explicitly: a compiler that fuses others may
#: do so in one kernel and not in the next.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
#: Numbers that change from batch to batch: a kernel is not compiled again for those that are 1 or even.
INTEGERS = ("R", "count", "table_stride", "tiles", "parts", "whole_splits", "first")


@triton.jit
def softcapped(doubled, CAP: tl.constexpr):
    """``CAP * tanh(x)``. doubled: ``2 * x * log2(e)``."""
    return CAP - 2.0 * CAP / (tl.exp2(doubled) + 1.0)


@triton.jit
def block_partial(query, keys, values, visible, scale, ragged, CAP: tl.constexpr):
    """Largest score, sum of weights and weighted values of one block: fp32[M], fp32[M], fp32[M, C].

    query: [M, D]. keys: [B, D]. values: [B, C]. visible: bool[M, B] or [1, B]. scale, CAP: see :func:`scaling`.
    ragged: whether rows attend to different keys: only then may a value hidden from a row be non-finite.
    All sums are MMAs, that of the weights too (against ones), so no order is left to a reduction over threads.
    """
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if CAP > 0.0:
        scores = softcapped(scores, CAP)
    scores = tl.where(visible, scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    from_zero = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - from_zero[:, None]).to(values.dtype)
    ones = tl.full([keys.shape[0], 16], 1.0, values.dtype)
    sums = tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)
    seen = tl.zeros([query.shape[0]], tl.int32)
    if ragged:  # zero times NaN is NaN: such values count as zeros, and set the sums of rows that attend to them to NaN
        broken = tl.max((tl.abs(values.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, axis=1)
        values = tl.where(tl.abs(values.to(tl.float32)) < float("inf"), values, 0.0)
        seen = tl.max((visible & (broken == 1)[None, :]).to(tl.int32), axis=1)
    mixed = tl.dot(weights, values, input_precision="ieee")
    return largest, sums, tl.where((seen == 1)[:, None], float("nan"), mixed)


@triton.jit
def fold(largest, sums, mixed, next_largest, next_sums, next_mixed):
    """A running partial plus the next one; an empty one (largest -inf, zeros) changes no bit."""
    top = tl.maximum(largest, next_largest)
    from_zero = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(largest - from_zero)
    new = tl.exp2(next_largest - from_zero)
    sums = tl.fma(sums, old, next_sums * new)
    mixed = tl.fma(mixed, tl.broadcast_to(old[:, None], mixed.shape), next_mixed * new[:, None])
    return top, sums, mixed


@triton.jit
def empty(M: tl.constexpr, C: tl.constexpr):
    """The partial of no keys at all."""
    return tl.full([M], float("-inf"), tl.float32), tl.full([M], 0.0, tl.float32), tl.full([M, C], 0.0, tl.float32)


@triton.jit
def pages_of(tables, sequence, table_stride, places, inside, PAGE: tl.constexpr):
    """int32: the pages of places (committed positions, or length + node) of a sequence; 0 outside."""
    return tl.load(tables + sequence * table_stride + places // PAGE, mask=inside, other=0)


@triton.jit
def slots_of(pages, places, PAGE: tl.constexpr):
    """int64: the slots of places on their pages."""
    return pages.to(tl.int64) * PAGE + places % PAGE


@triton.jit
def rows_at(base, scales, slots, head, inside, first_column, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
            kind: tl.constexpr):  # fmt: skip
    """[B, C] of ``kind``: columns of one kv head's rows, zeros outside: a weight of zero does not stop NaN.

    scales: of quantised rows, those of the first slot's keys, or of its values.
    """
    columns = first_column + tl.arange(0, C)
    where = slots[:, None] * (G * D) + head * D + columns[None, :]
    rows = tl.load(base + where, mask=inside[:, None] & (columns < D)[None, :], other=0)
    if base.dtype.element_ty.primitive_bitwidth == 8:
        own = tl.load(scales + slots * (2 * G) + head, mask=inside, other=0.0)
        rows = (widened(rows) * own[:, None]).to(kind)
    return rows


@triton.jit
def tile_sequence(offsets, tile, GROUP: tl.constexpr, TILE: tl.constexpr, SEQUENCES: tl.constexpr, count):
    """The sequence of the tile with this number, and its number there. Past the last: sequence >= count."""
    ids = tl.arange(0, SEQUENCES)
    begin = tl.load(offsets + ids, mask=ids < count, other=0)
    end = tl.load(offsets + ids + 1, mask=ids < count, other=0)
    tiles = ((end - begin) * GROUP + TILE - 1) // TILE
    upto = tl.cumsum(tiles, axis=0)
    sequence = tl.sum(((upto <= tile) & (ids < count)).to(tl.int32), axis=0)
    return sequence, tile - tl.sum(tl.where(ids < sequence, tiles, 0), axis=0)


@triton.jit
def row_sequence(offsets, row, SEQUENCES: tl.constexpr, count):
    """The sequence of a row; past the last row: ``count``."""
    ids = tl.arange(0, SEQUENCES)
    end = tl.load(offsets + ids + 1, mask=ids < count, other=0)
    return tl.sum(((end <= row) & (ids < count)).to(tl.int32), axis=0)


@triton.jit
def held(sequence, count, SEQUENCES: tl.constexpr):
    """A valid sequence, instead of one past the last: its data can be loaded unconditionally."""
    return 0 if SEQUENCES == 1 else tl.minimum(sequence, count - 1)


@triton.jit
def load_queries(query, rows, heads, live, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """[M, WIDE]: queries of stacked rows, zeros where a row is not live and after D."""
    columns = tl.arange(0, WIDE)
    where = (rows.to(tl.int64) * H + heads)[:, None] * D + columns[None, :]
    return tl.load(query + where, mask=live[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def finished(largest, sums, mixed, sinks, heads):
    """Weighted values over the sum of weights; zeros for a row that attends to nothing. sinks: fp32[H], or None. A
    head's sink is folded in here, once and last: a partial with one weight and no value."""
    if sinks is not None:
        logits = tl.load(sinks + heads) * _LOG2_E
        largest, sums, mixed = fold(largest, sums, mixed, logits, tl.full(sums.shape, 1.0, tl.float32),
                                    tl.zeros(mixed.shape, tl.float32))  # fmt: skip
    return mixed / tl.where(sums > 0.0, sums, 1.0)[:, None]


def scaling(scale: float, softcap: float | None) -> tuple[float, float]:
    """The factor of products, and the cap of scores, 0: none; scores are exponents of two."""
    return (scale * LOG2_E, 0.0) if softcap is None else (2.0 * LOG2_E * scale / softcap, softcap * LOG2_E)


def shape_constants(query: Tensor, keys: Tensor, rows: AttentionMetadata, window: int | None) -> dict[str, int]:
    """The common constants of all kernels here."""
    heads, width = query.shape[1:]
    return {
        "H": heads,
        "D": width,
        "WIDE": triton.next_power_of_2(width),
        "WINDOW": window or 0,
        "SEQUENCES": triton.next_power_of_2(len(rows.lengths)),
        "BLOCK": BLOCK,
        "SPLIT": SPLIT,
    }


def tile_constants(query: Tensor, keys: Tensor, rows: AttentionMetadata) -> dict[str, int]:
    """The constants of kernels that read keys and values: query heads of a kv head, value columns, page size."""
    group = query.shape[1] // keys.shape[1]
    assert group <= TILE, f"{group} query heads share a kv head; a tile holds {TILE}"
    columns: int = min(triton.next_power_of_2(query.shape[2]), VALUE_COLUMNS)
    return {"GROUP": group, "C": columns, "PAGE": rows.page_size, "TILE": TILE}


def tiles_of(query: Tensor, keys: Tensor, rows: AttentionMetadata) -> int:
    """The most tiles that these rows and sequences can fill."""
    stacked = len(query) * (query.shape[1] // keys.shape[1])
    return -(-stacked // TILE) + len(rows.lengths) - 1
