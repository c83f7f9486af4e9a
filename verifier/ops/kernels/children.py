"""The likeliest children of every node in two launches, without sorting or copying the vocabulary.

    rank    rows x blocks   each block's largest noisy logits in order, and where filters are on its largest logits too
    merge   rows            the lists of the row's blocks merged; where filters are on, what they keep, noise added

The 64 likeliest tokens of a row are among the 64 likeliest of its blocks, so what the filters keep of them is decided
from the lists alone. Where they keep more, the noisy lists count, as if there were no filter.

An entry of a list is one integer, in the order of value and then of column: the value's bits, and below them what is
left of the largest column number. So entries are distinct, and the largest is the first of the largest values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.noise import gumbel_at, noise_key
from foresay.verifier.ops.kernels.planes import COLDEST, MERGE, block_of, divisor_of
from foresay.verifier.ops.kernels.search import INFINITY, NO_TOKEN, ordered, unordered
from foresay.verifier.ops.records import MOST_CHILDREN

if TYPE_CHECKING:
    from foresay.verifier.ops.records import RowSampling

#: Less than any entry: what is in a list behind its end.
_NOTHING = tl.constexpr(-(1 << 63))
# Planes of ``size`` floats, one per row and block: largest logit and noisy logit, and the masses relative to them.
_TOPS, _MASSES, _NOISY_TOPS, _NOISY_MASSES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_PLANES = 4
RANK_WARPS, MERGE_WARPS = 4, 4


@triton.jit
def entry_of(values, columns):
    """int64, in the order of value, then of column downwards. Both zeros are one value."""
    return (ordered(tl.where(values == 0.0, 0.0, values)) << 32) | (columns ^ NO_TOKEN).to(tl.int64)


@triton.jit
def value_of(entries):
    """The fp32 value of an entry; NaN of what is none."""
    return unordered(entries >> 32)


@triton.jit
def column_of(entries):
    """The column of an entry, int32."""
    return (entries & NO_TOKEN).to(tl.int32) ^ NO_TOKEN


@triton.jit
def filters_of(top_ks, top_ps, min_ps, heat, row, MOST: tl.constexpr):
    """What is asked of a row, and whether any of it filters: k (MOST where that is off), by_k, p, min_p, filtered."""
    k, p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    by_k = (k > 0) & (k <= MOST)
    filtered = (heat >= COLDEST) & (by_k | (p < 1.0) | (min_p > 0.0))
    return tl.where(by_k, k, MOST), by_k, p, min_p, filtered


@triton.jit
def list_largest(entries, out, rounds):
    """Write the largest ``rounds`` entries of a tile, in order."""
    turn = 0
    while turn < rounds:
        largest = tl.max(entries, axis=0)
        tl.store(out + turn, largest)
        entries = tl.where(entries == largest, _NOTHING, entries)
        turn += 1


@triton.jit
def top_and_mass(values, floats, top_plane, mass_plane):
    """Write the largest of a tile's values and the sum of their exponentials, relative to it."""
    top = tl.max(values, axis=0)
    tl.store(floats + top_plane, top)
    tl.store(floats + mass_plane, tl.sum(tl.exp(values - tl.where(top == -INFINITY, 0.0, top)), axis=0))


@triton.jit(do_not_specialize=["size", "count"])
def rank(
    logits,
    token_ids,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    floats,
    noisy_lists,
    lists,
    size,
    width,
    blocks,
    count,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One block of one row: its count largest noisy logits, and what of its logits the filters may need."""
    wait_turn(CHAINED)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside, heat, at = columns < width, tl.load(temperature + row), row * blocks + block
    raw = tl.load(logits + row * width + columns, inside, -INFINITY)
    scaled = tl.div_rn(tl.where(raw < INFINITY, raw, -INFINITY), divisor_of(heat))
    noisy = scaled
    if heat >= COLDEST:
        key = noise_key(tl.load(seeds + row), tl.load(positions + row))
        noisy = scaled + gumbel_at(key, columns, token_ids, width)
    top_and_mass(noisy, floats + at, size * _NOISY_TOPS, size * _NOISY_MASSES)
    list_largest(tl.where(inside, entry_of(noisy, columns), _NOTHING), noisy_lists + at * count, count)
    k, _, _, _, filtered = filters_of(top_ks, top_ps, min_ps, heat, row, MOST)
    if filtered:
        top_and_mass(scaled, floats + at, size * _TOPS, size * _MASSES)
        list_largest(tl.where(inside, entry_of(scaled, columns), _NOTHING), lists + at * MOST, k)


@triton.jit
def merge_lists(lists, blocks, rounds, length, MOST: tl.constexpr, MERGE: tl.constexpr):
    """int64[MOST]: the largest ``rounds`` entries of the lists of a row's blocks, in order; nothing behind them."""
    block, lane = tl.arange(0, MERGE), tl.arange(0, MOST)
    heads = tl.load(lists + block * length, block < blocks, _NOTHING)
    taken, merged = tl.zeros((MERGE,), tl.int32), tl.full((MOST,), _NOTHING, tl.int64)
    turn = 0
    while turn < rounds:
        largest = tl.max(heads, axis=0)
        merged = tl.where(lane == turn, largest, merged)
        first = (heads == largest) & (largest > _NOTHING)
        taken += first.to(tl.int32)
        following = tl.load(lists + block * length + taken, first & (taken < rounds), _NOTHING)
        heads = tl.where(first, following, heads)
        turn += 1
    return merged


@triton.jit
def log_sum_of(floats, size, row, blocks, top_plane, mass_plane, MERGE: tl.constexpr):
    """The log of a row's mass, from the largest value and the mass of its blocks."""
    block = tl.arange(0, MERGE)
    tops = tl.load(floats + size * top_plane + row * blocks + block, block < blocks, -INFINITY)
    masses = tl.load(floats + size * mass_plane + row * blocks + block, block < blocks, 0.0)
    top = tl.max(tops, axis=0)
    return top + tl.log(tl.sum(masses * tl.exp(tops - top), axis=0))


@triton.jit
def write_children(values, columns, log_sum, places, token_ids, tokens, chances, count):
    """Write the children that have a place below count; one that is minus infinity or NaN is none."""
    is_child, inside = values > -INFINITY, places < count
    found = columns.to(tl.int64)
    if token_ids is not None:
        found = tl.load(token_ids + found, is_child, 0)
    tl.store(tokens + places, tl.where(is_child, found, 0), inside)
    tl.store(chances + places, tl.where(is_child, values - log_sum, -INFINITY), inside)


@triton.jit(do_not_specialize=["size", "count"])
def merge(
    token_ids,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    floats,
    noisy_lists,
    lists,
    tokens,
    chances,
    size,
    width,
    blocks,
    count,
    MOST: tl.constexpr,
    MERGE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One row: the children among what the filters keep, or among all."""
    wait_turn(CHAINED)
    row, lane, first = tl.program_id(0).to(tl.int64), tl.arange(0, MOST), tl.program_id(0).to(tl.int64) * count
    heat = tl.load(temperature + row)
    k, by_k, p, min_p, filtered = filters_of(top_ks, top_ps, min_ps, heat, row, MOST)
    decided = 0
    if filtered:
        entries = merge_lists(lists + row * blocks * MOST, blocks, k, MOST, MOST, MERGE)
        real, scaled = entries > _NOTHING, value_of(entries)
        top = tl.max(tl.where(real, scaled, -INFINITY), axis=0)
        weights = tl.where(real, tl.exp(scaled - top), 0.0)
        mass = tl.sum(weights, axis=0)
        if by_k == 0:
            mass = tl.exp(log_sum_of(floats, size, row, blocks, _TOPS, _MASSES, MERGE) - top)
        enough = tl.where(p < 1.0, p * mass, INFINITY)
        allowed = real & (tl.cumsum(weights, axis=0) - weights < enough) & (weights >= min_p)
        decided = (by_k | (tl.max((real & (allowed == 0)).to(tl.int32), axis=0) == 1)).to(tl.int32)
        if decided == 1:
            key, columns = noise_key(tl.load(seeds + row), tl.load(positions + row)), column_of(entries)
            noisy = scaled + gumbel_at(key, tl.where(real, columns, 0), token_ids, width)
            noisy = tl.where(allowed, noisy, -INFINITY)
            largest = tl.max(noisy, axis=0)
            log_sum = largest + tl.log(tl.sum(tl.exp(noisy - largest), axis=0))
            ranked = tl.where(allowed, entry_of(noisy, columns), lane.to(tl.int64) + _NOTHING)
            places = tl.sum((ranked[None, :] > ranked[:, None]).to(tl.int32), axis=1)
            write_children(noisy, columns, log_sum, places, token_ids, tokens + first, chances + first, count)
    if decided == 0:
        entries = merge_lists(noisy_lists + row * blocks * count, blocks, count, count, MOST, MERGE)
        log_sum = log_sum_of(floats, size, row, blocks, _NOISY_TOPS, _NOISY_MASSES, MERGE)
        noisy, columns = value_of(entries), column_of(entries)
        write_children(noisy, columns, log_sum, lane, token_ids, tokens + first, chances + first, count)


def best_children(
    logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.children.best_children`."""
    rows, width = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, "fp32 rows, one behind the other"
    assert logits.data_ptr() % 16 == 0, "other alignments are compiled otherwise, and may sum in another order"
    block = block_of(width)
    blocks = triton.cdiv(width, block)
    size = triton.cdiv(rows * blocks, 4) * 4
    floats = logits.new_empty(_PLANES, size)
    noisy_lists, lists = (logits.new_empty(size, length, dtype=torch.int64) for length in (count, MOST_CHILDREN))
    tokens = logits.new_empty(rows, count, dtype=torch.int64)
    chances = logits.new_empty(rows, count)
    if rows:
        s, sizes = sampling, (size, width, blocks, count, MOST_CHILDREN)
        asked = (token_ids, s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)
        handed = (floats, noisy_lists, lists)
        rank[(rows, blocks)](logits, *asked, *handed, *sizes, block, num_warps=RANK_WARPS, **chained())
        merge[(rows,)](*asked, *handed, tokens, chances, *sizes, MERGE, num_warps=MERGE_WARPS, **chained())
    return tokens, chances
