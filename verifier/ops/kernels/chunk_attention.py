"""Attention of prompt chunks in Triton: rows of a text, one launch, no partials in memory.

Blocks and splits are those of :mod:`foresay.verifier.ops.kernels.key_blocks`, and so are the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.key_blocks import (
    INTEGERS,
    block_partial,
    empty,
    finished,
    fold,
    load_queries,
    options_of,
    pages_of,
    scaling,
    shape_constants,
    slots_of,
    tile_constants,
    tile_sequence,
    tiles_of,
)
from foresay.verifier.ops.kernels.pdl import gdc_wait, pdl_args
from foresay.verifier.ops.launch import as_stored
from foresay.verifier.ops.records import AttentionMetadata


@triton.jit(do_not_specialize=INTEGERS)
def chunk_rows(query, keys, values, scales, out, tables, lengths, offsets, count, table_stride, first, scale,
               sinks, GROUP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr,
               C: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
               SPLIT: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (tiles, G, V / C): rows of chains at ``length ..``, each over all positions up to its own."""
    gdc_wait(USE_GDC)
    head, first_column = tl.program_id(1), tl.program_id(2) * C
    sequence, index = tile_sequence(offsets, tl.program_id(0), GROUP, TILE, SEQUENCES, count)
    if sequence >= count:
        return
    length, begin_row = tl.load(lengths + sequence), tl.load(offsets + sequence)
    stacked = index * TILE + tl.arange(0, TILE)
    rows, heads = begin_row + stacked // GROUP, head * GROUP + stacked % GROUP
    live = rows < tl.load(offsets + sequence + 1)
    own = length + stacked // GROUP
    low, last = first, tl.max(tl.where(live, own, 0), axis=0)
    if WINDOW > 0:
        low = tl.maximum(first, length + index * TILE // GROUP - WINDOW + 1)
    queries = load_queries(query, rows, heads, live, first_column, H, D, V, WIDE, C)
    largest, sums, mixed = empty(TILE, C)
    for split in tl.range(low // (BLOCK * SPLIT), last // (BLOCK * SPLIT) + 1):
        split_largest, split_sums, split_mixed = empty(TILE, C)
        begin = tl.maximum(split * SPLIT, low // BLOCK)
        positions = begin * BLOCK + tl.arange(0, BLOCK)
        pages = pages_of(tables, sequence, table_stride, positions, (positions >= low) & (positions <= last), PAGE)
        for block in tl.range(begin, tl.minimum(split * SPLIT + SPLIT, last // BLOCK + 1)):
            positions = block * BLOCK + tl.arange(0, BLOCK)
            inside = (positions >= low) & (positions <= last)
            slots = slots_of(pages, positions, PAGE)
            ahead = positions + BLOCK
            pages = pages_of(tables, sequence, table_stride, ahead, (ahead >= low) & (ahead <= last), PAGE)
            visible = inside[None, :] & (positions[None, :] <= own[:, None])
            if WINDOW > 0:
                visible = visible & (positions[None, :] > own[:, None] - WINDOW)
            ragged = (WINDOW > 0) | (block * BLOCK + BLOCK > length + index * TILE // GROUP + 1)
            top, more, weighted = block_partial(queries, keys, values, scales, slots, head, inside, visible,
                                                first_column, scale, ragged, H // GROUP, D, V, WIDE, C,
                                                CAP)  # fmt: skip
            split_largest, split_sums, split_mixed = fold(split_largest, split_sums, split_mixed, top, more, weighted)
        largest, sums, mixed = fold(largest, sums, mixed, split_largest, split_sums, split_mixed)
    columns = first_column + tl.arange(0, C)
    where = (rows.to(tl.int64) * H + heads)[:, None] * V + columns[None, :]
    result = finished(largest, sums, mixed, sinks, heads).to(out.dtype.element_ty)
    tl.store(out + where, result, mask=live[:, None] & (columns < V)[None, :])


def chunk_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    window: int | None = None,
    first: int = 0,
    *,
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: int = 0,
) -> Tensor:
    """As :func:`foresay.verifier.ops.attention.tree_attention`, for rows without words."""
    (total, heads, width), value = query.shape, shared or query.shape[2]
    out = query.new_zeros(total, heads, value)  # no program writes the padding rows
    shape, tile = shape_constants(query, rows, window, value), tile_constants(query, keys, rows, value)
    grid = (tiles_of(query, keys, rows), keys.shape[1], triton.cdiv(value, shape["C"]))
    (count, stride), (scale, cap) = rows.tables.shape, scaling(scale, softcap)
    chunk_rows[grid](
        query, *as_stored(keys, keys if shared else values, scales), out, rows.tables, rows.lengths, rows.offsets,
        count, stride, first, scale, sinks, **shape, **tile, CAP=cap, **options_of(width, value), **pdl_args(),
    )  # fmt: skip
    return out
