"""The device a benchmark runs on, and how time is taken there: by events on a GPU, by the wall clock on a CPU."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from foresay.verifier.graphs.capture import CudaGraphs, without_stops

Call = Callable[[], object]

#: Calls before the first one that counts: modules are loaded, handles made, clocks raised.
WARM_CALLS = 3
#: What a CPU's caches hold, near enough; inputs are rotated over three times as much.
CPU_CACHE = 1 << 20


class NoGpu(RuntimeError):
    """There is no GPU that torch can use."""


class Device:
    """``cuda`` or ``cpu``: timing, capture and identity. Raises NoGpu where torch finds no GPU."""

    def __init__(self, kind: str) -> None:
        if kind == "cuda" and not torch.cuda.is_available():
            raise NoGpu(
                f"python -m bench.gpu needs an NVIDIA GPU, and torch {torch.__version__} finds none: run it on a "
                "machine that has one, or rehearse it with --device cpu --tiny"
            )
        self.torch = torch.device(kind)
        self.cuda = kind == "cuda"

    @property
    def name(self) -> str:
        """What the device is called."""
        return torch.cuda.get_device_name() if self.cuda else str(self.torch)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations: bf16 on a GPU, fp32 on a CPU, where sums are then easy to judge."""
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def cache_bytes(self) -> int:
        """How much of what was just read may still be in a cache."""
        return int(torch.cuda.get_device_properties(0).L2_cache_size) if self.cuda else CPU_CACHE

    def synchronize(self) -> None:
        """Wait until everything launched is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def sample(self, call: Call, patience: float, most: int = 1000, least: int = 3) -> list[float]:
        """Seconds of each of many calls, one behind the other, for about ``patience`` seconds altogether.

        A call's time is from the end of the one before to its own end, so gaps between calls count.
        """
        for _ in range(WARM_CALLS):
            call()
        one = max(sum(self.seconds(call, 2)) / 2, 1e-7)
        return self.seconds(call, max(least, min(most, int(patience / one))))

    def seconds(self, call: Call, repeats: int) -> list[float]:
        """Seconds of each of ``repeats`` calls, as :meth:`sample` takes them, without a warm-up."""
        return self._by_events(call, repeats) if self.cuda else _by_clock(call, repeats)

    def _by_events(self, call: Call, repeats: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        self.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        self.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]

    def captured(self, call: Call) -> Call:
        """The call as one graph launch, where there are graphs; what it returns is written in place by each replay."""
        if not self.cuda:
            return call
        return CudaGraphs()(without_stops(call))

    def held(self) -> int:
        """Bytes of the GPU's memory that are taken, by whomever; 0 on a CPU."""
        if not self.cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def free(self) -> None:
        """Give memory that nobody uses back to the device; graphs hang on cycles that have to be found first."""
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def identity(self) -> dict[str, Any]:
        """What the figures hold for: the device, its driver and memory, the versions that matter."""
        import triton

        found: dict[str, Any] = {"device": str(self.torch), "triton": triton.__version__, "cuda": torch.version.cuda}
        if self.cuda:
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "gpu": properties.name,
                "driver": driver(),
                "memory_gib": properties.total_memory / 2**30,
                "multiprocessors": properties.multi_processor_count,
                "l2_mib": properties.L2_cache_size / 2**20,
                "capability": f"{properties.major}.{properties.minor}",
            }
        return found


def driver() -> str:
    """The driver's version, by nvidia-smi; "unknown" where that does not answer."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.splitlines()[0].strip() if said.strip() else "unknown"


def _by_clock(call: Call, repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found
