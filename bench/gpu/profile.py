"""Where the time of a step goes: every kernel in its place, how long the GPU waits for the host, what the host does."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

from bench.engines import PUBLISHED, request, texts
from bench.gpu.steps import bench_of
from bench.gpu.worker import Task
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import Engine
from foresay.spec.names import NONE

#: Steps that are watched, after those in which the prompt is read and the step joined.
STEPS, FIRST = 16, 4
#: What the profiler calls the host's launches, and its copies.
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")

#: Name, beginning and end in microseconds.
Event = tuple[str, float, float]


def profile(task: Task) -> None:
    """Steps of the 8B through the engine: plain, and a chain of EAGLE-3's."""
    bench, longest = bench_of(task, "8B"), min(1024, task.settings.positions)
    for name, tree in ((NONE, ""), (PUBLISHED, ",".join("1" * task.settings.levels[0]))):
        engine = bench.engine(name, tree, True, longest)
        task.take("GPU idle for a step", "us", watched, task, engine, name, model="8B", drafter=name)


def engines(task: Task) -> None:
    """The bundled pair as it is served, where the host chooses or looks up in between, and without drafts."""
    for draft in ("auto", "suffix", NONE):
        config = EngineConfig(draft=draft, device=task.device.torch.type, max_model_len=512, kv_tokens=4096)

        def built(config: EngineConfig = config, draft: str = draft) -> dict[str, Any]:
            return watched(task, build_engine(config), draft)

        task.take("GPU idle for a step", "us", built, model="bundled", drafter=draft)


def watched(task: Task, engine: Engine, name: str) -> dict[str, Any]:
    """Some steps in the middle of an answer."""
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
    ran = sorted(
        ((e.name, e.time_range.start, e.time_range.end) for e in events if e.device_type is kind), key=lambda e: e[1]
    )
    task.lines.write(task.name, "kernels in place", in_place(ran), "name, us, us of nothing before", drafter=name)
    named, (busy, idle, longest) = [event.name for event in events], waits(ran)
    return {
        "value": idle / STEPS, "busy_us": busy / STEPS, "longest_us": longest, "kernels": len(ran) / STEPS,
        "launches": sum(each in LAUNCHES for each in named) / STEPS,
        "copies": sum(each in COPIES for each in named) / STEPS,
        "host_us": {phase: 1e6 * median(one.get(phase, 0.0) for one in host) for phase in host[-1]},
    }  # fmt: skip


def waits(events: Sequence[Event]) -> tuple[float, float, float]:
    """Microseconds in which something ran, and in which nothing did between two of them; the longest of these."""
    busy, idle, longest, end = 0.0, 0.0, 0.0, events[0][1] if events else 0.0
    for _, begun, ended in events:
        gap = max(0.0, begun - end)
        busy, idle, longest = busy + max(0.0, ended - max(begun, end)), idle + gap, max(longest, gap)
        end = max(end, ended)
    return busy, idle, longest


def in_place(events: Sequence[Event]) -> list[list[Any]]:
    """Each kernel of a step in order: its name, its median time, how long nothing had run before it. Where steps differ
    in what they launch, each kind of kernel, with its number, and its time in all of them."""
    count, names = len(events) // STEPS, [name[:60] for name, _, _ in events]
    if not count or names != names[:count] * STEPS:
        took = {kind: sum(end - begin for name, begin, end in events if name[:60] == kind) for kind in names}
        return [[f"{names.count(kind)} x {kind}", seconds, 0.0] for kind, seconds in took.items()]
    places = [range(place, len(events), count) for place in range(count)]
    gaps = [[events[each][1] - events[each - 1][2] for each in mine if each] for mine in places]
    times = [[events[each][2] - events[each][1] for each in mine] for mine in places]
    return [[name, median(took), median(gap)] for name, took, gap in zip(names, times, gaps, strict=False)]
