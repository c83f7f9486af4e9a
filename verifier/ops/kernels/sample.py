"""The sample at every row in three launches, without sorting or copying the vocabulary.

    scan     rows x blocks   each block's largest ``logit / T + noise``, largest ``logit / T``, and mass
    weigh    rows x blocks   of the row's winner and of a guess at the next one: the mass of the tokens likelier than
                             it, and the winner among them
    settle   rows            the first winner that stands

Top-k, top-p and min-p each keep the tokens from some logit upwards. So if the winner among all tokens is filtered out,
every survivor is likelier than the winner: the next winner is the largest noisy logit among the *likelier* tokens, and
so on until one stands. As the loser of a round was sampled from what is left, a round halves the mass of what must go,
on average. The next winner is known once all blocks are weighed, and guessed before that from what ``scan`` left: a
filter takes out little, so the next winner nearly always is a winner of its own block. What a wrong guess or two rounds
leave open, ``settle`` goes on with, with one program per row.

Top-k counts the likelier tokens, and top-p after it asks for the mass of the top k. So ``weigh`` lists a few tokens
that hold them, those that reach the k-th largest of the blocks' maxima, at most CAP per block, and ``settle`` searches
that list; where a block has more, it goes over the whole row.

No atomics, and every sum in an order fixed by the vocabulary's size: a row's sample does not depend on other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.noise import gumbel_at, noise_key
from foresay.verifier.ops.kernels.planes import (
    ABOVE,
    CAP,
    COLDEST,
    COUNTS,
    FLOATS,
    LIST,
    LISTED,
    MASSES,
    MERGE,
    NOISY,
    TOPS,
    WINNERS,
    WORDS,
    block_of,
    divisor_of,
    guess_of,
    tops_of,
    winner_of,
)
from foresay.verifier.ops.kernels.search import INFINITY, NO_TOKEN, first_largest, kth_largest
from foresay.verifier.ops.kernels.settle import settle

if TYPE_CHECKING:
    from foresay.verifier.ops.records import RowSampling

#: Tokens that the search takes at once. Twice as many do not fit into the registers of 16 or 32 warps.
TILE = 4096
SETTLE_WARPS, WEIGH_WARPS = 16, 8


@triton.jit(do_not_specialize=["size"])
def scan(
    logits,
    token_ids,
    temperature,
    seeds,
    positions,
    floats,
    words,
    size,
    vocab_size,
    blocks,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One block of one row: the winner and its noisy value, the largest scaled logit (NaN if broken), and the mass."""
    wait_turn(CHAINED)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    raw = tl.load(logits + row * vocab_size + ids, ids < vocab_size, -INFINITY)
    bad = (raw != raw) | (raw == INFINITY)
    broken = tl.max(bad.to(tl.int32), axis=0)
    scaled = tl.div_rn(tl.where(bad, -INFINITY, raw), divisor_of(heat))
    noisy = scaled
    if heat >= COLDEST:
        noisy = scaled + gumbel_at(
            noise_key(tl.load(seeds + row), tl.load(positions + row)), ids, token_ids, vocab_size
        )
    best, winner = first_largest(noisy, ids)
    top = tl.max(scaled, axis=0)
    at = row * blocks + block
    tl.store(floats + size * NOISY + at, best)
    tl.store(words + size * WINNERS + at, winner)
    tl.store(floats + size * TOPS + at, tl.where(broken == 1, float("nan"), top))
    mass = tl.sum(tl.exp(scaled - tl.where(top == -INFINITY, 0.0, top)), axis=0)
    tl.store(floats + size * MASSES + at, mass)


@triton.jit(do_not_specialize=["size"])
def weigh(
    logits,
    token_ids,
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
    BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
    CAP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One block of one row, for the winner and for the guess at the next: see :func:`_weigh_round`.

    Nothing is written where nothing can touch the winner: it is the likeliest, or no filter is on.
    """
    wait_turn(CHAINED)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, k, p = tl.load(temperature + row), tl.load(top_ks + row), tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    by_k, by_p = (k > 0) & (k < vocab_size), p < 1.0
    if (heat >= COLDEST) & (by_k | by_p | (min_p > 0.0)):
        of_blocks, top, broken = tops_of(floats, size, row, blocks, MERGE)
        start = logits + row * vocab_size
        pivot = tl.div_rn(tl.load(start + winner_of(floats, words, size, row, blocks, 0, MERGE)), heat)
        if (pivot < top) & (broken == 0):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            scaled = tl.div_rn(tl.load(start + ids, ids < vocab_size, -INFINITY), heat)
            above, weight = scaled > pivot, tl.exp(scaled - top)
            at = row * blocks + block
            if by_k:
                tl.store(floats + size * ABOVE + at, tl.sum(tl.where(above, weight, 0.0), axis=0))
                tl.store(words + size * COUNTS + at, tl.sum(above.to(tl.int32), axis=0))
                kept = above
                if by_p | (k <= blocks):
                    kept = (scaled >= kth_largest(of_blocks, k)) & (scaled > -INFINITY)
                place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
                tl.store(words + size * LIST + at * CAP + place, ids, kept & (place < CAP))
                tl.store(words + size * LISTED + at, tl.sum(kept.to(tl.int32), axis=0))
            else:
                key = noise_key(tl.load(seeds + row), tl.load(positions + row))
                noisy = tl.where(weight >= min_p, scaled + gumbel_at(key, ids, token_ids, vocab_size), -INFINITY)
                _weigh_round(floats, words, size, at, ids, above, weight, noisy, 0)
                guess = guess_of(start, floats, words, size, row, blocks, pivot, top, heat, min_p, MERGE)
                if guess != NO_TOKEN:
                    above = scaled > tl.div_rn(tl.load(start + guess), heat)
                    _weigh_round(floats, words, size, at, ids, above, weight, noisy, 1)


@triton.jit
def _weigh_round(floats, words, size, at, ids, above, weight, noisy, ROUND: tl.constexpr):
    """Mass of a block's tokens likelier than the round's winner, and the next winner among them."""
    tl.store(floats + size * (ABOVE + 2 * ROUND) + at, tl.sum(tl.where(above, weight, 0.0), axis=0))
    best, winner = first_largest(tl.where(above, noisy, -INFINITY), ids)
    tl.store(floats + size * (NOISY + 2 * ROUND + 2) + at, best)
    tl.store(words + size * (WINNERS + ROUND + 1) + at, winner)


def sample_rows(logits: Tensor, sampling: RowSampling, token_ids: Tensor | None = None) -> Tensor:
    """As :func:`foresay.verifier.ops.sample.sample_rows`."""
    rows, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, "fp32 rows, one behind the other"
    assert logits.data_ptr() % 16 == 0, "other alignments are compiled otherwise, and may sum in another order"
    block = block_of(vocab_size)
    blocks = triton.cdiv(vocab_size, block)
    size = triton.cdiv(rows * blocks, 4) * 4
    floats = logits.new_empty(FLOATS, size)
    words = logits.new_empty(WORDS + CAP, size, dtype=torch.int32)
    sampled = logits.new_empty(rows, dtype=torch.int64)
    if rows:
        s, sizes = sampling, (size, vocab_size, blocks)
        noise = (s.seeds, s.positions)
        asked = (logits, token_ids, s.temperature, s.top_k, s.top_p, s.min_p, *noise)
        scan[(rows, blocks)](logits, token_ids, s.temperature, *noise, floats, words, *sizes, block, **chained())
        weigh[(rows, blocks)](*asked, floats, words, *sizes, block, MERGE, CAP, num_warps=WEIGH_WARPS, **chained())
        settle[(rows,)](*asked, floats, words, sampled, *sizes, MERGE, TILE, CAP, num_warps=SETTLE_WARPS, **chained())
    return sampled
