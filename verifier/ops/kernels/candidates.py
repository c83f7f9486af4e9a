"""The sample of each row, and the likeliest children of each node: in two launches, without sorting a row.

    scan     rows x blocks   the largest of a block with noise, in order; the largest without, if a list decides what
                             filters keep; its largest logit and its mass
    decide   rows            merges the lists of the row's blocks; with filters, what they keep, with noise added

What top-k keeps, and for children what any filter keeps, is decided among the likeliest. If they keep more than fits in
the list, children are chosen as without filters, and a sample is searched for in the whole row, as it also is if top-p
or min-p may remove the winner among all tokens. Filters keep the tokens from some logit upwards: if they remove a
winner, every survivor is likelier than it, and the next winner is the largest noisy logit among the *likelier* tokens.
As the loser of a round was sampled from what is left, a round halves the mass to be removed, on average.

An entry of a list is one integer, ordered by value and then by column: the value's bits, and below them the largest
column number minus the column. So entries are distinct, and the largest is the first of the largest values.

There are no atomics, and the order of every sum is fixed by the vocabulary's size: a row's sample does not depend on
other rows.

Gumbel noise is computed where it is needed: the integers of :mod:`foresay.spec.sample` bit for bit, its logarithms to
an ulp. See there for the numbers and the reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.spec.sample import BROKEN, hashed
from foresay.verifier.ops import records
from foresay.verifier.ops.kernels.pdl import gdc_wait, pdl_args

if TYPE_CHECKING:
    from foresay.verifier.ops.records import RowSampling

#: Of int32s.
noise_bits = triton.jit(hashed)


@triton.jit
def mix64(value):
    """As :func:`foresay.spec.sampling.mix64`; value: uint64."""
    value += 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def noise_key(seed, position):
    """The key of one position, uint64. seed, position: int64, the seed's bits taken as unsigned."""
    return mix64(mix64(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64, bitcast=True))


@triton.jit
def gumbel_at(key, columns, token_ids, width):
    """fp32 standard Gumbel noise of the tokens in these columns of a row. key: of :func:`noise_key`. token_ids: see
    :func:`foresay.verifier.ops.sample.sample_rows`.

    ``log1p`` is Kahan's, since Triton has none that its interpreter runs: where ``1 - u`` rounds to 1, ``-log1p(-u)``
    is u itself; elsewhere the factor undoes the rounding of ``1 - u``.
    """
    ids = columns
    if token_ids is not None:
        ids = tl.load(token_ids + columns, columns < width, 0).to(tl.int32)
    bits = noise_bits(ids, key.to(tl.int32), (key >> 32).to(tl.int32))
    uniform = bits.to(tl.float32) * 4.656612873077393e-10
    uniform = tl.minimum(uniform + 2.3283064365386963e-10, 0.999999940395355224609375)
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / lost))
    return -tl.log(exponential)


#: Below this temperature the sample is greedy.
_COLDEST, _BROKEN = tl.constexpr(records.MIN_TEMPERATURE), tl.constexpr(BROKEN)
NO_TOKEN, INFINITY = tl.constexpr(0x7FFFFFFF), tl.constexpr(float("inf"))
#: Less than any entry: fills a list after its end.
NOTHING = tl.constexpr(-(1 << 63))
# Planes of ``size`` floats, one per row and block: largest logit and noisy logit, and the masses relative to them.
_TOPS, _MASSES, _NOISY_TOPS, _NOISY_MASSES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
#: Blocks of one row that are merged at once, entries of a list, and tokens that the search processes at once.
MERGE, MOST, TILE = 256, records.MOST_CHILDREN, 4096
#: Warps of a launch for children, and for samples.
SCAN_WARPS, DECIDE_WARPS = (4, 4), (4, 8)


def block_of(width: int) -> int:
    """Tokens of a block: depends only on the vocabulary, so that sums are the same for any number of rows."""
    return 1024 if width <= 1024 * MERGE else triton.cdiv(triton.next_power_of_2(width), MERGE)


@triton.jit
def ordered(value):
    """int64 in the order of the fp32 values; the same operation on the low 32 bits leads back."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def unordered(bits):
    """The fp32 value of an :func:`ordered` number."""
    low = bits.to(tl.int32)
    return tl.where(low < 0, low ^ 0x7FFFFFFF, low).to(tl.float32, bitcast=True)


@triton.jit
def entry_of(values, columns):
    """int64, in the order of value, then of column downwards. Both zeros are one value."""
    return (ordered(tl.where(values == 0.0, 0.0, values)) << 32) | (columns ^ NO_TOKEN).to(tl.int64)


@triton.jit
def parts_of(entries):
    """The value and the column of an entry; minus infinity for no entry."""
    values = tl.where(entries == NOTHING, -INFINITY, unordered(entries >> 32))
    return values, (entries & NO_TOKEN).to(tl.int32) ^ NO_TOKEN


@triton.jit
def asked_of(temperature, top_ks, top_ps, min_ps, row, EXACT: tl.constexpr, MOST: tl.constexpr):
    """How a row is sampled: hot, heat, k, p, min_p; by_k, whether a list can hold what top-k keeps; listed, whether the
    likeliest are listed without noise, and the limit of how many are kept."""
    heat, k, p, min_p = tl.load(temperature + row), tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    hot, by_k = heat >= _COLDEST, (k > 0) & (k <= MOST)
    listed = hot & by_k
    if EXACT == 0:
        listed = hot & (by_k | (p < 1.0) | (min_p > 0.0))
    return hot, tl.where(hot, heat, 1.0), k, p, min_p, by_k, listed, tl.where(by_k, k, MOST - 1)


@triton.jit
def list_largest(entries, out, rounds):
    """Write the largest ``rounds`` entries of a tile, in order."""
    turn = 0
    while turn < rounds:
        largest = tl.max(entries, axis=0)
        tl.store(out + turn, largest)
        entries = tl.where(entries == largest, NOTHING, entries)
        turn += 1


@triton.jit
def top_and_mass(values, floats, top_plane, mass_plane):
    """Write the largest of a tile's values and the sum of their exponentials, relative to it."""
    top = tl.max(values, axis=0)
    tl.store(floats + top_plane, top)
    tl.store(floats + mass_plane, tl.sum(tl.exp(values - tl.where(top == -INFINITY, 0.0, top)), axis=0))


@triton.jit(do_not_specialize=["size", "count"])
def scan(logits, token_ids, temperature, top_ks, top_ps, min_ps, seeds, positions, floats, noisy_lists, lists, size,
         width, blocks, count, EXACT: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
         USE_GDC: tl.constexpr):  # fmt: skip
    """One block of one row. NaN and infinity are excluded; or they count as the largest, and break a sample."""
    gdc_wait(USE_GDC)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, at = block * BLOCK + tl.arange(0, BLOCK), row * blocks + block
    hot, heat, _, _, _, _, listed, limit = asked_of(temperature, top_ks, top_ps, min_ps, row, EXACT, MOST)
    inside = columns < width
    raw = tl.load(logits + row * width + columns, inside, -INFINITY)
    scaled = tl.div_rn(tl.where(raw < INFINITY, raw, INFINITY if EXACT else -INFINITY), heat)
    top_and_mass(scaled, floats + at, size * _TOPS, size * _MASSES)
    if listed:
        list_largest(tl.where(inside, entry_of(scaled, columns), NOTHING), lists + at * (MOST + 1), limit + 1)
    if (listed == 0) | (EXACT == 0):
        if hot:
            key = noise_key(tl.load(seeds + row), tl.load(positions + row))
            scaled += gumbel_at(key, columns, token_ids, width)
        if EXACT == 0:
            top_and_mass(scaled, floats + at, size * _NOISY_TOPS, size * _NOISY_MASSES)
        list_largest(tl.where(inside, entry_of(scaled, columns), NOTHING), noisy_lists + at * count, count)


@triton.jit
def merge_lists(lists, blocks, rounds, length, MOST: tl.constexpr, MERGE: tl.constexpr):
    """int64[MOST]: the largest ``rounds`` entries of the lists of a row's blocks, in order, nothing after them; and the
    last of these, which is not among them if it is one more."""
    block, lane = tl.arange(0, MERGE), tl.arange(0, MOST)
    heads = tl.load(lists + block * length, block < blocks, NOTHING)
    taken, merged = tl.zeros((MERGE,), tl.int32), tl.full((MOST,), NOTHING, tl.int64)
    turn, largest = 0, tl.full((), NOTHING, tl.int64)
    while turn < rounds:
        largest = tl.max(heads, axis=0)
        merged = tl.where(lane == turn, largest, merged)
        first = (heads == largest) & (largest > NOTHING)
        taken += first.to(tl.int32)
        following = tl.load(lists + block * length + taken, first & (taken < rounds), NOTHING)
        heads = tl.where(first, following, heads)
        turn += 1
    return merged, largest


@triton.jit
def mass_of(floats, size, row, blocks, top_plane, mass_plane, MERGE: tl.constexpr):
    """The largest value of a row, and its mass relative to that, from those of its blocks."""
    block = tl.arange(0, MERGE)
    tops = tl.load(floats + size * top_plane + row * blocks + block, block < blocks, -INFINITY)
    masses = tl.load(floats + size * mass_plane + row * blocks + block, block < blocks, 0.0)
    top = tl.max(tops, axis=0)
    return top, tl.sum(masses * tl.exp(tops - top), axis=0)


@triton.jit
def kept_of(entries, after, mass, top, by_k, limit, p, min_p, MOST: tl.constexpr):
    """Which entries the filters keep, including ties, and whether they keep no other tokens. after: the entry after
    them."""
    scaled, _ = parts_of(entries)
    last, _ = parts_of(after)
    inside = tl.arange(0, MOST) < limit
    weights = tl.where(inside, tl.exp(scaled - top), 0.0)
    mass = tl.where(by_k, tl.sum(weights, axis=0), mass)
    enough, before = tl.where(p < 1.0, p * mass, INFINITY), tl.cumsum(weights, axis=0) - weights
    stays = inside & (((before < enough) & (weights >= min_p)) | (tl.arange(0, MOST) == 0))
    least = tl.min(tl.where(stays, scaled, INFINITY), axis=0)
    border = tl.min(tl.where(inside, scaled, INFINITY), axis=0)
    more = (last >= tl.where(by_k, border, least)) | (
        (by_k == 0) & (tl.sum(weights, axis=0) < enough) & (tl.exp(last - top) >= min_p)
    )
    return inside & (scaled >= least), (last == -INFINITY) | (more == 0)


@triton.jit
def likelier(start, token_ids, heat, key, pivot, min_p, top, width, TILE: tl.constexpr):
    """How many tokens of a row are likelier than the pivot, their mass, and which of them wins."""
    count, mass, tile = 0, 0.0, 0
    best = tl.full((), NOTHING, tl.int64)
    while tile < width:
        columns = tile + tl.arange(0, TILE)
        scaled = tl.div_rn(tl.load(start + columns, columns < width, -INFINITY), heat)
        above = scaled > pivot
        if tl.max(above.to(tl.int32), axis=0) == 1:
            weights = tl.exp(scaled - top)
            count += tl.sum(above.to(tl.int32), axis=0)
            mass += tl.sum(tl.where(above, weights, 0.0), axis=0)
            noisy = scaled + gumbel_at(key, columns, token_ids, width)
            possible = above & (weights >= min_p)
            best = tl.maximum(tl.max(tl.where(possible, entry_of(noisy, columns), NOTHING), axis=0), best)
        tile += TILE
    _, winner = parts_of(best)
    return count, mass, winner


@triton.jit
def search(start, token_ids, heat, key, k, p, min_p, winner, pivot, top, mass, width, TILE: tl.constexpr):
    """The first winner that survives: fewer than k tokens are likelier, with less mass than p, and it has at least
    ``min_p``.

    winner: among all tokens, of this scaled logit; or there is none yet, and ``pivot`` is lower. mass: of the row.
    """
    by_k = (k > 0) & (k < width)
    floor, enough = tl.full((), -INFINITY, tl.float32), tl.where(p < 1.0, p * mass, INFINITY)
    if by_k & (p < 1.0):
        # The largest number that k logits are above, by bisection; or one so low that all that weigh anything are.
        floor, high = top - (88.0 + tl.abs(top) * 1e-6), top
        middle = floor + (high - floor) * 0.5
        while (middle > floor) & (middle < high):
            count, _, _ = likelier(start, token_ids, heat, key, middle, min_p, top, width, TILE)
            if count < k:
                high = middle
            else:
                floor = middle
            middle = floor + (high - floor) * 0.5
        _, of_k, _ = likelier(start, token_ids, heat, key, floor, min_p, top, width, TILE)
        enough = p * of_k
    searching = 1
    while searching == 1:
        count, above, following = likelier(start, token_ids, heat, key, pivot, min_p, top, width, TILE)
        stands = (pivot > floor) & (tl.exp(pivot - top) >= min_p) & (above < enough) & ((count < k) | (by_k == 0))
        if stands | (count == 0):  # no filter removes the likeliest
            searching = 0
        else:
            winner = following
            pivot = tl.div_rn(tl.load(start + winner), heat)
    return winner


@triton.jit(do_not_specialize=["size", "count"])
def decide(logits, token_ids, temperature, top_ks, top_ps, min_ps, seeds, positions, floats, noisy_lists, lists, size,
           width, blocks, count, tokens, chances, EXACT: tl.constexpr, MOST: tl.constexpr, MERGE: tl.constexpr,
           TILE: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """One row: its sample, or its children among the tokens that the filters keep, or among all."""
    gdc_wait(USE_GDC)
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    hot, heat, k, p, min_p, by_k, listed, limit = asked_of(temperature, top_ks, top_ps, min_ps, row, EXACT, MOST)
    key = noise_key(tl.load(seeds + row), tl.load(positions + row))
    top, mass = mass_of(floats, size, row, blocks, _TOPS, _MASSES, MERGE)
    start, decided = logits + row * width, 0
    entries, log_sum = tl.full((MOST,), NOTHING, tl.int64), tl.full((), 0.0, tl.float32)
    if listed:
        likeliest, after = merge_lists(lists + row * blocks * (MOST + 1), blocks, limit + 1, MOST + 1, MOST, MERGE)
        kept, decides = kept_of(likeliest, after, mass, top, by_k, limit, p, min_p, MOST)
        decided = decides.to(tl.int32)
        scaled, columns = parts_of(likeliest)
        noisy = scaled + gumbel_at(key, tl.where(kept, columns, 0), token_ids, width)
        entries = tl.sort(tl.where(kept, entry_of(noisy, columns), NOTHING), descending=True)
        largest = tl.max(tl.where(kept, noisy, -INFINITY), axis=0)
        log_sum = largest + tl.log(tl.sum(tl.where(kept, tl.exp(noisy - largest), 0.0), axis=0))
    if (decided == 0) & ((listed == 0) | (EXACT == 0)):
        entries, _ = merge_lists(noisy_lists + row * blocks * count, blocks, count, count, MOST, MERGE)
        if EXACT == 0:
            largest, noisy_mass = mass_of(floats, size, row, blocks, _NOISY_TOPS, _NOISY_MASSES, MERGE)
            log_sum = largest + tl.log(noisy_mass)
    values, columns = parts_of(entries)
    is_token, inside = values > tl.where(top < INFINITY, -INFINITY, INFINITY), lane < count
    if EXACT:
        token = tl.max(tl.where(lane == 0, columns, 0), axis=0)
        pivot = tl.where(listed, -INFINITY, tl.div_rn(tl.load(start + token), heat))
        open = hot & (decided == 0) & ((k > 0) | (p < 1.0) | (min_p > 0.0))
        if open & (pivot < top) & (top < INFINITY):
            token = search(start, token_ids, heat, key, k, p, min_p, token, pivot, top, mass, width, TILE)
        columns = tl.where(lane == 0, token, columns)
    found = columns.to(tl.int64)
    if token_ids is not None:
        found = tl.load(token_ids + found, is_token, 0)
    tl.store(tokens + row * count + lane, tl.where(is_token, found, _BROKEN if EXACT else 0), inside)
    if EXACT == 0:
        tl.store(chances + row * count + lane, tl.where(is_token, values - log_sum, -INFINITY), inside)


def candidates(
    logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None = None, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.sample.best_children`; or, ``exact``, a sample of each row."""
    rows, width = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, "fp32 rows, one behind the other"
    if logits.data_ptr() % 16:  # compiled for another alignment, a kernel may sum in another order
        logits = logits.clone()
    block = block_of(width)
    blocks = triton.cdiv(width, block)
    size = triton.cdiv(rows * blocks, 4) * 4
    floats = logits.new_empty(4, size)
    handed = floats, *(logits.new_empty(size, length, dtype=torch.int64) for length in (count, MOST + 1))
    found = logits.new_empty(rows, count, dtype=torch.int64), logits.new_empty(rows, count)
    if rows:
        s, sizes = sampling, (size, width, blocks, count)
        given = (logits, token_ids, s.temperature, s.top_k, s.top_p, s.min_p, s.seeds, s.positions)
        scan[(rows, blocks)](*given, *handed, *sizes, exact, MOST, block, num_warps=SCAN_WARPS[exact], **pdl_args())
        decide[(rows,)](
            *given, *handed, *sizes, *found, exact, MOST, MERGE, TILE, num_warps=DECIDE_WARPS[exact], **pdl_args()
        )
    return found
