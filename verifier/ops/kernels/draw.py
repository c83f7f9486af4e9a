"""The draw at every row in three launches, without sorting or copying the vocabulary.

    scan    rows x blocks   each block's largest ``logit / T + noise``, largest ``logit / T``, and mass
    weigh   rows x blocks   how many tokens are likelier than the row's winner, their mass, and which they are
    settle  rows            the winner stands, or the search among the likelier tokens

Top-k, top-p and min-p each keep the tokens from some logit upwards. So if the winner among all tokens is filtered out,
every survivor is likelier than the winner: the next winner is the largest noisy logit among the *likelier* tokens, and
so on until one stands. As the loser of a round was drawn from what is left, a round halves the mass of what must go, on
average. ``weigh`` lists the likelier tokens, at most CAP per block; where a block overflows, as it may in a flat row,
``settle`` goes over the whole row. With top-k it lists fewer, and enough to hold the top k, whose mass top-p asks for:
the tokens that reach the k-th largest of the blocks' maxima.

No atomics, and every sum in an order fixed by the vocabulary's size: a row's draw does not depend on other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifier.ops.kernels.noise import gumbel, noise_key

if TYPE_CHECKING:
    from verifier.ops.draw import RowSampling

#: Below this temperature the draw is greedy, as in spec/sampling.py.
_COLDEST = tl.constexpr(1e-30)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(float("inf"))
_BROKEN = tl.constexpr(-1)

#: Blocks of one row that are merged at once, and likelier tokens listed per block.
MERGE, CAP = 256, 32
#: Of ``settle``: with fewer, the 8192 candidates of a tile do not fit into registers.
SETTLE_WARPS = 16
WEIGH_WARPS = 8


@triton.jit
def divisor_of(temperature):
    """What the logits are divided by: 1 where the draw is greedy."""
    return tl.where(temperature < _COLDEST, 1.0, temperature)


@triton.jit
def first_largest(values, ids):
    """The largest value, and the lowest id that has it."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, _NO_TOKEN), axis=0)


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
def scan(
    logits, temperature, seeds, positions, noisy_tops, winners, tops, masses, vocab_size, blocks, BLOCK: tl.constexpr
):
    """One block of one row: the winner and its noisy value, the largest scaled logit (NaN if broken), and the mass."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    raw = tl.load(logits + row * vocab_size + ids, ids < vocab_size, -_INFINITY)
    bad = (raw != raw) | (raw == _INFINITY)
    broken = tl.max(bad.to(tl.int32), axis=0)
    scaled = tl.div_rn(tl.where(bad, -_INFINITY, raw), divisor_of(heat))
    noisy = scaled
    if heat >= _COLDEST:
        noisy = scaled + gumbel(noise_key(tl.load(seeds + row), tl.load(positions + row)), ids)
    best, winner = first_largest(noisy, ids)
    top = tl.max(scaled, axis=0)
    at = row * blocks + block
    tl.store(noisy_tops + at, best)
    tl.store(winners + at, winner)
    tl.store(tops + at, tl.where(broken == 1, float("nan"), top))
    tl.store(masses + at, tl.sum(tl.exp(scaled - tl.where(top == -_INFINITY, 0.0, top)), axis=0))


@triton.jit
def merged(noisy_tops, winners, tops, row, blocks, MERGE: tl.constexpr):
    """Of a whole row: the winner, the largest scaled logit of each block and of all, and whether it is broken."""
    inside = tl.arange(0, MERGE) < blocks
    at = row * blocks + tl.arange(0, MERGE)
    noisy = tl.load(noisy_tops + at, inside, -_INFINITY)
    _, winner = first_largest(noisy, tl.load(winners + at, inside, _NO_TOKEN))
    of_blocks = tl.load(tops + at, inside, -_INFINITY)
    broken = tl.max((of_blocks != of_blocks).to(tl.int32), axis=0)
    of_blocks = tl.where(of_blocks != of_blocks, -_INFINITY, of_blocks)
    return winner, of_blocks, tl.max(of_blocks, axis=0), broken == 1


@triton.jit
def kth_largest(values, k):
    """The k-th largest of a tile, by bisection over the bits; minus infinity if there are fewer."""
    low, high = ordered(tl.full((), -_INFINITY, tl.float32)), ordered(tl.max(values, axis=0))
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((values >= unordered(middle)).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle - 1
    return unordered(low)


@triton.jit
def weigh(
    logits,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    noisy_tops,
    winners,
    tops,
    counts,
    masses,
    listed,
    likelier,
    vocab_size,
    blocks,
    BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
    CAP: tl.constexpr,
):
    """One block of one row: count and mass of the tokens likelier than the winner, and the list for the search.

    Nothing is written where no filter can touch the winner: it is the likeliest, or there is no filter.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, k, p = tl.load(temperature + row), tl.load(top_ks + row), tl.load(top_ps + row)
    by_k, by_p = (k > 0) & (k < vocab_size), p < 1.0
    if (heat >= _COLDEST) & (by_k | by_p | (tl.load(min_ps + row) > 0.0)):
        winner, of_blocks, top, broken = merged(noisy_tops, winners, tops, row, blocks, MERGE)
        start = logits + row * vocab_size
        pivot = tl.div_rn(tl.load(start + winner), heat)
        if (pivot < top) & (broken == 0):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            scaled = tl.div_rn(tl.load(start + ids, ids < vocab_size, -_INFINITY), heat)
            above = scaled > pivot
            kept = above
            if by_k & (by_p | (k <= blocks)):
                kept = (scaled >= kth_largest(of_blocks, k)) & (scaled > -_INFINITY)
            place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
            at = row * blocks + block
            tl.store(likelier + at * CAP + place, ids, kept & (place < CAP))
            tl.store(listed + at, tl.sum(kept.to(tl.int32), axis=0))
            tl.store(counts + at, tl.sum(above.to(tl.int32), axis=0))
            tl.store(masses + at, tl.sum(tl.where(above, tl.exp(scaled - top), 0.0), axis=0))


@triton.jit
def candidates(start, listed, likelier, heat, tile, whole, vocab_size, blocks, MERGE: tl.constexpr, CAP: tl.constexpr):
    """Ids and scaled logits of one tile of the search: the listed tokens, or a piece of the whole row."""
    at = tile * (MERGE * CAP) + tl.arange(0, MERGE * CAP)
    ids, inside = at, at < vocab_size
    if whole == 0:
        inside = at // CAP < blocks
        inside &= at % CAP < tl.load(listed + at // CAP, inside, 0)
        ids = tl.load(likelier + at, inside, 0)
    return ids, tl.div_rn(tl.load(start + ids, inside, -_INFINITY), heat)


@triton.jit
def least_of_top_k(start, listed, likelier, heat, k, top, tiles, whole, vocab_size, blocks, MERGE, CAP):
    """The k-th largest scaled logit of the row, and the mass of all tokens that reach it."""
    low, high = ordered(tl.full((), -_INFINITY, tl.float32)), ordered(top)
    while low < high:
        middle = low + (high - low + 1) // 2
        count, tile = 0, 0
        while tile < tiles:
            _, scaled = candidates(start, listed, likelier, heat, tile, whole, vocab_size, blocks, MERGE, CAP)
            count += tl.sum((scaled >= unordered(middle)).to(tl.int32), axis=0)
            tile += 1
        if count >= k:
            low = middle
        else:
            high = middle - 1
    least, mass, tile = unordered(low), 0.0, 0
    while tile < tiles:
        _, scaled = candidates(start, listed, likelier, heat, tile, whole, vocab_size, blocks, MERGE, CAP)
        mass += tl.sum(tl.where(scaled >= least, tl.exp(scaled - top), 0.0), axis=0)
        tile += 1
    return least, mass


@triton.jit
def search(
    start,
    listed,
    likelier,
    heat,
    key,
    k,
    min_p,
    least,
    enough,
    winner,
    top,
    tiles,
    whole,
    vocab_size,
    blocks,
    MERGE,
    CAP,
):
    """The first winner that stands: fewer than k tokens are likelier, and weigh less than enough; it weighs min_p."""
    pivot, searching = tl.div_rn(tl.load(start + winner), heat), 1
    while searching == 1:
        count, mass, tile = 0, 0.0, 0
        best, following = tl.full((), -_INFINITY, tl.float32), tl.full((), _NO_TOKEN, tl.int32)
        while tile < tiles:
            ids, scaled = candidates(start, listed, likelier, heat, tile, whole, vocab_size, blocks, MERGE, CAP)
            above = scaled > pivot
            weight = tl.exp(scaled - top)
            count += tl.sum(above.to(tl.int32), axis=0)
            mass += tl.sum(tl.where(above, weight, 0.0), axis=0)
            possible = above & (scaled >= least) & (weight >= min_p)
            noisy, first = first_largest(tl.where(possible, scaled + gumbel(key, ids), -_INFINITY), ids)
            better = noisy > best  # tiles of a whole row go up in ids, so the first of equals stays
            following = tl.where(better, first, following)
            best = tl.where(better, noisy, best)
            tile += 1
        stands = (count < k) & (pivot >= least) & (tl.exp(pivot - top) >= min_p)
        if stands & ((mass < enough) | (count == 0)):
            searching = 0
        else:
            winner = following
            pivot = tl.div_rn(tl.load(start + winner), heat)
    return winner


@triton.jit
def settle(
    logits,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    noisy_tops,
    winners,
    tops,
    masses,
    counts,
    masses_above,
    listed,
    likelier,
    drawn,
    vocab_size,
    blocks,
    MERGE: tl.constexpr,
    CAP: tl.constexpr,
):
    """One row: its winner if that stands, else what the search finds; ``BROKEN`` if the row is."""
    row = tl.program_id(0).to(tl.int64)
    heat, k, p = tl.load(temperature + row), tl.load(top_ks + row), tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    by_k, by_p = (k > 0) & (k < vocab_size), p < 1.0
    k = tl.where(by_k, k, vocab_size)
    winner, of_blocks, top, broken = merged(noisy_tops, winners, tops, row, blocks, MERGE)
    token = winner
    if broken | (top == -_INFINITY):
        token = tl.full((), _BROKEN, tl.int32)
    elif (heat >= _COLDEST) & (by_k | by_p | (min_p > 0.0)):
        start = logits + row * vocab_size
        scaled = tl.div_rn(tl.load(start + winner), heat)
        if scaled < top:
            at = row * blocks + tl.arange(0, MERGE)
            inside = tl.arange(0, MERGE) < blocks
            total = tl.sum(tl.load(masses + at, inside, 0.0) * tl.exp(of_blocks - top), axis=0)
            count = tl.sum(tl.load(counts + at, inside, 0), axis=0)
            above = tl.sum(tl.load(masses_above + at, inside, 0.0), axis=0)
            weight = tl.exp(scaled - top)
            # What top-k keeps weighs at least what is known to be in it.
            surely = p * tl.where(by_k, above + weight, total)
            if (count >= k) | (weight < min_p) | (by_p & (above >= surely)):
                mine, list_of_row = listed + row * blocks, likelier + row * blocks * CAP
                whole = (tl.max(tl.load(listed + at, inside, 0), axis=0) > CAP).to(tl.int32)
                tiles = tl.where(whole == 1, tl.cdiv(vocab_size, MERGE * CAP), 1)
                least, enough = tl.full((), -_INFINITY, tl.float32), tl.full((), _INFINITY, tl.float32)
                if by_p:
                    if by_k:
                        least, total = least_of_top_k(
                            start, mine, list_of_row, heat, k, top, tiles, whole, vocab_size, blocks, MERGE, CAP
                        )
                    enough = p * total
                key = noise_key(tl.load(seeds + row), tl.load(positions + row))
                token = search(
                    start,
                    mine,
                    list_of_row,
                    heat,
                    key,
                    k,
                    min_p,
                    least,
                    enough,
                    winner,
                    top,
                    tiles,
                    whole,
                    vocab_size,
                    blocks,
                    MERGE,
                    CAP,
                )
    tl.store(drawn + row, token.to(tl.int64))


def block_of(vocab_size: int) -> int:
    """Tokens of a block: by the vocabulary alone, so that sums are formed alike however many rows there are."""
    return 1024 if vocab_size <= 1024 * MERGE else triton.cdiv(triton.next_power_of_2(vocab_size), MERGE)


def draw_rows(logits: Tensor, sampling: RowSampling) -> Tensor:
    """As :func:`verifier.ops.draw.draw_rows`."""
    rows, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, "fp32 rows, one behind the other"
    block = block_of(vocab_size)
    blocks = triton.cdiv(vocab_size, block)
    size = triton.cdiv(rows * blocks, 4) * 4  # each array begins on 16 bytes: Triton compiles anew for other pointers
    floats = logits.new_empty(4, size)
    words = logits.new_empty(3 + CAP, size, dtype=torch.int32)
    drawn = logits.new_empty(rows, dtype=torch.int64)
    noisy_tops, tops, masses, masses_above = floats.unbind(0)
    winners, counts, listed = words[:3].unbind(0)
    likelier = words[3:]
    if rows:
        s, sizes = sampling, (vocab_size, blocks)
        scanned = (noisy_tops, winners, tops)
        weighed = (counts, masses_above, listed, likelier)
        filters = (s.top_k, s.top_p, s.min_p)
        grid = (rows, blocks)
        scan[grid](logits, s.temperature, s.seeds, s.positions, *scanned, masses, *sizes, block)
        weigh[grid](
            logits, s.temperature, *filters, *scanned, *weighed, *sizes, block, MERGE, CAP, num_warps=WEIGH_WARPS
        )
        settle[(rows,)](
            logits,
            s.temperature,
            *filters,
            s.seeds,
            s.positions,
            *scanned,
            masses,
            *weighed,
            drawn,
            *sizes,
            MERGE,
            CAP,
            num_warps=SETTLE_WARPS,
        )
    return drawn
