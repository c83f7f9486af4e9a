"""The last launch of a sample: what stands in each row, with one program per row."""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.spec.sample import BROKEN
from foresay.verifier.ops.kernels.chain import wait_turn
from foresay.verifier.ops.kernels.noise import noise_key
from foresay.verifier.ops.kernels.planes import (
    ABOVE,
    COLDEST,
    COUNTS,
    LIST,
    LISTED,
    divisor_of,
    guess_of,
    stands_of,
    sum_of,
    tops_of,
    total_of,
    winner_of,
)
from foresay.verifier.ops.kernels.search import INFINITY, least_of_top_k, search

_BROKEN = tl.constexpr(BROKEN)


@triton.jit(do_not_specialize=["size"])
def settle(
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
    sampled,
    size,
    vocab_size,
    blocks,
    MERGE: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One row: the first of the winners that stands, or what the search finds; ``BROKEN`` if the row is."""
    wait_turn(CHAINED)
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
    elif (heat >= COLDEST) & (by_k | by_p | (min_p > 0.0)) & (pivot < top):
        searching, whole, tiles = 1, 1, tl.cdiv(vocab_size, TILE)
        least, enough = tl.full((), -INFINITY, tl.float32), tl.full((), INFINITY, tl.float32)
        listed, likelier = words + size * LISTED + row * blocks, words + size * LIST + row * blocks * CAP
        if by_k:
            count = sum_of(words + size * COUNTS, row, blocks, MERGE)
            above = sum_of(floats + size * ABOVE, row, blocks, MERGE)
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
                guess = guess_of(start, floats, words, size, row, blocks, pivot, top, heat, min_p, MERGE)
                token = winner_of(floats, words, size, row, blocks, 1, MERGE)
                pivot = tl.div_rn(tl.load(start + token), heat)
                guessed = token == guess
                if (pivot == top) | (
                    guessed & stands_of(floats, pivot, top, enough, min_p, size, row, blocks, 1, MERGE)
                ):
                    searching = 0
                elif guessed:
                    token = winner_of(floats, words, size, row, blocks, 2, MERGE)
        if searching == 1:
            key = noise_key(tl.load(seeds + row), tl.load(positions + row))
            token = search(
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
                token,
                top,
                tiles,
                whole,
                vocab_size,
                blocks,
                TILE,
                CAP,
            )
    target = token.to(tl.int64)
    if token_ids is not None:
        target = tl.load(token_ids + token, token >= 0, _BROKEN)
    tl.store(sampled + row, target)
