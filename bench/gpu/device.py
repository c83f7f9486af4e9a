"""The device a benchmark runs on, and its clock: events on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from foresay.verifier.graphs.capture import CudaGraphs, without_stops

Call = Callable[[], object]


class Device:
    """``cuda`` or ``cpu``. Making one touches no GPU: the process that forks workers must not."""

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

    def median(self, call: Call, patience: float) -> float:
        """Median seconds of a call, of many for about ``patience`` seconds altogether."""
        self.seconds(call, 3)  # loads modules, makes handles, raises clocks
        one = max(sum(self.seconds(call, 2)) / 2, 1e-7)
        return median(self.seconds(call, max(3, min(1000, int(patience / one)))))

    def seconds(self, call: Call, repeats: int) -> list[float]:
        """The seconds of each of many calls, from the end of the one before to its own end, gaps included."""
        if not self.cuda:
            marks = [time.perf_counter()]
            for _ in range(repeats):
                call()
                marks.append(time.perf_counter())
            return [end - begin for begin, end in pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        self.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        self.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]

    def captured(self, call: Call) -> Call:
        """The call as one graph launch, where there are graphs; each replay writes its result in place."""
        return CudaGraphs()(without_stops(call)) if self.cuda else call

    def free(self) -> None:
        """Release unused memory; graphs are in cycles. Raises if the GPU no longer responds."""
        if self.cuda:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
