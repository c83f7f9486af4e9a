"""The machine's GPU, whether kernels may overlap on it (programmatic dependent launch), and its memory bandwidth.

Each check of the smoke test copies numbers back and forth, every launch reading what the one before it wrote: a kernel
that begins to read too early leaves a wrong sum.
"""

from __future__ import annotations

import ctypes
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

from bench.gpu.worker import CHECK, Task
from foresay.verifier.ops.kernels.pdl import gdc_wait

#: Pairs of launches of a chain; numbers that a program copies, or reads at once; how often each chain is run.
PAIRS, BLOCK, ROUNDS = 100, 8192, 20


def card(task: Task) -> None:
    """Write what the figures are valid for. Raises RuntimeError without a GPU."""
    found = {module.__name__: module.__version__ for module in (torch, triton, transformers)}
    found |= {"python": platform.python_version(), "cores": str(os.cpu_count())}
    if not task.device.cuda:
        task.lines.write(task.name, "device", task.lines.card, **found)
        return
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no NVIDIA GPU; --rehearse does without one")
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        found["driver"] = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    torch.zeros(1, device="cuda")
    has = torch.cuda.get_device_properties(0)
    task.lines.card, capability, gib = has.name, (has.major, has.minor), has.total_memory / 2**30
    found |= {"gib": f"{gib:.1f}", "processors": str(has.multi_processor_count), "l2": str(has.L2_cache_size)}
    task.lines.write(task.name, "device", has.name, capability=capability, **found)


@triton.jit
def next_of(source, target, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):
    """target = source + 1, of int32. Grid (numbers / BLOCK,). It begins as every kernel of ours."""
    gdc_wait(USE_GDC)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lane, tl.load(source + lane) + 1)


class Chain:
    """Kernels that each add 1 to what the one before wrote, twice as many as there are of "nothing", a "memcpy" or a
    "memset" between two of them; on two arrays."""

    def __init__(self, task: Task, between: str, overlapping: bool, blocks: int = 1) -> None:
        self.device, self.between, self.overlapping = task.device, between, overlapping
        self.one, self.other = torch.zeros(2, blocks * BLOCK, dtype=torch.int32, device=task.device.torch)

    def __call__(self) -> None:
        """Run all of them; an even number of copies, so that the numbers are in the first array again."""
        for _ in range(PAIRS):
            if self.between == "memset":
                self._cleared()
            if self.between == "memcpy":
                self._moved(self.other.copy_, self.one)
            for _ in range(2):
                self._moved(self._kernel, self.one, self.other)

    def _moved(self, move: Callable[..., object], *given: Tensor) -> None:
        move(*given)
        self.one, self.other = self.other, self.one

    def _cleared(self) -> None:
        if not self.device.cuda:
            self.one.zero_()
            return
        where, stream = ctypes.c_uint64(self.one.data_ptr()), torch.cuda.current_stream().cuda_stream
        size, none = ctypes.c_size_t(len(self.one)), ctypes.c_uint(0)  # torch's own zero_ is a kernel
        if status := ctypes.CDLL("libcuda.so.1").cuMemsetD32Async(where, none, size, ctypes.c_void_p(stream)):
            raise RuntimeError(f"cuMemsetD32Async returned {status}")

    def _kernel(self, source: Tensor, target: Tensor) -> None:
        if self.device.cuda:
            launch = next_of[(len(source) // BLOCK,)]
            launch(source, target, BLOCK, self.overlapping, num_warps=4, launch_pdl=self.overlapping)
        else:
            torch.add(source, 1, out=target)

    def holds(self, captured: bool) -> bool:
        """Whether every number is right after some rounds."""
        call = self.device.captured(self) if captured else self
        self.one.zero_()
        for _ in range(ROUNDS):
            call()
        self.device.synchronize()
        return bool((self.one == (2 if self.between == "memset" else 2 * PAIRS * ROUNDS)).all())


def smoke(task: Task) -> None:
    """Each kind in eager mode, and as graph after graph; kernels overlap from now on if all of them are right."""
    held = True
    for between in ("nothing", "memcpy", "memset"):
        for captured in (False, True):
            chain = Chain(task, between, True, 128 if task.device.cuda else 1)
            held &= bool(task.take("sums are right", CHECK, chain.holds, captured, between=between, graphs=captured))
    task.lines.write(task.name, "overlap", held)
    for overlapping in (False, True)[: 1 + held]:
        call = task.device.captured(Chain(task, "nothing", overlapping))
        task.take("launches in a graph", "s", task.device.median, call, 0.1, launches=2 * PAIRS, overlap=overlapping)


@triton.jit
def read_stream(data, sums, count, BLOCK: tl.constexpr):
    """Grid of any size: each program adds every so-many-th block of int32 and stores one sum for each lane."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(data + start + lane)
    tl.store(sums + tl.program_id(0) * BLOCK + lane, total)


def bandwidth(task: Task) -> None:
    """Bytes per second of a pass that only reads: the fastest way of it sets every floor, the strictest choice. The
    buffer is random numbers (pages never written to come from the cache), many times the L2."""
    size, where = task.settings.probe_bytes // 4, task.device.torch
    buffer = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, device=where)

    def rate(call: Callable[[], object]) -> float:
        return float(buffer.nbytes / task.device.median(call, 0.2))

    readers: dict[str, Callable[[], object]] = {"max": buffer.view(torch.float32).max, "sum": buffer.sum}
    if task.device.cuda:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        for programs, warps in ((processors, 8), (2 * processors, 8), (4 * processors, 4)):
            sums = buffer.new_empty(programs * BLOCK)
            launch = partial(read_stream[(programs,)], buffer, sums, size, BLOCK, num_warps=warps)
            readers[f"stream of {programs} x {warps} warps"] = launch
    found = {way: task.take("reads", "B/s", rate, call, way=way) or 0.0 for way, call in readers.items()}
    best = max(found, key=lambda way: found[way])
    task.lines.write(task.name, "bandwidth", found[best], "B/s", way=best)
