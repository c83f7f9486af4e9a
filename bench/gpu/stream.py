"""A kernel that only reads: what memory gives at best, which nothing that reads as much can beat."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def read_stream(data, sums, count, BLOCK: tl.constexpr):
    """Grid of any size: each program adds every so-many-th block of int32 and stores one sum for each lane."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(data + start + lane)
    tl.store(sums + tl.program_id(0) * BLOCK + lane, total)


class ReadStream:
    """Reads a buffer of int32, a whole number of blocks, with some number of programs."""

    def __init__(self, data: Tensor, programs: int, warps: int) -> None:
        assert data.dtype == torch.int32 and data.numel() % BLOCK == 0, "whole blocks of int32"
        self.data, self.programs, self.warps = data, programs, warps
        self.sums = data.new_empty(programs * BLOCK)

    def __call__(self) -> None:
        """One pass."""
        read_stream[(self.programs,)](self.data, self.sums, self.data.numel(), BLOCK, num_warps=self.warps)
