"""The search in one row of logits, by one program: among the tokens that were listed, or over the whole row.

Called by the sample (sample.py) for the rows that its rounds leave open.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.verifier.ops.kernels.noise import gumbel_at

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def first_largest(values, ids):
    """The largest value, and the lowest id that has it."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, NO_TOKEN), axis=0)


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
def kth_largest(values, k):
    """The k-th largest of a tile, by bisection over the bits; minus infinity if there are fewer."""
    low, high = ordered(tl.full((), -INFINITY, tl.float32)), ordered(tl.max(values, axis=0))
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((values >= unordered(middle)).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle - 1
    return unordered(low)


@triton.jit
def candidates(start, listed, likelier, heat, tile, whole, vocab_size, blocks, TILE: tl.constexpr, CAP: tl.constexpr):
    """Ids and scaled logits of one tile of the search: the listed tokens, or a piece of the whole row."""
    at = tile * TILE + tl.arange(0, TILE)
    ids, inside = at, at < vocab_size
    if whole == 0:
        inside = at // CAP < blocks
        inside &= at % CAP < tl.load(listed + at // CAP, inside, 0)
        ids = tl.load(likelier + at, inside, 0)
    return ids, tl.div_rn(tl.load(start + ids, inside, -INFINITY), heat)


@triton.jit
def least_of_top_k(start, listed, likelier, heat, k, top, tiles, whole, vocab_size, blocks, TILE, CAP):
    """The k-th largest scaled logit of the row, and the mass of all tokens that reach it."""
    low, high = ordered(tl.full((), -INFINITY, tl.float32)), ordered(top)
    while low < high:
        middle = low + (high - low + 1) // 2
        threshold, count, tile = unordered(middle), 0, 0
        while tile < tiles:
            _, scaled = candidates(start, listed, likelier, heat, tile, whole, vocab_size, blocks, TILE, CAP)
            count += tl.sum((scaled >= threshold).to(tl.int32), axis=0)
            tile += 1
        if count >= k:
            low = middle
        else:
            high = middle - 1
    least, mass, tile = unordered(low), 0.0, 0
    while tile < tiles:
        _, scaled = candidates(start, listed, likelier, heat, tile, whole, vocab_size, blocks, TILE, CAP)
        mass += tl.sum(tl.where(scaled >= least, tl.exp(scaled - top), 0.0), axis=0)
        tile += 1
    return least, mass


@triton.jit
def search(
    start,
    token_ids,
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
    TILE,
    CAP,
):
    """The first winner that stands: fewer than k tokens are likelier, and weigh less than enough; it weighs min_p."""
    pivot, searching = tl.div_rn(tl.load(start + winner), heat), 1
    while searching == 1:
        count, mass, tile = 0, 0.0, 0
        best, following = tl.full((), -INFINITY, tl.float32), tl.full((), NO_TOKEN, tl.int32)
        while tile < tiles:
            ids, scaled = candidates(start, listed, likelier, heat, tile, whole, vocab_size, blocks, TILE, CAP)
            above = scaled > pivot
            weight = tl.exp(scaled - top)
            count += tl.sum(above.to(tl.int32), axis=0)
            mass += tl.sum(tl.where(above, weight, 0.0), axis=0)
            possible = above & (scaled >= least) & (weight >= min_p)
            noise = gumbel_at(key, ids, token_ids, vocab_size)
            noisy, first = first_largest(tl.where(possible, scaled + noise, -INFINITY), ids)
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
