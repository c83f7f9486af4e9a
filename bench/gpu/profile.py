"""The parts of a step's time, kernel by kernel."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

from bench.drive import request
from bench.engines import PUBLISHED, texts
from bench.gpu.steps import bench_of
from bench.gpu.worker import Task
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import EngineCore
from foresay.spec.names import NONE
from foresay.verifier.ops.kernels import pdl

#: Steps that are profiled, after those in which the prompt is read and the sequence joins.
STEPS, FIRST = 16, 4
#: The profiler's names of the host's launches, and of its copies.
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
#: Name, beginning and end in microseconds.
Event = tuple[str, float, float]


def profile(task: Task) -> None:
    """Steps of the 8B through the engine: plain ones whose kernels do not overlap, since the time of an overlapping one
    counts from before its turn; plain ones as in a server; a chain of EAGLE-3's."""
    bench, longest = bench_of(task, "8B"), min(1024, task.settings.positions)
    chained = ",".join("1" * task.settings.levels[0])
    for name, tree, overlap in ((NONE, "", False), (NONE, "", pdl.PDL), (PUBLISHED, chained, pdl.PDL)):
        engine, made_with = (partial(bench.engine, name, tree, True, longest), {"drafter": name, "overlap": overlap})
        with patch.object(pdl, "PDL", overlap):
            task.take("GPU idle for a step", "us", watched, task, engine, name, model="8B", **made_with)


def engines(task: Task) -> None:
    """The bundled pair as in a server, where the host chooses or looks up in between, and without drafts."""
    for draft in ("auto", "suffix", NONE):
        config = EngineConfig(draft=draft, device=task.device.torch.type, max_model_len=512, kv_tokens=4096)
        engine = partial(build_engine, config)
        task.take("GPU idle for a step", "us", watched, task, engine, draft, model="bundled", drafter=draft)


def watched(task: Task, made: Callable[[], EngineCore], name: str) -> dict[str, Any]:
    """Some steps in the middle of an answer."""
    engine = made()
    engine.add(request(texts(1)[0], 300))
    while engine.steps < FIRST or any(sequence.pending for sequence in engine.scheduler.running):
        engine.step()
    host: list[dict[str, float]] = []
    kind = DeviceType.CUDA if task.device.cuda else DeviceType.CPU
    with profiled(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * task.device.cuda]) as found:
        for _ in range(STEPS):
            engine.step()
            host.append(dict(engine.trace.seconds) if engine.trace is not None else {})
        task.device.synchronize()
    events = list(found.events() or ())
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type == kind]
    ran = sorted(spans, key=lambda span: span[1])
    task.lines.write(task.name, "kernels in place", in_place(ran), "name, us, us of nothing before", drafter=name)
    named, (busy, idle, longest) = [event.name for event in events], waits(ran)
    return {
        "value": idle / STEPS, "busy_us": busy / STEPS, "longest_us": longest, "kernels": len(ran) / STEPS,
        "launches": sum(each in LAUNCHES for each in named) / STEPS,
        "copies": sum(each in COPIES for each in named) / STEPS,
        "host_us": {phase: 1e6 * median(one.get(phase, 0.0) for one in host) for phase in host[-1]},
    }  # fmt: skip


def waits(events: Sequence[Event]) -> tuple[float, float, float]:
    """Microseconds in which something ran, and in which nothing did between two events; the longest of these."""
    busy, idle, longest, end = 0.0, 0.0, 0.0, events[0][1] if events else 0.0
    for _, begun, ended in events:
        gap = max(0.0, begun - end)
        busy, idle, longest = (busy + max(0.0, ended - max(begun, end)), idle + gap, max(longest, gap))
        end = max(end, ended)
    return busy, idle, longest


def in_place(events: Sequence[Event]) -> list[list[Any]]:
    """Each kernel of a step in order: its name, its median time, how long nothing ran before it. If steps differ in
    what they launch, each kind of kernel, with its number, and its time in all of them."""
    count, names = len(events) // STEPS, [name[:60] for name, _, _ in events]
    if not count or names != names[:count] * STEPS:
        took, often = defaultdict[str, float](float), Counter(names)
        for name, (_, begin, end) in zip(names, events, strict=True):
            took[name] += end - begin
        return [[f"{often[kind]} x {kind}", took[kind], 0.0] for kind in often]
    places = [range(place, len(events), count) for place in range(count)]
    gaps = [[events[each][1] - events[each - 1][2] for each in mine if each] for mine in places]
    times = [[events[each][2] - events[each][1] for each in mine] for mine in places]
    return [[name, median(took), median(gap)] for name, took, gap in zip(names, times, gaps, strict=False)]
