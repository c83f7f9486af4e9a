"""Paged tree attention in Triton, in two launches.

    partials   a program for each committed split or block of a tile of rows, and for each row's own tail blocks,
               which touch uncommitted slots: those are gathered for that row, in path order
    merge      a program for each head of a row: blocks into splits, splits into the result, in order

With few rows a program waits for memory most of its time: it issues all independent loads at once.

Blocks and splits are those of :mod:`foresay.verifier.ops.kernels.key_blocks`. Legend: N partials of a row, Z parts of
its value columns (V / C), the rest as there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels import key_blocks
from foresay.verifier.ops.kernels.chunk_attention import chunk_attention
from foresay.verifier.ops.kernels.key_blocks import (
    BLOCK,
    INTEGERS,
    OPTIONS,
    block_partial,
    empty,
    finished,
    fold,
    held,
    load_queries,
    options_of,
    pages_of,
    row_sequence,
    rows_at,
    scaling,
    shape_constants,
    slots_of,
    tile_constants,
    tile_sequence,
    tiles_of,
    weighted,
)
from foresay.verifier.ops.kernels.linear import APART, product_at
from foresay.verifier.ops.kernels.pdl import gdc_wait, pdl_args
from foresay.verifier.ops.launch import as_read, as_stored
from foresay.verifier.ops.records import AttentionMetadata, FusedRope

#: The most nodes of a tree: bits of an ancestor word.
NODES = 64
#: Blocks that the uncommitted positions of a row may touch.
TAILS = (BLOCK - 1 + NODES - 1) // BLOCK + 1
#: Tables up to this many positions are read block by block where a text's rows fit one tile, and where they do not:
#: more programs, more partials.
_FINE_POSITIONS, FINE_TILED = 8192, 0
#: Partials that a merge loads at once, while it adds up as many.
DEPTH = 8


@triton.jit
def _keep(stats, partials, part, rows, heads, live, largest, sums, mixed, first_column, R, H: tl.constexpr,
          V: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Store a partial of each stacked row. stats: fp32[N, R, H, Z, 2]. partials: fp32[N, R, H, V]."""
    at = (part.to(tl.int64) * R + rows) * H + heads
    own = (at * ((V + C - 1) // C) + first_column // C) * 2
    tl.store(stats + own, largest, mask=live)
    tl.store(stats + own + 1, sums, mask=live)
    columns = first_column + tl.arange(0, C)
    tl.store(partials + at[:, None] * V + columns[None, :], mixed, mask=live[:, None] & (columns < V)[None, :])


@triton.jit
def _path_indices(word, length, positions):
    """Where the keys of a row's positions are in its sequence: the k-th node of its path, in order, is at position
    ``length + k``."""
    bits = tl.arange(0, 64)
    taken = ((word >> bits.to(tl.int64)) & 1).to(tl.int32)
    rank = tl.cumsum(taken, axis=0) - taken
    mine = (taken == 1)[None, :] & (rank[None, :] == (positions - length)[:, None])
    nodes = tl.sum(tl.where(mine, bits[None, :], 0), axis=1)
    return tl.where(positions < length, positions, length + nodes)


@triton.jit
def _turned(turn, rows, at, live, D: tl.constexpr, OUTER: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
            TURNS: tl.constexpr):  # fmt: skip
    """[M, D]: heads of rows, which begin at ``at`` in their product, [M, 1] each; rotated if TURNS, as by
    :mod:`foresay.verifier.ops.kernels.rows`."""
    product, bias, cos, signed_sin, _, apart = turn
    kind: tl.constexpr = cos.dtype.element_ty
    columns, turn_at = at + tl.arange(0, D // 2)[None, :], rows.to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
    inside = live & (columns >= 0)
    low = product_at(product, bias, rows, columns, inside, apart, kind, OUTER, SEGMENTS, BIAS)
    high = product_at(product, bias, rows, columns + D // 2, inside, apart, kind, OUTER, SEGMENTS, BIAS)
    if TURNS:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        sin_low = tl.load(signed_sin + turn_at, inside, 0.0).to(tl.float32)
        sin_high = tl.load(signed_sin + turn_at + D // 2, inside, 0.0).to(tl.float32)
        low = (wide_high * sin_low).to(kind).to(tl.float32)
        high = (wide_low * sin_high).to(kind).to(tl.float32)
        low = tl.fma(wide_low, tl.load(cos + turn_at, inside, 0.0).to(tl.float32), low).to(kind)
        high = tl.fma(wide_high, tl.load(cos + turn_at + D // 2, inside, 0.0).to(tl.float32), high).to(kind)
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [low.shape[0], D])


@triton.jit
def _seen(queries, keys, values, scales, pages, block, own, head, first_column, first, scale, GROUP: tl.constexpr,
          H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr,
          WINDOW: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """The partial of one committed block."""
    positions = block * BLOCK + tl.arange(0, BLOCK)
    inside = positions >= first
    slots = slots_of(pages, positions, PAGE)
    visible = inside[None, :]
    if WINDOW > 0:
        visible = visible & (positions[None, :] > own[:, None] - WINDOW)
    return block_partial(queries, keys, values, scales, slots, head, inside, visible, first_column, scale, WINDOW > 0,
                         H // GROUP, D, V, WIDE, C, CAP)  # fmt: skip


@triton.jit
def _committed(query, turn, keys, values, scales, tables, lengths, offsets, depths, stats, partials, tile, part, head,
               first_column, R, count, table_stride, whole_splits, first, scale, GROUP: tl.constexpr, H: tl.constexpr,
               D: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr,
               WINDOW: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
               TILE: tl.constexpr, CAP: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
               FOLDED: tl.constexpr):  # fmt: skip
    """Partials of committed blocks: of the one with the part's number; FOLDED: of a whole split for ``part <
    whole_splits``, of one block for each later part."""
    sequence, index = tile_sequence(offsets, tile, GROUP, TILE, SEQUENCES, count)
    there = held(sequence, count, SEQUENCES)
    length, begin_row, end_row = tl.load(lengths + there), tl.load(offsets + there), tl.load(offsets + there + 1)
    begin, end = part, part + 1
    if FOLDED:
        folded = tl.minimum(length // (BLOCK * SPLIT), whole_splits) * SPLIT
        begin = tl.where(part < whole_splits, part * SPLIT, folded + part - whole_splits)
        end = tl.where(part < whole_splits, begin + SPLIT, begin + 1)
    positions = begin * BLOCK + tl.arange(0, BLOCK)
    inside = positions >= first
    if FOLDED:
        inside = inside & (positions < length)  # the last of these parts may be past the table
    pages = pages_of(tables, there, table_stride, positions, inside, PAGE)
    stacked = index * TILE + tl.arange(0, TILE)
    rows, heads = begin_row + stacked // GROUP, head * GROUP + stacked % GROUP
    live = rows < end_row
    own = length + tl.load(depths + rows, mask=live, other=0)
    idle = (sequence >= count) | (end * BLOCK > length) | (end * BLOCK <= first)
    if WINDOW > 0:
        idle = idle | (end * BLOCK <= tl.min(tl.where(live, own, 2147483647), axis=0) - WINDOW + 1)
    if idle:
        return
    if turn is None:
        queries = load_queries(query, rows, heads, live, first_column, H, D, V, WIDE, C)
    else:
        width: tl.constexpr = (H + 2 * (H // GROUP)) * D
        queries = (_turned(turn, rows[:, None], heads[:, None] * D, live[:, None], D, width, SEGMENTS, BIAS, True),)
    if FOLDED:
        largest, sums, mixed = empty(TILE, C)
        for block in tl.range(begin, end):
            own_pages = pages
            # The next block's pages are loaded before its keys: so the keys can be loaded while this block is computed.
            ahead = (block + 1) * BLOCK + tl.arange(0, BLOCK)
            pages = pages_of(tables, there, table_stride, ahead, (ahead >= first) & (block + 1 < end), PAGE)
            top, more, weighted = _seen(queries, keys, values, scales, own_pages, block, own, head, first_column, first,
                                        scale, GROUP, H, D, V, WIDE, C, PAGE, WINDOW, BLOCK, CAP)  # fmt: skip
            largest, sums, mixed = fold(largest, sums, mixed, top, more, weighted)
    else:
        largest, sums, mixed = _seen(queries, keys, values, scales, pages, part, own, head, first_column, first, scale,
                                     GROUP, H, D, V, WIDE, C, PAGE, WINDOW, BLOCK, CAP)  # fmt: skip
    _keep(stats, partials, part, rows, heads, live, largest, sums, mixed, first_column, R, H, V, C)


@triton.jit
def _tail(query, turn, keys, values, scales, tables, lengths, offsets, words, depths, tails, stats, partials, row, tile,
          tail, head, first_column, R, count, table_stride, whole_splits, first, scale, GROUP: tl.constexpr,
          H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr,
          WINDOW: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
          CAP: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """The partial of one block that touches uncommitted positions: one row over its own keys, in path order. tile: of
    its query heads. tails: None, or of :func:`tail_slots`."""
    stacked = tile * TILE + tl.arange(0, TILE)
    rows, heads, live = row + stacked * 0, head * GROUP + stacked, stacked < GROUP
    if turn is None:
        queries = load_queries(query, rows, heads, live, first_column, H, D, V, WIDE, C)
    else:
        width: tl.constexpr = (H + 2 * (H // GROUP)) * D
        queries = (_turned(turn, rows[:, None], heads[:, None] * D, live[:, None], D, width, SEGMENTS, BIAS, True),)
    word, depth = tl.load(words + row), tl.load(depths + row)
    sequence = row_sequence(offsets, row, SEQUENCES, count)
    there = held(sequence, count, SEQUENCES)
    length = tl.load(lengths + there)
    own, block = length + depth, length // BLOCK + tail
    if (sequence >= count) | (block * BLOCK > own):
        return
    positions = block * BLOCK + tl.arange(0, BLOCK)
    inside = (positions <= own) & (positions >= first)
    if WINDOW > 0:
        inside = inside & (positions > own - WINDOW)
    indices = _path_indices(word, length, positions)
    if tails is None:
        slots = slots_of(pages_of(tables, there, table_stride, indices, inside, PAGE), indices, PAGE)
    else:
        slots = tl.load(tails + (row * 2 + tail) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    if turn is None:
        largest, sums, mixed = block_partial(queries, keys, values, scales, slots, head, inside, inside[None, :],
                                             first_column, scale, False, H // GROUP, D, V, WIDE, C, CAP)  # fmt: skip
    else:  # what is committed is in the cache, the path in the product
        known, one, G = inside & (positions < length), tl.arange(0, 1)[:, None], H // GROUP
        root = tl.load(offsets + there) - length + one
        keyed = rows_at(keys, scales, slots, head, known, 0, G, D, D, D, queries[0].dtype)
        valued = rows_at(values, scales, slots, head, known, 0, G, D, D, D, queries[0].dtype)
        to = tl.load(turn[4] + row) * (G * D) + head * D + tl.arange(0, D)[None, :]
        for position in tl.range(tl.maximum(length, block * BLOCK), tl.minimum(own + 1, block * BLOCK + BLOCK)):
            node = root + tl.max(tl.where(positions == position, indices, 0), axis=0)
            key = _turned(turn, node, one + (H + head) * D, one == 0, D, width, SEGMENTS, BIAS, True)
            value = _turned(turn, node, one + (H + G + head) * D, one == 0, D, width, SEGMENTS, BIAS, False)
            tl.store(keys + to, key, position == own)
            tl.store(values + to, value, position == own)
            here = (inside & (positions == position))[:, None]
            keyed, valued = tl.where(here, key, keyed), tl.where(here, value, valued)
        scores = tl.dot(queries[0], tl.trans(keyed), input_precision="ieee")
        largest, sums, mixed = weighted(scores * scale, valued, inside[None, :], False, CAP)
    folded = tl.minimum(length // (BLOCK * SPLIT), whole_splits) * SPLIT
    _keep(stats, partials, whole_splits + block - folded, rows, heads, live, largest, sums, mixed, first_column, R, H,
          V, C)  # fmt: skip


@triton.jit
def _part_of(turn, begin, splits, low_split, whole, whole_splits, SPLIT: tl.constexpr):
    """The block and the partial that a merge adds at a turn: whole splits, then the blocks from ``begin`` on."""
    block = begin + turn - splits
    return block, tl.where(turn < splits, low_split + turn, whole_splits + block - whole * SPLIT)


@triton.jit
def _load_partials(stats, partials, row, head, first_column, start, turns, begin, splits, low_split, whole,
                   whole_splits, R, H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr,
                   DEPTH: tl.constexpr):  # fmt: skip
    """The partials of one head of a row from the turn ``start`` on, DEPTH of each kind, loaded at once; empty ones
    after the last."""
    tops, sums, mixed = (), (), ()
    columns, one = first_column + tl.arange(0, C)[None, :], tl.arange(0, 1)
    for turn in tl.static_range(DEPTH):
        _, part = _part_of(start + turn, begin, splits, low_split, whole, whole_splits, SPLIT)
        at, there = (part.to(tl.int64) * R + row) * H + head + one, (start + turn + one) < turns
        own = (at * ((V + C - 1) // C) + first_column // C) * 2
        tops += (tl.load(stats + own, mask=there, other=float("-inf")),)
        sums += (tl.load(stats + own + 1, mask=there, other=0.0),)
        mixed += (tl.load(partials + at[:, None] * V + columns, mask=there[:, None] & (columns < V), other=0.0),)
    return tops, sums, mixed


@triton.jit(do_not_specialize=INTEGERS)
def tail_rows(tables, lengths, offsets, words, depths, out, count, table_stride, PAGE: tl.constexpr,
              SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, TAILS: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, TAILS). out: int32[R, TAILS, BLOCK]."""
    gdc_wait(USE_GDC)
    row, tail, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    sequence = row_sequence(offsets, row, SEQUENCES, count)
    there = held(sequence, count, SEQUENCES)
    length = tl.load(lengths + there)
    positions = (length // BLOCK + tail) * BLOCK + lane
    inside = (positions <= length + tl.load(depths + row)) & (sequence < count)
    indices = _path_indices(tl.load(words + row), length, positions)
    slots = slots_of(pages_of(tables, there, table_stride, indices, inside, PAGE), indices, PAGE)
    tl.store(out + (row * TAILS + tail) * BLOCK + lane, tl.where(inside, slots, 0).to(tl.int32))


@triton.jit(do_not_specialize=(*INTEGERS, *APART))
def tree_partials(query, bias, cos, signed_sin, own, apart, keys, values, scales, tables, lengths, offsets, words,
                  depths, tails, stats, partials, R, count, table_stride, tiles, parts, whole_splits, first, scale,
                  SEGMENTS: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr,
                  D: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr,
                  WINDOW: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
                  TILE: tl.constexpr, CAP: tl.constexpr, TAILS: tl.constexpr, FOLDED: tl.constexpr,
                  USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (tiles * parts + R * tiles of a row * TAILS, G, V / C): committed parts of the tiles first, then the rows'
    tails. cos: None, or ``query`` is the product that is rotated here, and stored in the slots ``own``."""
    gdc_wait(USE_GDC)
    turn = None if cos is None else (query, bias, cos, signed_sin, own, apart)
    program, head, first_column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * C
    each: tl.constexpr = (GROUP + TILE - 1) // TILE
    if program < tiles * parts:
        _committed(query, turn, keys, values, scales, tables, lengths, offsets, depths, stats, partials,
                   program % tiles, program // tiles, head, first_column, R, count, table_stride, whole_splits, first,
                   scale, GROUP, H, D, V, WIDE, C, PAGE, WINDOW, SEQUENCES, BLOCK, SPLIT, TILE, CAP, SEGMENTS, BIAS,
                   FOLDED)  # fmt: skip
    else:
        tail = program - tiles * parts
        _tail(query, turn, keys, values, scales, tables, lengths, offsets, words, depths, tails, stats, partials,
              tail // (TAILS * each), tail // TAILS % each, tail % TAILS, head, first_column, R, count, table_stride,
              whole_splits, first, scale, GROUP, H, D, V, WIDE, C, PAGE, WINDOW, SEQUENCES, BLOCK, SPLIT, TILE, CAP,
              SEGMENTS, BIAS)  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def tree_merge(stats, partials, out, lengths, offsets, depths, R, count, whole_splits, first, sinks, H: tl.constexpr,
               V: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
               SPLIT: tl.constexpr, DEPTH: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, H, Z): the partials of one head of one row: blocks into splits and splits into the result, in order."""
    gdc_wait(USE_GDC)
    row, head, first_column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * C
    depth, sequence = tl.load(depths + row), row_sequence(offsets, row, SEQUENCES, count)
    length = tl.load(lengths + held(sequence, count, SEQUENCES))
    own, low = length + depth, first
    if WINDOW > 0:
        low = tl.maximum(first, own - WINDOW + 1)
    whole, low_split = tl.minimum(length // (BLOCK * SPLIT), whole_splits), low // (BLOCK * SPLIT)
    splits, begin, last = tl.maximum(whole - low_split, 0), tl.maximum(whole * SPLIT, low // BLOCK), own // BLOCK
    turns = tl.where(sequence < count, splits + last + 1 - begin, 0)
    largest, sums, mixed = empty(1, C)
    split_largest, split_sums, split_mixed = empty(1, C)
    ahead = _load_partials(stats, partials, row, head, first_column, 0, turns, begin, splits, low_split, whole,
                           whole_splits, R, H, V, C, SPLIT, DEPTH)  # fmt: skip
    for start in tl.range(0, turns, DEPTH, num_stages=1):
        tops, more, weighted = ahead
        ahead = _load_partials(stats, partials, row, head, first_column, start + DEPTH, turns, begin, splits, low_split,
                               whole, whole_splits, R, H, V, C, SPLIT, DEPTH)  # fmt: skip
        for turn in tl.static_range(DEPTH):
            split_largest, split_sums, split_mixed = fold(
                split_largest, split_sums, split_mixed, tops[turn], more[turn], weighted[turn]
            )
            block, _ = _part_of(start + turn, begin, splits, low_split, whole, whole_splits, SPLIT)
            # A whole split is complete at once; blocks are complete with the last of their split, or the last of all.
            if (start + turn < splits) | (block % SPLIT == SPLIT - 1) | (block == last):
                largest, sums, mixed = fold(largest, sums, mixed, split_largest, split_sums, split_mixed)
                split_largest, split_sums, split_mixed = empty(1, C)
    result = tl.zeros([1, C], tl.float32)
    if sequence < count:
        result = finished(largest, sums, mixed, sinks, head + tl.arange(0, 1))
    columns = first_column + tl.arange(0, C)[None, :]
    at = (row * H + head).to(tl.int64) * V + columns
    tl.store(out + at, result.to(out.dtype.element_ty), mask=columns < V)


def parts_of(capacity: int, whole_splits: bool) -> tuple[int, int]:
    """Whole splits, and all parts, that ``capacity`` committed positions are cut into for one tile of rows."""
    whole = capacity // (BLOCK * key_blocks.SPLIT) if whole_splits else 0
    return whole, whole + (key_blocks.SPLIT if whole_splits else capacity // BLOCK)


def most_partials(rows: int, heads: int, groups: int, capacity: int) -> int:
    """The most partials of the query heads of rows with page tables of this many positions, those of paths included.
    groups: G."""
    fine, tiled = (parts_of(min(capacity, most), False)[1] + TAILS for most in (_FINE_POSITIONS, FINE_TILED))
    most = rows * heads * max(parts_of(capacity, True)[1] + TAILS, tiled)
    return max(most, min(rows * heads, groups * key_blocks.TILE) * fine)  # fine: of rows that fit one tile


def tail_slots(rows: AttentionMetadata) -> Tensor:
    """As :func:`foresay.verifier.ops.attention.tail_slots`."""
    assert rows.words is not None and rows.depths is not None, "rows of trees"
    (count, stride), out = rows.tables.shape, rows.tables.new_empty(len(rows.words), TAILS, BLOCK)
    tail_rows[(len(out), TAILS)](
        rows.tables, rows.lengths, rows.offsets, rows.words, rows.depths, out, count, stride, PAGE=rows.page_size,
        SEQUENCES=triton.next_power_of_2(count), BLOCK=BLOCK, TAILS=TAILS, num_warps=1, **pdl_args(),
    )  # fmt: skip
    return out


def _as_turned(query: Tensor | FusedRope, keys: Tensor) -> tuple[Tensor, list[Any], dict[str, Any]]:
    """A tensor of the queries' shape; what kernels read of them, and of their rotation; constants."""
    if isinstance(query, Tensor):
        return query, [query, None, None, None, None, 0], {"SEGMENTS": 1, "BIAS": False}
    (product, bias), apart, about = as_read(query.product)
    (cos, signed_sin, _), (groups, width) = query.rotation, keys.shape[1:]
    shape = cos.new_empty(product.shape[-2], product.shape[-1] // width - 2 * groups, width)
    return shape, [product, bias, cos, signed_sin, query.slots, apart], about


def tree_attention(
    query: Tensor | FusedRope,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    window: int | None = None,
    first: int = 0,
    count: Tensor | None = None,
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: int = 0,
    whole_splits: bool | None = None,
) -> Tensor:
    """As :func:`foresay.verifier.ops.attention.tree_attention`.

    whole_splits: of rows with words, whether a program processes a split or one block; None: by the size of rows and
    tables. It does not affect the bits.
    """
    query, read, about = _as_turned(query, keys)
    assert query.is_contiguous() and keys.is_contiguous() and values.is_contiguous(), "rows lie one behind the other"
    if rows.words is None:
        return chunk_attention(
            query, keys, values, rows, scale, window, first, scales=scales, softcap=softcap, sinks=sinks, shared=shared
        )
    assert rows.depths is not None, "nodes have depths"
    sequences, stride = rows.tables.shape
    (total, heads, width), value = query.shape, shared or query.shape[2]
    factor, cap = scaling(scale, softcap)
    shape, tile = shape_constants(query, rows, window, value), tile_constants(query, keys, rows, value)
    capacity, of_values = stride * rows.page_size, triton.cdiv(value, shape["C"])
    tiles = tiles_of(query, keys, rows)
    if whole_splits is None:
        whole_splits = capacity > (FINE_TILED if tiles > sequences else _FINE_POSITIONS)
    whole, parts = parts_of(capacity, whole_splits)
    stats = query.new_empty(parts + TAILS, total, heads, of_values, 2, dtype=torch.float32)
    partials = query.new_empty(parts + TAILS, total, heads, value, dtype=torch.float32)
    out = query.new_empty(total, heads, value)
    tails = total * triton.cdiv(tile["GROUP"], tile["TILE"]) * TAILS
    tree_partials[(tiles * parts + tails, keys.shape[1], of_values)](
        *read, *as_stored(keys, keys if shared else values, scales), rows.tables, rows.lengths, rows.offsets,
        rows.words, rows.depths, rows.tails, stats, partials, total, sequences, stride, tiles, parts, whole, first,
        factor, **about, **shape, **tile, CAP=cap, TAILS=TAILS, FOLDED=whole_splits, **options_of(width, value),
        **pdl_args(),
    )  # fmt: skip
    tree_merge[(total, heads, of_values)](
        stats, partials, out, rows.lengths, rows.offsets, rows.depths, total, sequences, whole, first, sinks, **shape,
        DEPTH=DEPTH, **OPTIONS | {"num_warps": 1}, **pdl_args(),
    )  # fmt: skip
    return out
