"""What GPU there is, whether kernels may overlap on it (programmatic dependent launch), and what its memory gives.

Each check of the smoke moves numbers through two arrays, every launch reading what the one before it wrote: a kernel that begins to
read too early leaves a wrong sum.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import transformers
import triton
import triton.language as tl
from torch import Tensor

from bench.gpu.worker import Task
from foresay.verifier.ops.kernels.chain import wait_turn

#: Launches of a chain; numbers that a program moves, or reads at once; how often each check is run.
CHAIN, BLOCK, ROUNDS = 200, 8192, 20


def card(task: Task) -> None:
    """What the figures hold for. Raises RuntimeError where there is no GPU."""
    found = {module.__name__: module.__version__ for module in (torch, triton, transformers)}
    found |= {"python": platform.python_version(), "cores": str(os.cpu_count())}
    if not task.device.cuda:
        task.lines.write(task.name, "device", task.lines.card, **found)
        return
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no NVIDIA GPU; --rehearse does without one")
    with suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        found["driver"] = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    torch.zeros(1, device="cuda")
    has = torch.cuda.get_device_properties(0)
    found |= {"gib": f"{has.total_memory / 2**30:.1f}", "processors": str(has.multi_processor_count)}
    task.lines.write(task.name, "device", has.name, l2=has.L2_cache_size, capability=(has.major, has.minor), **found)


@triton.jit
def next_of(source, target, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """target = source + 1, of int32. Grid (numbers / BLOCK,). It begins as every kernel of ours."""
    wait_turn(CHAINED)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lane, tl.load(source + lane) + 1)


class Arrays:
    """Two arrays between which numbers go to and fro. Each chain ends where it began."""

    def __init__(self, task: Task, overlapping: bool, blocks: int) -> None:
        self.device, self.overlapping = task.device, overlapping
        self.one, self.other = torch.zeros(2, blocks * BLOCK, dtype=torch.int32, device=task.device.torch)

    def kernel(self) -> None:
        """One launch, from the one to the other."""
        if self.device.cuda:
            grid, options = (len(self.one) // BLOCK,), {"num_warps": 4, "launch_pdl": self.overlapping}
            next_of[grid](self.one, self.other, BLOCK, self.overlapping, **options)
        else:
            torch.add(self.one, 1, out=self.other)
        self.one, self.other = self.other, self.one

    def kernels(self) -> None:
        """A kernel after a kernel."""
        for _ in range(CHAIN):
            self.kernel()

    def copied(self) -> None:
        """A kernel after a copy, and a copy after a kernel."""
        for _ in range(CHAIN // 4):
            self.kernel()
            self.other.copy_(self.one)
            self.kernel()

    def cleared(self) -> None:
        """A kernel after a memset, and a memset after a kernel."""
        for _ in range(CHAIN // 4):
            self.one.zero_()
            self.kernel()
            self.kernel()

    def are(self, wanted: int, call: Callable[[], object]) -> bool:
        """Whether every number is this after some rounds."""
        self.one.zero_()
        for _ in range(ROUNDS):
            call()
        self.device.synchronize()
        return bool((self.one == wanted).all())


#: What is run, and what every number is after all rounds.
CHECKS: tuple[tuple[str, Callable[[Arrays], None], int], ...] = (
    ("kernel to kernel", Arrays.kernels, ROUNDS * CHAIN),
    ("memcpy to kernel", Arrays.copied, ROUNDS * CHAIN // 2),
    ("memset to kernel", Arrays.cleared, 2),
)


def smoke(task: Task) -> None:
    """Each check op by op, and as graph after graph; kernels overlap from now on if all of them held."""
    blocks, held = 128 if task.device.cuda else 1, True
    for name, run, wanted in CHECKS:
        for how in ("op by op", "graph to graph"):
            arrays = Arrays(task, True, blocks)
            call = partial(run, arrays)

            def right(arrays: Arrays = arrays, call: Callable[[], object] = call, wanted: int = wanted) -> bool:
                return arrays.are(wanted, task.device.captured(call) if how == "graph to graph" else call)  # noqa: B023

            held = bool(task.take(name, "check", right, how=how)) and held
    task.lines.write(task.name, "overlap", held)
    for overlapping in (False, True)[: 1 + held]:
        call = Arrays(task, overlapping, 1).kernels
        task.take("launch in a graph", "s", lambda call=call: task.device.median(task.device.captured(call), 0.1) / CHAIN,
                  overlapping=overlapping)  # fmt: skip


# -- what memory gives -------------------------------------------------------------------------------------------------


@triton.jit
def read_stream(data, sums, count, BLOCK: tl.constexpr):
    """Grid of any size: each program adds every so-many-th block of int32 and stores one sum for each lane."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(data + start + lane)
    tl.store(sums + tl.program_id(0) * BLOCK + lane, total)


def bandwidth(task: Task) -> None:
    """Bytes per second of a pass that only reads: the fastest way of it is what every floor is made of, the hardest one
    to meet. The buffer is random numbers (pages never written to come from the cache), many times the L2."""
    size, where = task.settings.probe_bytes // 4, task.device.torch
    buffer = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, device=where)

    def rate(call: Callable[[], object]) -> float:
        return float(buffer.nbytes / task.device.median(call, 0.2))

    found = {way: task.take("reads", "B/s", rate, call, way=way) or 0.0 for way, call in _readers(task, buffer).items()}
    task.take("copies, read and written", "B/s", rate, partial(buffer[: size // 2].copy_, buffer[size // 2 :]))
    best = max(found, key=lambda way: found[way])
    task.lines.write(task.name, "bandwidth", found[best], "B/s", way=best)


def _readers(task: Task, buffer: Tensor) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {"max": buffer.view(torch.float32).max, "sum": buffer.sum}
    if task.device.cuda:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        for programs, warps in ((processors, 8), (2 * processors, 8), (4 * processors, 4)):
            sums = buffer.new_empty(programs * BLOCK)
            launch = partial(read_stream[(programs,)], buffer, sums, len(buffer), BLOCK, num_warps=warps)
            ways[f"stream of {programs} x {warps} warps"] = launch
    return ways
