"""What the launches of a sample hand on from block to row: a number or a list per row and block, and how they are
merged.

Planes of ``size`` numbers, and each round has its own. ``size`` follows from the number of rows, so nothing is compiled
by its value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foresay.verifier.ops import records
from foresay.verifier.ops.kernels.search import INFINITY, NO_TOKEN, first_largest

#: Below this temperature the sample is greedy.
COLDEST = tl.constexpr(records.COLDEST)
#: Blocks of one row that are merged at once, and tokens listed per block.
MERGE, CAP = 256, 32
#: Winners that are weighed by the whole grid, the second by a guess, before one program goes on alone.
ROUNDS = 2

TOPS, MASSES, NOISY, ABOVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
LISTED, COUNTS, WINNERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FLOATS, WORDS = 3 + 2 * ROUNDS, 3 + ROUNDS
LIST = tl.constexpr(WORDS)


def block_of(vocab_size: int) -> int:
    """Tokens of a block: by the vocabulary alone, so that sums are formed alike however many rows there are."""
    return 1024 if vocab_size <= 1024 * MERGE else triton.cdiv(triton.next_power_of_2(vocab_size), MERGE)


@triton.jit
def divisor_of(temperature):
    """What the logits are divided by: 1 where the sample is greedy."""
    return tl.where(temperature < COLDEST, 1.0, temperature)


@triton.jit
def tops_of(floats, size, row, blocks, MERGE: tl.constexpr):
    """The largest scaled logit of each block and of the row, and whether the row is broken."""
    at = tl.arange(0, MERGE)
    of_blocks = tl.load(floats + size * TOPS + row * blocks + at, at < blocks, -INFINITY)
    broken = tl.max((of_blocks != of_blocks).to(tl.int32), axis=0) == 1
    of_blocks = tl.where(of_blocks != of_blocks, -INFINITY, of_blocks)
    return of_blocks, tl.max(of_blocks, axis=0), broken


@triton.jit
def winner_of(floats, words, size, row, blocks, ROUND: tl.constexpr, MERGE: tl.constexpr):
    """The winner of a round: the lowest id of the largest noisy logit."""
    at, inside = row * blocks + tl.arange(0, MERGE), tl.arange(0, MERGE) < blocks
    noisy = tl.load(floats + size * (NOISY + 2 * ROUND) + at, inside, -INFINITY)
    _, winner = first_largest(noisy, tl.load(words + size * (WINNERS + ROUND) + at, inside, NO_TOKEN))
    return winner


@triton.jit
def guess_of(start, floats, words, size, row, blocks, pivot, top, heat, min_p, MERGE: tl.constexpr):
    """The next winner, if it is the winner of its block among all tokens; ``NO_TOKEN`` if no likelier one is."""
    at, inside = row * blocks + tl.arange(0, MERGE), tl.arange(0, MERGE) < blocks
    winners = tl.load(words + size * WINNERS + at, inside, NO_TOKEN)
    scaled = tl.div_rn(tl.load(start + winners, inside, -INFINITY), heat)
    possible = inside & (scaled > pivot) & (tl.exp(scaled - top) >= min_p)
    noisy = tl.where(possible, tl.load(floats + size * NOISY + at, inside, -INFINITY), -INFINITY)
    best, guess = first_largest(noisy, winners)
    return tl.where(best == -INFINITY, NO_TOKEN, guess)


@triton.jit
def sum_of(plane, row, blocks, MERGE: tl.constexpr):
    """The sum of one plane's numbers of a row."""
    at = tl.arange(0, MERGE)
    return tl.sum(tl.load(plane + row * blocks + at, at < blocks, 0), axis=0)


@triton.jit
def total_of(floats, of_blocks, top, size, row, blocks, MERGE: tl.constexpr):
    """The mass of the whole row, the likeliest token's being 1."""
    at = tl.arange(0, MERGE)
    masses = tl.load(floats + size * MASSES + row * blocks + at, at < blocks, 0.0)
    return tl.sum(masses * tl.exp(of_blocks - top), axis=0)


@triton.jit
def stands_of(floats, pivot, top, enough, min_p, size, row, blocks, ROUND: tl.constexpr, MERGE: tl.constexpr):
    """Whether the winner of a round passes top-p and min-p. pivot: its scaled logit. enough: p times the row's mass."""
    above = sum_of(floats + size * (ABOVE + 2 * ROUND), row, blocks, MERGE)
    return (tl.exp(pivot - top) >= min_p) & (above < enough)
