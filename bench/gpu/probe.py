"""What the memory gives: bytes per second of a pass that only reads, and of a copy.

The buffer is written with random numbers first (pages never written to read from the cache) and is several times
larger than the L2. Of the ways to read it the fastest is the denominator of every floor: the hardest one to meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.gpu.device import Call, Device

PROBE_BYTES = 4 << 30
TINY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second. read: the fastest way of reading, which ``way`` names; copy: bytes read plus bytes written."""

    read: float
    way: str
    copy: float


def probe(device: Device, size: int, patience: float = 0.5) -> Bandwidth:
    """Median of many passes each; ``patience`` is the seconds spent on each way."""
    buffer = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device.torch)
    found = {way: median(device.sample(call, patience)) for way, call in readers(device, buffer)}
    best = min(found, key=lambda way: found[way])
    half = len(buffer) // 2
    source, destination = buffer[:half], buffer[half : 2 * half]
    copied = median(device.sample(lambda: destination.copy_(source), patience))
    return Bandwidth(buffer.nbytes / found[best], best, 2 * source.nbytes / copied)


def readers(device: Device, buffer: Tensor) -> Iterator[tuple[str, Call]]:
    """Ways of reading the buffer once."""
    yield "max", buffer.view(torch.float32).max
    yield "sum", buffer.sum
    if device.cuda:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        for programs, warps in ((1, 8), (2, 8), (4, 4), (8, 4)):
            yield f"stream of {programs} x {warps} warps", ReadStream(buffer, programs * processors, warps)


#: Numbers that a program of the kernel below reads at once.
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
