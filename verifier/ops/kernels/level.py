"""Whether trees grow by another level, in one launch: one program for each tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.records import Prices


@triton.jit
def brought(scores, rows, place, most):
    """What the likeliest nodes bring beyond the price of their rows, of as many as bring most. scores: best first."""
    left = tl.cumsum(tl.exp(scores), 0) - tl.load(rows + 1 + place, place < most, float("inf"))
    return tl.maximum(tl.max(left, 0), 0.0)


@triton.jit(do_not_specialize=["most", "width", "wide", "ranks"])
def weigh_levels(best, kept, front, levels, rows, usual, there, going, most, width, wide, ranks, ALL: tl.constexpr,
                 FRONT: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (S,). A row holds the best so far, the level, and what may come below its front."""
    wait_turn(CHAINED)
    sequence, place, nothing = tl.program_id(0), tl.arange(0, ALL), float("-inf")
    of_level, below = place - most, place - most - width
    old = tl.load(best + sequence * most + place, place < most, nothing)
    new = tl.load(kept + sequence * width + of_level, (of_level >= 0) & (below < 0), nothing)
    known = tl.where(place < most, old, new)
    likeliest = tl.sort(known, descending=True)
    tl.store(there + sequence * most + place, likeliest, place < most)
    inside = (below >= 0) & (below < wide * ranks)
    above = tl.load(front + sequence * wide + below // ranks, inside, nothing)
    coming = above + tl.load(usual + sequence * ranks + below % ranks, inside, 0.0)
    prices = rows + sequence * (most + 1)
    before = brought(likeliest, prices, place, most)
    after = brought(tl.sort(tl.where(inside, coming, known), descending=True), prices, place, most)
    goes = (after > 0.0) & (after - before >= tl.load(levels + sequence))
    lane = tl.arange(0, FRONT)
    scores = tl.load(front + sequence * wide + lane, lane < wide, nothing)
    tl.store(going + sequence * wide + lane, tl.where(goes, scores, nothing), lane < wide)


def worth_another(best: Tensor, kept: Tensor, front: Tensor, prices: Prices) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.level.worth_another`."""
    whole, there, going = (best, kept, front, *prices), torch.empty_like(best), torch.empty_like(front)
    assert all(tensor.is_contiguous() for tensor in whole), "trees lie one behind the other"
    (sequences, most), width, wide, ranks = best.shape, kept.shape[1], front.shape[1], prices.usual.shape[1]
    if sequences:
        blocks = triton.next_power_of_2(most + width + wide * ranks), triton.next_power_of_2(wide)
        weigh_levels[(sequences,)](*whole, there, going, most, width, wide, ranks, *blocks, **chained())
    return there, going
