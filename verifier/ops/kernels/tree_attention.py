"""Paged tree attention in Triton, in two launches; of few rows in one.

    partials   a program for each committed split or block of a tile of rows, and for each row's own tail blocks,
               which touch uncommitted slots: those are gathered for that row, in path order
    merge      for each head of a row: blocks into splits, splits into the result, in order; of few rows the last
               program of the partials does so, whichever that is: the order is the same

Blocks and splits are those of :mod:`foresay.verifier.ops.kernels.key_blocks`. Legend: N partials of a row, the rest as
there.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from foresay.verifier.ops.kernels import key_blocks
from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.key_blocks import (
    BLOCK,
    INTEGERS,
    OPTIONS,
    block_partial,
    bring_rows,
    empty,
    finished,
    fold,
    load_queries,
    pages_of,
    row_sequence,
    rows_at,
    scaling,
    shape_constants,
    slots_of,
    tile_constants,
    tile_sequence,
    tiles_of,
)
from foresay.verifier.ops.kernels.quantized_rows import as_stored
from foresay.verifier.ops.records import PagedRows

#: Most nodes of a tree: bits of an ancestor word.
NODES = 64
#: Blocks that the uncommitted positions of a row may touch.
TAILS = (BLOCK - 1 + NODES - 1) // BLOCK + 1
#: Contexts up to this many positions are read block by block where the rows fit one tile: more programs, more partials.
_FINE_POSITIONS = 8192
#: Partials that a merge has on their way at a time.
DEPTH = 16
#: Up to so many query heads of a kv head, in all rows, the last program of the partials merges; none: a launch always.
MERGED = (8, 32)
#: Whether a program that walks a split asks for all of it at once, into the L2.
BRING = True


@triton.jit
def _keep(stats, partials, part, rows, heads, live, largest, sums, mixed, first_column, R, H: tl.constexpr,
          D: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Store a partial of each stacked row. stats: fp32[N, R, H, 2]. partials: fp32[N, R, H, D]."""
    at = (part.to(tl.int64) * R + rows) * H + heads
    tl.store(stats + at * 2, largest, mask=live)
    tl.store(stats + at * 2 + 1, sums, mask=live)
    columns = first_column + tl.arange(0, C)
    tl.store(partials + at[:, None] * D + columns[None, :], mixed, mask=live[:, None] & (columns < D)[None, :])


@triton.jit
def _path_places(word, length, positions):
    """Where the keys of a row's positions lie: the k-th node of its path, in order, is seen at ``length + k``."""
    bits = tl.arange(0, 64)
    taken = ((word >> bits.to(tl.int64)) & 1).to(tl.int32)
    rank = tl.cumsum(taken, axis=0) - taken
    mine = (taken == 1)[None, :] & (rank[None, :] == (positions - length)[:, None])
    nodes = tl.sum(tl.where(mine, bits[None, :], 0), axis=1)
    return tl.where(positions < length, positions, length + nodes)


@triton.jit
def _committed(query, keys, values, scales, tables, lengths, offsets, depths, stats, partials, tile, part, head,
               first_column, R, count, table_stride, whole_splits, first, scale, GROUP: tl.constexpr, H: tl.constexpr,
               D: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
               SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
               CAP: tl.constexpr, BRING: tl.constexpr):  # fmt: skip
    """Partials of committed blocks: a whole split for ``part < whole_splits``, one block for each part behind."""
    sequence, place = tile_sequence(offsets, tile, GROUP, TILE, SEQUENCES, count)
    if sequence >= count:
        return
    length = tl.load(lengths + sequence)
    begin_row = tl.load(offsets + sequence)
    folded = tl.minimum(length // (BLOCK * SPLIT), whole_splits) * SPLIT
    begin = tl.where(part < whole_splits, part * SPLIT, folded + part - whole_splits)
    end = tl.where(part < whole_splits, begin + SPLIT, begin + 1)
    stacked = place * TILE + tl.arange(0, TILE)
    rows, heads = begin_row + stacked // GROUP, head * GROUP + stacked % GROUP
    live = rows < tl.load(offsets + sequence + 1)
    own = length + tl.load(depths + rows, mask=live, other=0)
    idle = (end * BLOCK > length) | (end * BLOCK <= first)
    if WINDOW > 0:
        idle = idle | (end * BLOCK <= tl.min(tl.where(live, own, 2147483647), axis=0) - WINDOW + 1)
    if idle:
        return
    if BRING:  # noqa: SIM102 (a constant, and a number)
        if part < whole_splits:  # all of the split is on its way before its first block is waited for
            places = begin * BLOCK + tl.arange(0, SPLIT * BLOCK)
            there = slots_of(pages_of(tables, sequence, table_stride, places, places >= first, PAGE), places, PAGE)
            bring_rows(keys, there, head, H // GROUP, D)
            bring_rows(values, there, head, H // GROUP, D)
    asked = load_queries(query, rows, heads, live, H, D, WIDE)
    largest, sums, mixed = empty(TILE, C)
    positions = begin * BLOCK + tl.arange(0, BLOCK)
    pages = pages_of(tables, sequence, table_stride, positions, positions >= first, PAGE)
    for block in tl.range(begin, end):
        positions = block * BLOCK + tl.arange(0, BLOCK)
        inside = positions >= first
        slots = slots_of(pages, positions, PAGE)
        # The next block's are on their way before its keys are asked for: so those can be, while this one is computed.
        ahead = positions + BLOCK
        pages = pages_of(tables, sequence, table_stride, ahead, (ahead >= first) & (block + 1 < end), PAGE)
        visible = inside[None, :]
        if WINDOW > 0:
            visible = visible & (positions[None, :] > own[:, None] - WINDOW)
        keyed = rows_at(keys, scales, slots, head, inside, 0, H // GROUP, D, WIDE, asked.dtype)
        valued = rows_at(values, scales + H // GROUP, slots, head, inside, first_column, H // GROUP, D, C,
                         asked.dtype)  # fmt: skip
        top, more, weighted = block_partial(asked, keyed, valued, visible, scale, WINDOW > 0, CAP)
        largest, sums, mixed = fold(largest, sums, mixed, top, more, weighted)
    _keep(stats, partials, part, rows, heads, live, largest, sums, mixed, first_column, R, H, D, C)


@triton.jit
def _tail(query, keys, values, scales, tables, lengths, offsets, words, depths, stats, partials, row, tail, head,
          first_column, R, count, table_stride, whole_splits, first, scale, GROUP: tl.constexpr, H: tl.constexpr,
          D: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
          SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
          CAP: tl.constexpr):  # fmt: skip
    """The partial of one block that touches uncommitted positions: one row over its own keys, in path order."""
    sequence = row_sequence(offsets, row, SEQUENCES, count)
    if sequence >= count:
        return
    length = tl.load(lengths + sequence)
    own = length + tl.load(depths + row)
    block = length // BLOCK + tail
    if block * BLOCK > own:
        return
    positions = block * BLOCK + tl.arange(0, BLOCK)
    inside = (positions <= own) & (positions >= first)
    if WINDOW > 0:
        inside = inside & (positions > own - WINDOW)
    places = _path_places(tl.load(words + row), length, positions)
    slots = slots_of(pages_of(tables, sequence, table_stride, places, inside, PAGE), places, PAGE)
    stacked = tl.arange(0, TILE)
    rows, heads, live = row + stacked * 0, head * GROUP + stacked, stacked < GROUP
    asked = load_queries(query, rows, heads, live, H, D, WIDE)
    keyed = rows_at(keys, scales, slots, head, inside, 0, H // GROUP, D, WIDE, asked.dtype)
    valued = rows_at(values, scales + H // GROUP, slots, head, inside, first_column, H // GROUP, D, C,
                     asked.dtype)  # fmt: skip
    largest, sums, mixed = block_partial(asked, keyed, valued, inside[None, :], scale, False, CAP)
    folded = tl.minimum(length // (BLOCK * SPLIT), whole_splits) * SPLIT
    _keep(stats, partials, whole_splits + block - folded, rows, heads, live, largest, sums, mixed, first_column, R, H,
          D, C)  # fmt: skip


@triton.jit
def _merged(stats, partials, rows, heads, live, length, depths, first_column, R, whole_splits, first,
            sinks, M: tl.constexpr, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr,
            BLOCK: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """[M, C]: the results of heads of rows of one sequence: blocks into splits and splits into the result, in order."""
    own = length + tl.load(depths + rows, mask=live, other=0)
    low, last = first, tl.max(tl.where(live, own, 0), axis=0) // BLOCK
    if WINDOW > 0:
        low = tl.maximum(first, tl.min(tl.where(live, own, 2147483647), axis=0) - WINDOW + 1)
    whole, low_split = tl.minimum(length // (BLOCK * SPLIT), whole_splits), low // (BLOCK * SPLIT)
    splits, begin = tl.maximum(whole - low_split, 0), tl.maximum(whole * SPLIT, low // BLOCK)
    columns = (first_column + tl.arange(0, C))[None, :]
    largest, sums, mixed = empty(M, C)
    split_largest, split_sums, split_mixed = empty(M, C)
    for turn in tl.range(0, splits + last + 1 - begin, num_stages=DEPTH):
        block = begin + turn - splits
        part = tl.where(turn < splits, low_split + turn, whole_splits + block - whole * SPLIT)
        at = (part.to(tl.int64) * R + rows) * H + heads
        there = live & ((turn < splits) | (block <= own // BLOCK))
        top = tl.load(stats + at * 2, mask=there, other=float("-inf"))
        more = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
        weighted = tl.load(partials + at[:, None] * D + columns, mask=there[:, None] & (columns < D), other=0.0)
        split_largest, split_sums, split_mixed = fold(split_largest, split_sums, split_mixed, top, more, weighted)
        # A whole split is one at once; blocks are with the last of theirs, or with the last of all.
        if (turn < splits) | (block % SPLIT == SPLIT - 1) | (block == last):
            largest, sums, mixed = fold(largest, sums, mixed, split_largest, split_sums, split_mixed)
            split_largest, split_sums, split_mixed = empty(M, C)
    return finished(largest, sums, mixed, sinks, heads)


@triton.jit
def _arrive(stats, partials, out, arrived, lengths, offsets, depths, program, head, first_column, R, count, tiles,
            parts, whole_splits, first, sinks, GROUP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
            WINDOW: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
            TILE: tl.constexpr, TAILS: tl.constexpr, MERGED: tl.constexpr):  # fmt: skip
    """Count a program that is done, idle ones too; the last one of a sequence and kv head merges. Each sequence has one
    tile. arrived: int32, a zero for each sequence, kv head and part of the columns, and zeros again behind the launch.
    """
    stacked, row = tl.arange(0, MERGED), (program - tiles * parts) // TAILS
    if program < tiles * parts:
        sequence, _ = tile_sequence(offsets, program % tiles, GROUP, TILE, SEQUENCES, count)
    else:
        sequence = row_sequence(offsets, row, SEQUENCES, count)
    columns = (first_column + tl.arange(0, C))[None, :]
    if sequence < count:
        begin_row, end_row = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
        counter = arrived + (sequence * tl.num_programs(1) + head) * tl.num_programs(2) + tl.program_id(2)
        tl.debug_barrier()  # all threads have stored what they did before one of them says so, to all processors
        if tl.atomic_add(counter, 1) == parts + (end_row - begin_row) * TAILS - 1:
            tl.store(counter, 0)
            rows, heads = begin_row + stacked // GROUP, head * GROUP + stacked % GROUP
            live = rows < end_row
            result = _merged(stats, partials, rows, heads, live, tl.load(lengths + sequence), depths, first_column, R,
                             whole_splits, first, sinks, MERGED, H, D, C, WINDOW, BLOCK, SPLIT,
                             128 // MERGED)  # fmt: skip
            at = (rows.to(tl.int64) * H + heads)[:, None] * D + columns
            tl.store(out + at, result.to(out.dtype.element_ty), mask=live[:, None] & (columns < D))
    elif program >= tiles * parts:  # a row of padding
        at = (row.to(tl.int64) * H + head * GROUP + stacked)[:, None] * D + columns
        nothing = tl.zeros([MERGED, C], out.dtype.element_ty)
        tl.store(out + at, nothing, mask=(stacked < GROUP)[:, None] & (columns < D))


@triton.jit(do_not_specialize=INTEGERS)
def tree_partials(query, keys, values, scales, tables, lengths, offsets, words, depths, stats, partials, out, arrived,
                  R, count, table_stride, tiles, parts, whole_splits, first, scale, sinks, GROUP: tl.constexpr,
                  H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr,
                  WINDOW: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
                  TILE: tl.constexpr, CAP: tl.constexpr, TAILS: tl.constexpr, BRING: tl.constexpr,
                  MERGED: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (tiles * parts + R * TAILS, G, D / C): committed parts of the tiles first, then the rows' tails.

    MERGED: the most heads of a kv head, in all rows, for the last program to merge; 0: another launch does.
    """
    wait_turn(CHAINED)
    program, head, first_column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * C
    if program < tiles * parts:
        _committed(query, keys, values, scales, tables, lengths, offsets, depths, stats, partials, program % tiles,
                   program // tiles, head, first_column, R, count, table_stride, whole_splits, first,
                   scale, GROUP, H, D, WIDE, C, PAGE, WINDOW, SEQUENCES, BLOCK, SPLIT, TILE, CAP, BRING)  # fmt: skip
    else:
        own = program - tiles * parts
        _tail(query, keys, values, scales, tables, lengths, offsets, words, depths, stats, partials, own // TAILS,
              own % TAILS, head, first_column, R, count, table_stride, whole_splits, first, scale, GROUP, H, D, WIDE, C,
              PAGE, WINDOW, SEQUENCES, BLOCK, SPLIT, TILE, CAP)  # fmt: skip
    if MERGED > 0:
        _arrive(stats, partials, out, arrived, lengths, offsets, depths, program, head, first_column, R, count, tiles,
                parts, whole_splits, first, sinks, GROUP, H, D, C, WINDOW, SEQUENCES, BLOCK, SPLIT, TILE, TAILS,
                MERGED)  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def tree_merge(stats, partials, out, lengths, offsets, depths, R, count, whole_splits, first, sinks, H: tl.constexpr,
               D: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr, SEQUENCES: tl.constexpr,
               BLOCK: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R, H): the partials of one head of one row."""
    wait_turn(CHAINED)
    row, head, one = tl.program_id(0), tl.program_id(1), tl.arange(0, 1)
    columns = tl.arange(0, WIDE)[None, :]
    sequence = row_sequence(offsets, row, SEQUENCES, count)
    result = tl.zeros([1, WIDE], tl.float32)
    if sequence < count:
        result = _merged(stats, partials, row + one, head + one, one == 0, tl.load(lengths + sequence), depths, 0, R,
                         whole_splits, first, sinks, 1, H, D, WIDE, WINDOW, BLOCK, SPLIT, DEPTH)  # fmt: skip
    at = (row * H + head).to(tl.int64) * D + columns
    tl.store(out + at, result.to(out.dtype.element_ty), mask=columns < D)


def parts_of(capacity: int, whole_splits: bool) -> tuple[int, int]:
    """Whole splits, and all parts, that ``capacity`` committed positions are cut into for one tile of rows."""
    whole = capacity // (BLOCK * key_blocks.SPLIT) if whole_splits else 0
    return whole, whole + (key_blocks.SPLIT if whole_splits else capacity // BLOCK)


def most_parts(capacity: int) -> int:
    """The most partials that a row leaves behind with page tables of so many positions, those of its path included."""
    fine = 0 if capacity > _FINE_POSITIONS else parts_of(capacity, False)[1]
    return max(parts_of(capacity, True)[1], fine) + TAILS


def merged_heads(stacked: int) -> int:
    """Room for the heads that the last program of the partials merges, for so many of a kv head; 0 if a launch does."""
    return next((most for most in MERGED if stacked <= most), 0)


@cache
def _arrivals(device: torch.device, count: int) -> Tensor:
    """Zeros that every launch leaves behind as it found them. Launches are one after the other, and graphs have their
    addresses: they are kept for good."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    first: int = 0,
    whole_splits: bool | None = None,
    *,
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As :func:`foresay.verifier.ops.tree_attention.tree_attention`, for rows with words.

    whole_splits: whether a program takes a split or one block; None: by the size of rows and tables. It decides no bit.
    """
    assert rows.words is not None and rows.depths is not None, "rows of a text go to chunk_attention"
    count, stride = rows.tables.shape
    total, heads, width = query.shape
    factor, cap = scaling(scale, softcap)
    shape, tile = shape_constants(query, keys, rows, window), tile_constants(query, keys, rows)
    capacity = stride * rows.page_size
    tiles = tiles_of(query, keys, rows)
    if whole_splits is None:
        whole_splits = tiles > count or capacity > _FINE_POSITIONS
    whole, parts = parts_of(capacity, whole_splits)
    stats = query.new_empty(parts + TAILS, total, heads, 2, dtype=torch.float32)
    partials = query.new_empty(parts + TAILS, total, heads, width, dtype=torch.float32)
    out = torch.empty_like(query)
    merged = merged_heads(total * tile["GROUP"])
    arrived = _arrivals(query.device, count * keys.shape[1] * triton.cdiv(width, tile["C"])) if merged else rows.lengths
    grid = (tiles * parts + total * TAILS, keys.shape[1], triton.cdiv(width, tile["C"]))
    tree_partials[grid](
        query, *as_stored(keys, values, scales), rows.tables, rows.lengths, rows.offsets, rows.words, rows.depths,
        stats, partials, out, arrived, total, count, stride, tiles, parts, whole, first, factor, sinks, **shape,
        **tile, CAP=cap, TAILS=TAILS, BRING=BRING and not knobs.runtime.interpret, MERGED=merged,
        num_stages=key_blocks.STAGES, **OPTIONS, **chained(),
    )  # fmt: skip
    if merged:
        return out
    tree_merge[(total, heads)](
        stats, partials, out, rows.lengths, rows.offsets, rows.depths, total, count, whole, first, sinks, **shape,
        DEPTH=DEPTH, **OPTIONS | {"num_warps": 1}, **chained(),
    )  # fmt: skip
    return out
