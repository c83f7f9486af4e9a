"""The draw at every row in four launches, without sorting or copying the vocabulary.

    scan     rows x blocks   each block's largest ``logit / T + noise``, largest ``logit / T``, and mass
    weigh 0  rows x blocks   the mass of the tokens likelier than the row's winner, and the next winner among them
    weigh 1  rows x blocks   the same of the next winner, where the first is filtered out
    settle   rows            the first winner that stands

Top-k, top-p and min-p each keep the tokens from some logit upwards. So if the winner among all tokens is filtered out,
every survivor is likelier than the winner: the next winner is the largest noisy logit among the *likelier* tokens, and
so on until one stands. As the loser of a round was drawn from what is left, a round halves the mass of what must go, on
average. What two rounds leave open, ``settle`` goes on with, with one program per row.

Top-k counts the likelier tokens, and top-p after it asks for the mass of the top k. So ``weigh`` lists a few tokens
that hold them, those that reach the k-th largest of the blocks' maxima, at most CAP per block, and ``settle`` searches
that list; where a block has more, it goes over the whole row.

No atomics, and every sum in an order fixed by the vocabulary's size: a row's draw does not depend on other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifier.ops.kernels.noise import gumbel, noise_key
from verifier.ops.kernels.search import INFINITY, NO_TOKEN, first_largest, kth_largest, least_of_top_k, search

if TYPE_CHECKING:
    from verifier.ops.draw import RowSampling

#: Below this temperature the draw is greedy, as in spec/sampling.py.
_COLDEST = tl.constexpr(1e-30)
_BROKEN = tl.constexpr(-1)

#: Blocks of one row that are merged at once, and tokens listed per block.
MERGE, CAP = 256, 32
#: Winners that are weighed by the whole grid before one program goes on alone.
ROUNDS = 2
#: Tokens that the search takes at once. Twice as many do not fit into the registers of 16 or 32 warps.
TILE = 4096
SETTLE_WARPS, WEIGH_WARPS = 16, 8

# What the launches hand on, per row and block: planes of ``size`` numbers, and each round has its own. ``size`` follows
# from the number of rows, so nothing is compiled by its value.
_TOPS, _MASSES, _NOISY, _ABOVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_LISTED, _COUNTS, _WINNERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FLOATS, _WORDS = 3 + 2 * ROUNDS, 3 + ROUNDS
_LIST = tl.constexpr(_WORDS)


@triton.jit
def divisor_of(temperature):
    """What the logits are divided by: 1 where the draw is greedy."""
    return tl.where(temperature < _COLDEST, 1.0, temperature)


@triton.jit(do_not_specialize=["size"])
def scan(logits, temperature, seeds, positions, floats, words, size, vocab_size, blocks, BLOCK: tl.constexpr):
    """One block of one row: the winner and its noisy value, the largest scaled logit (NaN if broken), and the mass."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    raw = tl.load(logits + row * vocab_size + ids, ids < vocab_size, -INFINITY)
    bad = (raw != raw) | (raw == INFINITY)
    broken = tl.max(bad.to(tl.int32), axis=0)
    scaled = tl.div_rn(tl.where(bad, -INFINITY, raw), divisor_of(heat))
    noisy = scaled
    if heat >= _COLDEST:
        noisy = scaled + gumbel(noise_key(tl.load(seeds + row), tl.load(positions + row)), ids)
    best, winner = first_largest(noisy, ids)
    top = tl.max(scaled, axis=0)
    at = row * blocks + block
    tl.store(floats + size * _NOISY + at, best)
    tl.store(words + size * _WINNERS + at, winner)
    tl.store(floats + size * _TOPS + at, tl.where(broken == 1, float("nan"), top))
    mass = tl.sum(tl.exp(scaled - tl.where(top == -INFINITY, 0.0, top)), axis=0)
    tl.store(floats + size * _MASSES + at, mass)


@triton.jit
def tops_of(floats, size, row, blocks, MERGE: tl.constexpr):
    """The largest scaled logit of each block and of the row, and whether the row is broken."""
    at = tl.arange(0, MERGE)
    of_blocks = tl.load(floats + size * _TOPS + row * blocks + at, at < blocks, -INFINITY)
    broken = tl.max((of_blocks != of_blocks).to(tl.int32), axis=0) == 1
    of_blocks = tl.where(of_blocks != of_blocks, -INFINITY, of_blocks)
    return of_blocks, tl.max(of_blocks, axis=0), broken


@triton.jit
def winner_of(floats, words, size, row, blocks, ROUND: tl.constexpr, MERGE: tl.constexpr):
    """The winner of a round: the lowest id of the largest noisy logit."""
    at, inside = row * blocks + tl.arange(0, MERGE), tl.arange(0, MERGE) < blocks
    noisy = tl.load(floats + size * (_NOISY + 2 * ROUND) + at, inside, -INFINITY)
    _, winner = first_largest(noisy, tl.load(words + size * (_WINNERS + ROUND) + at, inside, NO_TOKEN))
    return winner


@triton.jit
def sum_of(plane, row, blocks, MERGE: tl.constexpr):
    """The sum of one plane's numbers of a row."""
    at = tl.arange(0, MERGE)
    return tl.sum(tl.load(plane + row * blocks + at, at < blocks, 0), axis=0)


@triton.jit
def total_of(floats, of_blocks, top, size, row, blocks, MERGE: tl.constexpr):
    """The mass of the whole row, the likeliest token's being 1."""
    at = tl.arange(0, MERGE)
    masses = tl.load(floats + size * _MASSES + row * blocks + at, at < blocks, 0.0)
    return tl.sum(masses * tl.exp(of_blocks - top), axis=0)


@triton.jit
def stands_of(floats, pivot, top, enough, min_p, size, row, blocks, ROUND: tl.constexpr, MERGE: tl.constexpr):
    """Whether the winner of a round passes top-p and min-p. pivot: its scaled logit. enough: p times the row's mass."""
    above = sum_of(floats + size * (_ABOVE + 2 * ROUND), row, blocks, MERGE)
    return (tl.exp(pivot - top) >= min_p) & (above < enough)


@triton.jit(do_not_specialize=["size"])
def weigh(
    logits,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    floats,
    words,
    size,
    vocab_size,
    blocks,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
    CAP: tl.constexpr,
):
    """One block of one row: mass of the tokens likelier than the round's winner, and the next winner among them.

    Nothing is written where nothing can touch the winner: it is the likeliest, no filter is on, or an earlier stands.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, k, p = tl.load(temperature + row), tl.load(top_ks + row), tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    by_k, by_p = (k > 0) & (k < vocab_size), p < 1.0
    if (heat >= _COLDEST) & (by_k | by_p | (min_p > 0.0)):
        of_blocks, top, broken = tops_of(floats, size, row, blocks, MERGE)
        start = logits + row * vocab_size
        pivot = tl.div_rn(tl.load(start + winner_of(floats, words, size, row, blocks, 0, MERGE)), heat)
        wanted = (pivot < top) & (broken == 0)
        if ROUND == 1:
            wanted &= by_k == 0
            if wanted:
                enough = tl.full((), INFINITY, tl.float32)
                if by_p:
                    enough = p * total_of(floats, of_blocks, top, size, row, blocks, MERGE)
                wanted = stands_of(floats, pivot, top, enough, min_p, size, row, blocks, 0, MERGE) == 0
            if wanted:
                pivot = tl.div_rn(tl.load(start + winner_of(floats, words, size, row, blocks, 1, MERGE)), heat)
                wanted = pivot < top
        if wanted:
            ids = block * BLOCK + tl.arange(0, BLOCK)
            scaled = tl.div_rn(tl.load(start + ids, ids < vocab_size, -INFINITY), heat)
            above, weight = scaled > pivot, tl.exp(scaled - top)
            at = row * blocks + block
            tl.store(floats + size * (_ABOVE + 2 * ROUND) + at, tl.sum(tl.where(above, weight, 0.0), axis=0))
            if by_k:
                tl.store(words + size * _COUNTS + at, tl.sum(above.to(tl.int32), axis=0))
                kept = above
                if by_p | (k <= blocks):
                    kept = (scaled >= kth_largest(of_blocks, k)) & (scaled > -INFINITY)
                place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
                tl.store(words + size * _LIST + at * CAP + place, ids, kept & (place < CAP))
                tl.store(words + size * _LISTED + at, tl.sum(kept.to(tl.int32), axis=0))
            else:
                key = noise_key(tl.load(seeds + row), tl.load(positions + row))
                noisy = tl.where(above & (weight >= min_p), scaled + gumbel(key, ids), -INFINITY)
                best, winner = first_largest(noisy, ids)
                tl.store(floats + size * (_NOISY + 2 * ROUND + 2) + at, best)
                tl.store(words + size * (_WINNERS + ROUND + 1) + at, winner)


@triton.jit(do_not_specialize=["size"])
def settle(
    logits,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    floats,
    words,
    drawn,
    size,
    vocab_size,
    blocks,
    MERGE: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
):
    """One row: the first of the winners that stands, or what the search finds; ``BROKEN`` if the row is."""
    row = tl.program_id(0).to(tl.int64)
    heat, k, p = tl.load(temperature + row), tl.load(top_ks + row), tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    by_k, by_p = (k > 0) & (k < vocab_size), p < 1.0
    k = tl.where(by_k, k, vocab_size)
    of_blocks, top, broken = tops_of(floats, size, row, blocks, MERGE)
    token = winner_of(floats, words, size, row, blocks, 0, MERGE)
    start = logits + row * vocab_size
    pivot = tl.div_rn(tl.load(start + token), divisor_of(heat))
    if broken | (top == -INFINITY):
        token = tl.full((), _BROKEN, tl.int32)
    elif (heat >= _COLDEST) & (by_k | by_p | (min_p > 0.0)) & (pivot < top):
        searching, whole, tiles = 1, 1, tl.cdiv(vocab_size, TILE)
        least, enough = tl.full((), -INFINITY, tl.float32), tl.full((), INFINITY, tl.float32)
        listed, likelier = words + size * _LISTED + row * blocks, words + size * _LIST + row * blocks * CAP
        if by_k:
            count = sum_of(words + size * _COUNTS, row, blocks, MERGE)
            above = sum_of(floats + size * _ABOVE, row, blocks, MERGE)
            weight = tl.exp(pivot - top)
            # What top-k keeps weighs at least what is known to be in it.
            if (count < k) & (weight >= min_p) & ((p >= 1.0) | (above < p * (above + weight))):
                searching = 0
            else:
                at = tl.arange(0, MERGE)
                if tl.max(tl.load(listed + at, at < blocks, 0), axis=0) <= CAP:
                    whole, tiles = 0, tl.cdiv(blocks * CAP, TILE)
                if by_p:
                    least, mass = least_of_top_k(
                        start, listed, likelier, heat, k, top, tiles, whole, vocab_size, blocks, TILE, CAP
                    )
                    enough = p * mass
        else:
            if by_p:
                enough = p * total_of(floats, of_blocks, top, size, row, blocks, MERGE)
            if stands_of(floats, pivot, top, enough, min_p, size, row, blocks, 0, MERGE):
                searching = 0
            else:
                token = winner_of(floats, words, size, row, blocks, 1, MERGE)
                pivot = tl.div_rn(tl.load(start + token), heat)
                if (pivot == top) | stands_of(floats, pivot, top, enough, min_p, size, row, blocks, 1, MERGE):
                    searching = 0
                else:
                    token = winner_of(floats, words, size, row, blocks, 2, MERGE)
        if searching == 1:
            key = noise_key(tl.load(seeds + row), tl.load(positions + row))
            token = search(
                start,
                listed,
                likelier,
                heat,
                key,
                k,
                min_p,
                least,
                enough,
                token,
                top,
                tiles,
                whole,
                vocab_size,
                blocks,
                TILE,
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
    assert logits.data_ptr() % 16 == 0, "other alignments are compiled otherwise, and may sum in another order"
    block = block_of(vocab_size)
    blocks = triton.cdiv(vocab_size, block)
    size = triton.cdiv(rows * blocks, 4) * 4
    floats = logits.new_empty(_FLOATS, size)
    words = logits.new_empty(_WORDS + CAP, size, dtype=torch.int32)
    drawn = logits.new_empty(rows, dtype=torch.int64)
    if rows:
        s, sizes = sampling, (size, vocab_size, blocks)
        noise = (s.seeds, s.positions)
        asked = (logits, s.temperature, s.top_k, s.top_p, s.min_p, *noise)
        scan[(rows, blocks)](logits, s.temperature, *noise, floats, words, *sizes, block)
        for turn in range(ROUNDS):
            weigh[(rows, blocks)](*asked, floats, words, *sizes, turn, block, MERGE, CAP, num_warps=WEIGH_WARPS)
        settle[(rows,)](*asked, floats, words, drawn, *sizes, MERGE, TILE, CAP, num_warps=SETTLE_WARPS)
    return drawn
