"""Key blocks: the common part of the attention kernels, and why a row has the same bits in each of them.

    position  0 .. 63   64 .. 127   ...        512 ..                         length
    block     |   0   |     1     | ... |   7  |   8   | ...  | committed rest + a row's own path |
    split     |                0               |                  1 ...

A *block* is the keys of positions ``64j .. 64j+63``; its partial (largest score, sum of weights, weighted values) is
a function of one row's query and of those keys in order of position. A *split* folds the partials of 8 blocks in
order, and the result folds the splits in order. Any program may compute any part of that sum; the sum itself is fixed.
docs/kernels.md has the whole argument.

Latents: values are the first V numbers of each key, so a key is loaded once, in pieces of at most C numbers: the
program's own value columns first, the others of V in a circle, then what is no value. A program's scores add up its
pieces in that order, so each part of the value columns has its own largest scores and sums of weights.

Legend: S sequences, R rows, H query heads, G kv heads, D head dim, M stacked rows, B keys of a block, C value columns,
V width of a value; less than D: latents.

8-bit heads of keys and values and their scales are converted from fp32 and back as in :mod:`foresay.kvpaging.store`.
fp8 (e4m3) is converted with integer operations: the same on every GPU, and in the interpreter. Kernels see it as uint8.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from foresay.verifier.ops.kernels.pdl import capability
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
#: Value columns of a program; wider heads are split into such parts. Of latents and of heads wider than WIDEST, and
#: warps of a program: each part loads whole keys.
VALUE_COLUMNS, LATENT_COLUMNS, LATENT_WARPS = 128, 256, 8
#: Of wider heads two blocks of keys and values have no room next to each other.
WIDEST = 256
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
def block_partial(queries, keys, values, scales, slots, head, inside, visible, first_column, scale, ragged,
                  G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr,
                  CAP: tl.constexpr):  # fmt: skip
    """Largest score, sum of weights and weighted values of the block in these slots: fp32[M], fp32[M], fp32[M, C].

    queries: see :func:`load_queries`. visible: bool[M, B] or [1, B]. scale, CAP: see :func:`scaling`. ragged: whether
    rows attend to different keys: only then may a value hidden from a row be non-finite.
    """
    kind: tl.constexpr = queries[0].dtype
    if V == D:
        keyed = rows_at(keys, scales, slots, head, inside, 0, G, D, D, WIDE, kind)
        valued = rows_at(values, scales + G, slots, head, inside, first_column, G, D, D, C, kind)
        scores = tl.dot(queries[0], tl.trans(keyed), input_precision="ieee")
    else:
        parts: tl.constexpr = (V + C - 1) // C
        valued = rows_at(keys, scales, slots, head, inside, first_column, G, D, V, C, kind)
        scores = tl.dot(queries[0], tl.trans(valued), input_precision="ieee")
        for part in tl.static_range(1, parts):
            more = rows_at(keys, scales, slots, head, inside, (first_column + part * C) % (parts * C), G, D, V, C, kind)
            scores = tl.dot(queries[part], tl.trans(more), scores, input_precision="ieee")
        rest = rows_at(keys, scales, slots, head, inside, V, G, D, D, WIDE, kind)
        scores = tl.dot(queries[parts], tl.trans(rest), scores, input_precision="ieee")
    return weighted(scores * scale, valued, visible, ragged, CAP)


@triton.jit
def weighted(scores, values, visible, ragged, CAP: tl.constexpr):
    """A partial from its scores, fp32[M, B], and values, [B, C].

    All sums are MMAs, that of the weights too (against ones), so no order is left to a reduction over threads.
    """
    if CAP > 0.0:
        scores = softcapped(scores, CAP)
    scores = tl.where(visible, scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    from_zero = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - from_zero[:, None]).to(values.dtype)
    ones = tl.full([values.shape[0], 16], 1.0, values.dtype)
    sums = tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)
    seen = tl.zeros([scores.shape[0]], tl.int32)
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
def pages_of(tables, sequence, table_stride, indices, inside, PAGE: tl.constexpr):
    """int32: the pages of indices (committed positions, or length + node) of a sequence; 0 outside."""
    return tl.load(tables + sequence * table_stride + indices // PAGE, mask=inside, other=0)


@triton.jit
def slots_of(pages, indices, PAGE: tl.constexpr):
    """int64: the slots of indices on their pages."""
    return pages.to(tl.int64) * PAGE + indices % PAGE


@triton.jit
def rows_at(base, scales, slots, head, inside, first_column, G: tl.constexpr, D: tl.constexpr, END: tl.constexpr,
            C: tl.constexpr, kind: tl.constexpr):  # fmt: skip
    """[B, C] of ``kind``: columns below END of one kv head's rows, zeros outside: a weight of zero does not stop NaN.

    scales: of quantised rows, those of the first slot's keys, or of its values.
    """
    columns = first_column + tl.arange(0, C)
    where = slots[:, None] * (G * D) + head * D + columns[None, :]
    rows = tl.load(base + where, mask=inside[:, None] & (columns < END)[None, :], other=0)
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
def load_queries(query, rows, heads, live, first_column, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
                 WIDE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Queries of stacked rows, zeros where a row is not live and after D: [M, WIDE] alone; or in the pieces in which
    keys of latents are read."""
    start = query + (rows.to(tl.int64) * H + heads)[:, None] * D
    queries = ()
    if V < D:
        parts: tl.constexpr = (V + C - 1) // C
        for part in tl.static_range(parts):
            columns = ((first_column + part * C) % (parts * C) + tl.arange(0, C))[None, :]
            queries += (tl.load(start + columns, mask=live[:, None] & (columns < V), other=0.0),)
    columns = (V % D + tl.arange(0, WIDE))[None, :]
    queries += (tl.load(start + columns, mask=live[:, None] & (columns < D), other=0.0),)
    return queries


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


def shape_constants(query: Tensor, rows: AttentionMetadata, window: int | None, value: int) -> dict[str, int]:
    """The common constants of all kernels here. value: V."""
    return {
        "H": query.shape[1],
        "V": value,
        "C": columns_of(query.shape[2], value),
        "WINDOW": window or 0,
        "SEQUENCES": triton.next_power_of_2(len(rows.lengths)),
        "BLOCK": BLOCK,
        "SPLIT": SPLIT,
    }


def columns_of(width: int, value: int) -> int:
    """C. width: D. value: V."""
    most = VALUE_COLUMNS if value == width <= WIDEST else LATENT_COLUMNS
    columns: int = min(triton.next_power_of_2(max(value, 16)), most)
    return columns


def tile_constants(query: Tensor, keys: Tensor, rows: AttentionMetadata, value: int) -> dict[str, int]:
    """The constants of kernels that read keys and values: query heads of a kv head, widths, page size. value: V."""
    width = query.shape[2]
    last = width if value == width else width - value
    group = query.shape[1] // keys.shape[1]
    return {
        "GROUP": group,
        "D": width,
        "WIDE": max(triton.next_power_of_2(last), 16),
        "PAGE": rows.page_size,
        "TILE": TILE,
    }


def options_of(width: int, value: int) -> dict[str, int | bool]:
    """How kernels that read keys and values are launched. width: D. value: V."""
    if value == width:
        wide = {"num_warps": LATENT_WARPS, "num_stages": 1}
        return OPTIONS | (wide if width > WIDEST else {"num_stages": STAGES})
    deep = not knobs.runtime.interpret and capability() >= 90  # before, two blocks of latents have no room
    return OPTIONS | {"num_warps": LATENT_WARPS, "num_stages": STAGES if deep else 1}


def tiles_of(query: Tensor, keys: Tensor, rows: AttentionMetadata) -> int:
    """The most tiles that these rows and sequences can fill."""
    stacked = len(query) * (query.shape[1] // keys.shape[1])
    return -(-stacked // TILE) + len(rows.lengths) - 1
