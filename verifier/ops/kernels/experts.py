"""Mixtures of experts in Triton (:mod:`foresay.verifier.ops.experts`): no row is copied.

::

    route      a program for each row
    sort_rows  a program for each expert      pairs by expert | 3 7 9 . | 0 4 . . | ...      . fills a tile up
    products   a program for each tile of pairs and 64 outputs of their expert; tiles without pairs are left at once
    mixed      a program for each row and 256 numbers of it

Pair ``row * k + slot`` is a row's share in one of its experts. A product reads a pair's row and writes the pair's own
vector. It is the dense product's chain of MMAs, over the segments that the expert's weight alone would have: so a pair
has the bits of that, whichever other pairs are in its tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.kernels.linear import (
    GATES,
    about,
    activated,
    given,
    options,
    own_numbers,
    tile_of_expert,
    tile_sums,
)
from foresay.verifier.ops.kernels.pdl import gdc_wait, pdl_args
from foresay.verifier.ops.kernels.rows import kept, updated
from foresay.verifier.ops.kernels.tile import columns_of
from foresay.verifier.ops.launch import padded
from foresay.verifier.ops.records import ExpertRows, Routing, gate_parts

#: Keys of experts already chosen, and of NaN or experts not considered.
_TAKEN, _ASIDE = tl.constexpr(-(1 << 31)), tl.constexpr(1 - (1 << 31))
#: Pairs that are sorted at a time.
_PAIRS = 1024
_SIZES = ("pairs", "tiles")


@triton.jit
def _ranks(ranked, number, inside, SUMS: tl.constexpr, GROUPS: tl.constexpr, BEST: tl.constexpr):
    """int32: keys in the order of the scores ``ranked``, [groups, experts of one]. SUMS: of groups' best two."""
    bits = tl.where(ranked == 0.0, 0.0, ranked).to(tl.int32, bitcast=True)  # no -0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(ranked != ranked, _ASIDE, key)
    if GROUPS > 1:
        sums = tl.max(ranked, axis=1)
        if SUMS:
            at = tl.min(tl.where(ranked == sums[:, None], number, 1 << 30), axis=1)
            sums += tl.max(tl.where(number == at[:, None], float("-inf"), ranked), axis=1)
        group = tl.arange(0, ranked.shape[0])
        tied = (sums[None, :] == sums[:, None]) & (group[None, :] < group[:, None])
        before = tl.sum(((sums[None, :] > sums[:, None]) | tied).to(tl.int32), axis=1)
        key = tl.where((before >= BEST)[:, None], _ASIDE, key)
    return tl.where(inside, key, _TAKEN)


@triton.jit
def whole_sum(values):
    """Of all numbers; a CPU adds them up in order."""
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit
def _least(values):
    return tl.min(tl.min(values, axis=1), axis=0)


@triton.jit
def _most(values):
    return tl.max(tl.max(values, axis=1), axis=0)


@triton.jit
def route_rows(logits, correction, slots, factors, chosen, weights, scale, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
               CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, NORMALISED: tl.constexpr,
               PADDED: tl.constexpr, WEIGHTED: tl.constexpr, GROUPS: tl.constexpr, BEST: tl.constexpr,
               ROWS: tl.constexpr, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R), for GPU and CPU. Experts as [ROWS groups, BLOCK of each]. PADDED: there are ``slots``. WEIGHTED: there
    are ``factors``."""
    size: tl.constexpr = EXPERTS // GROUPS
    group, own = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (group < GROUPS) & (own < size)
    number = tl.where(inside, group * size + own, EXPERTS)
    gdc_wait(USE_GDC)
    row = tl.program_id(0).to(tl.int64)
    score = tl.load(logits + row * WIDTH + number, inside, float("-inf"))
    if SIGMOID:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-score))
    score, number = kept(score), number.to(tl.int32)
    ranked = score
    if CORRECTED:
        ranked = score + tl.load(correction + group * size + own, inside, 0.0)
    key = kept(_ranks(tl.where(inside, ranked, float("-inf")), number, inside, SIGMOID, GROUPS, BEST))
    for _ in tl.range(CHOSEN):
        first = _least(tl.where(key == _most(key), number, EXPERTS))
        key = updated(key, tl.where(number == first, _TAKEN, key))
    taken = inside & (key == _TAKEN)
    value = score
    if not SIGMOID:
        value = kept(tl.exp(score - _most(tl.where(taken, score, float("-inf")))))
    total = whole_sum(tl.where(taken if NORMALISED else inside, value, 0.0))
    if SIGMOID:
        total = total + 1e-20 if NORMALISED else 1.0
    real = tl.load(slots + row) != 0 if PADDED else True
    left = kept(tl.where(taken, number, EXPERTS))
    for slot in tl.range(CHOSEN):
        last = _least(left)
        left = updated(left, tl.where(number == last, EXPERTS, left))
        weight = tl.div_rn(_most(tl.where(number == last, value, float("-inf"))), total) * scale
        if WEIGHTED:
            weight = weight * tl.load(factors + last)
        tl.store(chosen + row * CHOSEN + slot, tl.where(real, last, -1))
        tl.store(weights + row * CHOSEN + slot, weight)


@triton.jit(do_not_specialize=_SIZES)
def sort_pairs(chosen, order, owners, places, woken, pairs, tiles, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
               BINS: tl.constexpr, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (EXPERTS). Each counts all pairs, so that it knows where its own begin, and places these in their order."""
    gdc_wait(USE_GDC)
    expert, at, number = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for begin in tl.range(0, pairs, BLOCK):
        there = tl.load(chosen + begin + at, begin + at < pairs, -1)
        counts += tl.histogram(tl.maximum(there, 0), BINS, mask=there >= 0)
    needed = (counts + (ROWS - 1)) // ROWS
    first = tl.sum(tl.where(number < expert, needed, 0), axis=0)
    own = tl.sum(tl.where(number == expert, needed, 0), axis=0)
    for tile in tl.range(0, own, BLOCK):
        tl.store(owners + first + tile + at, expert, tile + at < own)
    place = first * ROWS
    for begin in tl.range(0, pairs, BLOCK):
        pair = begin + at
        there = tl.load(chosen + pair, pair < pairs, -1)
        mine = (there == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, axis=0) - 1, pair, mine > 0)
        tl.store(places + pair, tl.where(there < 0, -1, pair), (pair < pairs) & ((mine > 0) | (there < 0)))
        place += tl.sum(mine, axis=0)
    left = place + tl.arange(0, ROWS)
    tl.store(order + left, pairs, left < (first + own) * ROWS)
    if expert == 0:
        tl.store(woken, tl.sum((counts > 0).to(tl.int64), axis=0))
        for tile in tl.range(tl.sum(needed, axis=0), tiles, BLOCK):
            tl.store(owners + tile + at, -1, tile + at < tiles)


def sort_rows(x: Tensor, chosen: Tensor, how: Routing, count: Tensor | None = None) -> tuple[Tensor, ExpertRows]:
    """As :func:`foresay.verifier.ops.experts.sort_rows`."""
    pairs, (tiles, rows) = chosen.numel(), how.tiles(chosen)
    order, owners = (chosen.new_empty(*shape) for shape in ((tiles, rows), (tiles,)))
    places, woken = torch.empty_like(chosen), chosen.new_empty(1, dtype=torch.int64)
    sort_pairs[(how.experts,)](
        chosen, order, owners, places, woken, pairs, tiles, EXPERTS=how.experts, ROWS=rows, BINS=padded(how.experts),
        BLOCK=_PAIRS, num_warps=4, **pdl_args(),
    )  # fmt: skip
    return x, ExpertRows(places, woken, order, owners)


@triton.jit(do_not_specialize=("pairs",))
def expert_tiles(x, weight, scales, offsets, steps, bias, out, order, owners, pairs, EXPERTS: tl.constexpr,
                 SHARE: tl.constexpr, OUTER: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
                 KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, OFFSETS: tl.constexpr,
                 WIDTH: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr, ALL: tl.constexpr, BIAS: tl.constexpr,
                 GATED: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (tiles, an expert's outputs / TILE). OUTER: outputs of all experts. SHARE: pairs that read one row of x."""
    gdc_wait(USE_GDC)
    expert = tl.load(owners + tl.program_id(0))
    if expert >= 0:
        each: tl.constexpr = OUTER // EXPERTS
        outputs: tl.constexpr = each // 2 if GATED > 0 else each
        pair = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
        columns, own = columns_of(tl.program_id(1), each, TILE, GATED > 0), own_numbers(tl.program_id(1), TILE, GATED)
        columns += expert * outputs
        if GATED > 0:  # the up outputs of all experts are behind the gates of all
            columns += tl.where(columns >= (expert + 1) * outputs, (EXPERTS - 1) * outputs, 0)
        sums = tile_sums(x, weight, scales, offsets, steps, pair // SHARE, columns, 0, WIDTH, pairs // SHARE, OUTER, K,
                          BLOCK, KIND, GROUPS, SPAN, OFFSETS, SEGMENT, ALL)  # fmt: skip
        result = activated(sums, bias, columns, out.dtype.element_ty, OUTER, BIAS, GATED)
        where = pair.to(tl.int64)[None, :] * outputs + own[:, None]
        tl.store(out + where, result, mask=(own < outputs)[:, None] & (pair < pairs)[None, :])


def expert_linear(x: Tensor, weight: BlockedWeight, dtype: torch.dtype, rows: ExpertRows) -> Tensor:
    """As :func:`foresay.verifier.ops.experts.expert_linear`."""
    assert rows.sorted_ids is not None and rows.expert_ids is not None, "they were sorted on this device"
    assert x.is_contiguous() and x.data_ptr() % 16 == 0 and weight.values.data_ptr() % 16 == 0, "see linear.product"
    pairs, (tiles, height) = rows.positions.numel(), rows.sorted_ids.shape
    each, tile = weight.outer // weight.experts, tile_of_expert(weight, height)
    out = x.new_empty(pairs, each // gate_parts(weight.gated), dtype=dtype)
    segments, length = weight.cut
    tensors = weight.scales, weight.offsets, weight.steps, weight.bias
    expert_tiles[(tiles, triton.cdiv(each, tile.outputs))](
        x, weight.values, *(given(one, x) for one in tensors), out, rows.sorted_ids, rows.expert_ids, pairs,
        EXPERTS=weight.experts, SHARE=pairs // len(x), **about(weight), TILE=tile.outputs, ROWS=height, SEGMENT=length,
        ALL=segments > 1, BIAS=weight.bias is not None, GATED=GATES[weight.gated], **options(tile, weight),
    )  # fmt: skip
    return out


@triton.jit
def mix_rows(parts, weights, places, shared, gates, out, WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
             SHARED: tl.constexpr, GATES: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
             USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, WIDTH / BLOCK), for GPU and CPU. GATES: columns of ``gates``; 0: the shared output has none. PADDED:
    whether places may be negative."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = columns < WIDTH, tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(CHOSEN):
        place, weight = tl.load(places + row * CHOSEN + slot), tl.load(weights + row * CHOSEN + slot)
        part = tl.load(parts + place.to(tl.int64) * WIDTH + columns, inside & (place >= 0) if PADDED else inside, 0.0)
        total = tl.fma(part, tl.broadcast_to(weight, [BLOCK]), total)
    if SHARED:
        other = tl.load(shared + row * WIDTH + columns, inside, 0.0)
        if GATES > 0:
            other = other * tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(gates + row * GATES + GATES - 1)))
        total = total + other
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), inside)
