"""Part f: where the time of a step goes: the host's phases, the gap between two steps on the GPU, the host's launches.

The gap is taken on the GPU's own clock: an event behind each captured step and one in front of the next. On a CPU,
where steps are called, it is what lies between two calls on the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import record
from bench.gpu.device import Device
from bench.gpu.engines import answers, ask
from bench.stats import percentile
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams
from foresay.verifier.graphs.capture import Replay
from foresay.verifier.graphs.runner import WholeRunner

#: What the profiler calls the host's launches, and its copies.
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
#: Kernels that are named, those that take longest.
MOST = 16
#: Leading steps of a text that do not count: its first ones are read in and joined.
FIRST = 2


@dataclass(slots=True)
class Marks:
    """Stands where a captured step is launched, and marks when it begins and ends."""

    device: Device
    launch: Replay
    begins: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)

    def __call__(self) -> None:
        """Launch it between two marks."""
        self.begins.append(self._mark())
        self.launch()
        self.ends.append(self._mark())

    def run(self, part: int) -> None:
        """A part of it, without marks."""
        self.launch.run(part)

    def _mark(self) -> Any:
        if not self.device.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def gaps(self) -> list[float]:
        """Seconds from the end of each step to the beginning of the next."""
        self.device.synchronize()
        pairs = list(zip(self.ends, self.begins[1:], strict=False))[FIRST:]
        if not self.device.cuda:
            return [begin - end for end, begin in pairs]
        return [end.elapsed_time(begin) / 1e3 for end, begin in pairs]


def marked(device: Device, engine: Engine) -> list[Marks]:
    """Put marks around every captured step of an engine. Raises TypeError for one that captures none."""
    if not isinstance(engine.runner, WholeRunner):
        raise TypeError("only captured steps have marks")
    found = []
    for bucket in engine.runner.buckets.values():
        for captured in (bucket.plain, bucket.drafting):
            if captured is not None:
                captured.launch = mark = Marks(device, captured.launch)
                found.append(mark)
    return found


def phases(engine: Engine, text: Sequence[int], tokens: int) -> dict[str, float]:
    """Median microseconds of a step on the host by phase, of one answer's steps behind the first few; p99 of all."""
    engine.add(ask(text, _greedy(tokens)))
    found: dict[str, list[float]] = {}
    steps = 0
    while engine.has_work:
        begun = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - begun
        if engine.trace is not None and (steps := steps + 1) > FIRST:
            for name, seconds in {**engine.trace.seconds, "whole": whole}.items():
                found.setdefault(name, []).append(seconds)
    return {name: 1e6 * median(taken) for name, taken in found.items()} | {
        "whole p99": 1e6 * percentile(found["whole"], 99)
    }


def gaps(device: Device, engine: Engine, text: Sequence[int], tokens: int) -> dict[str, float]:
    """Microseconds between captured steps, of one answer."""
    marks = marked(device, engine)
    answers(engine, [ask(text, _greedy(tokens))])
    found = [gap for mark in marks for gap in mark.gaps()]
    launches = sum(len(mark.begins) for mark in marks)
    for mark in marks:
        mark.begins.clear()
        mark.ends.clear()
    if not found:
        return {"launched": launches}
    return {"launched": launches, "p50_us": 1e6 * percentile(found, 50), "p99_us": 1e6 * percentile(found, 99)}


def launches(device: Device, engine: Engine, text: Sequence[int], tokens: int) -> dict[str, Any]:
    """Launches and copies by the host, and microseconds of the GPU, for each step of one answer, by torch's profiler;
    and the kernels that take most of them.

    Only on a GPU. The prompt's own steps are over before the profiler starts.
    """
    if not device.cuda:
        return {}
    engine.add(ask(text, _greedy(tokens)))
    for _ in range(FIRST):
        engine.step()
    before = engine.steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        for _ in range(16):
            engine.step()
        device.synchronize()
    steps = engine.steps - before
    while engine.has_work:
        engine.step()
    events = watched.key_averages()
    named = {event.key: event.count for event in events}
    busy = {event.key: event.self_device_time_total / steps for event in events if event.self_device_time_total}
    most = sorted(busy, key=lambda name: -busy[name])[:MOST]
    return {
        "steps": steps,
        "launches": sum(named.get(name, 0) for name in LAUNCHES) / steps,
        "copies": sum(named.get(name, 0) for name in COPIES) / steps,
        "gpu_us": sum(busy.values()),
        "kernels_us": {name[:80]: busy[name] for name in most},
    }


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def show(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Two tables: the host's phases, and what lies between steps."""
    names = sorted({phase for of in found.values() for phase in of["host_us"]})
    rows = [[name, *(of["host_us"].get(phase, 0.0) for phase in names)] for name, of in found.items()]
    record.table("the host's time of a step, us", ["decoding", *names], rows)
    columns = ["decoding", "gap p50 us", "gap p99 us", "launches", "copies", "GPU us"]
    between = [
        [name, *(of["gap"].get(key, "") for key in ("p50_us", "p99_us"))]
        + [of["profiled"].get(key, "") for key in ("launches", "copies", "gpu_us")]
        for name, of in found.items()
    ]
    record.table("between two steps", columns, between)
