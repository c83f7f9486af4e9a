"""The last tokens of every sequence in one launch, one program per sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["width", "nodes"])
def gather_rows(recent, emitted, lengths, out, width, nodes, BLOCK: tl.constexpr):
    """Token j of the result is token ``j + length`` of the recent ones with the emitted ones behind them."""
    sequence, lane = tl.program_id(0), tl.arange(0, BLOCK)
    inside = lane < width
    place = lane + tl.load(lengths + sequence)
    old = tl.load(recent + sequence * width + place, inside & (place < width), 0)
    new = tl.load(emitted + sequence * nodes + place - width, inside & (place >= width), 0)
    tl.store(out + sequence * width + lane, tl.where(place < width, old, new), inside)


def gather_recent(recent: Tensor, emitted: Tensor, lengths: Tensor) -> Tensor:
    """As :func:`verifier.ops.recent.gather_recent`."""
    sequences, width = recent.shape
    assert all(t.is_contiguous() for t in (recent, emitted, lengths)), "sequences lie one behind the other"
    out = torch.empty_like(recent)
    if sequences:
        sizes = (width, emitted.shape[1], triton.next_power_of_2(width))
        gather_rows[(sequences,)](recent, emitted, lengths, out, *sizes)
    return out
