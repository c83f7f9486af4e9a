"""The last tokens of every sequence, one program for each: how they move on, and what of them a pass runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.records import TextEnd


@triton.jit(do_not_specialize=["width", "nodes"])
def advance_rows(recent, lengths, ends, emitted, taken, width, nodes, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Token j becomes token ``j + taken`` of the recent ones with the emitted ones behind them."""
    wait_turn(CHAINED)
    sequence, lane = tl.program_id(0), tl.arange(0, BLOCK)
    inside, more = lane < width, tl.load(taken + sequence)
    place = lane + more
    old = tl.load(recent + sequence * width + place, inside & (place < width), 0)
    new = tl.load(emitted + sequence * nodes + place - width, inside & (place >= width), 0)
    length, end = tl.load(lengths + sequence) + more, tl.load(ends + sequence) + more
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(recent + sequence * width + lane, tl.maximum(tl.where(place < width, old, new), 0), inside)
    tl.store(lengths + sequence, length.to(tl.int32))
    tl.store(ends + sequence, end)


@triton.jit(do_not_specialize=["width", "count", "first"])
def end_rows(recent, lengths, tokens, begins, roots, width, count, first, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """The last ``count`` tokens of one text, as :func:`foresay.verifier.ops.recent.text_ends` has them."""
    wait_turn(CHAINED)
    sequence, lane = tl.program_id(0), tl.arange(0, BLOCK)
    length = tl.load(lengths + sequence)
    begin = tl.maximum(length - count + 1, first)
    root = tl.maximum(length - begin, 0)
    place = tl.minimum(lane + width - 1 - root, width - 1)
    tl.store(tokens + sequence * count + lane, tl.load(recent + sequence * width + place), lane < count)
    tl.store(begins + sequence, begin)
    tl.store(roots + sequence, (root + count * sequence).to(tl.int64))


def advance(recent: Tensor, lengths: Tensor, ends: Tensor, emitted: Tensor, taken: Tensor) -> None:
    """As :func:`foresay.verifier.ops.recent.advance`."""
    sequences, width = recent.shape
    whole = (recent, lengths, ends, emitted, taken)
    assert all(tensor.is_contiguous() for tensor in whole), "sequences lie one behind the other"
    if sequences:
        advance_rows[(sequences,)](*whole, width, emitted.shape[1], triton.next_power_of_2(width), **chained())


def text_ends(recent: Tensor, lengths: Tensor, count: int, first: int) -> TextEnd:
    """As :func:`foresay.verifier.ops.recent.text_ends`."""
    sequences, width = recent.shape
    assert recent.is_contiguous() and lengths.is_contiguous(), "sequences lie one behind the other"
    made = recent.new_empty(sequences, count), torch.empty_like(lengths), recent.new_empty(sequences)
    if sequences:
        sizes = (width, count, first, triton.next_power_of_2(count))
        end_rows[(sequences,)](recent, lengths, *made, *sizes, **chained())
    return TextEnd(*made)
