"""What the memory gives: bytes per second of a pass that only reads, and of a copy.

The buffer is written with random numbers first (pages never written to read from the cache) and is several times
larger than the L2. Of the ways to read it the fastest is the denominator of every floor: the hardest one to meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
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
        from bench.gpu.stream import ReadStream

        processors = torch.cuda.get_device_properties(0).multi_processor_count
        for programs, warps in ((1, 8), (2, 8), (4, 4), (8, 4)):
            yield f"stream of {programs} x {warps} warps", ReadStream(buffer, programs * processors, warps)
