"""The device a benchmark runs on, and how time is taken there: by events on a GPU, by the wall clock on a CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from foresay.verifier.graphs.capture import CudaGraphs, without_stops

Call = Callable[[], object]

#: Calls before the first one that counts: modules are loaded, handles made, clocks raised.
WARM_CALLS = 3


class Device:
    """``cuda`` or ``cpu``: timing and capture. Making one touches no GPU: the process that forks workers must not."""

    def __init__(self, kind: str) -> None:
        self.torch, self.cuda = torch.device(kind), kind == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations: bf16 on a GPU, fp32 on a CPU, where sums are then easy to judge."""
        return torch.bfloat16 if self.cuda else torch.float32

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

    def median(self, call: Call, patience: float) -> float:
        """Median seconds of a call."""
        return median(self.sample(call, patience))

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
        return CudaGraphs()(without_stops(call)) if self.cuda else call

    def free(self) -> None:
        """Give memory that nobody uses back to the device; graphs hang on cycles that have to be found first. Raises
        where the GPU answers no more."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _by_clock(call: Call, repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found
