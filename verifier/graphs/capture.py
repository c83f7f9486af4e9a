"""How repeated work is launched: replayed from a capture, or called directly.

Captured work may stop on its way: there the host reads intermediate results, and may change them, before it continues.
Also how an outcome is copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu.launch import recording

#: Runs of a step before it is captured: kernels are compiled and libraries create their handles.
_WARM_UP = 2

#: Work to be captured: it yields at the end of each part, and reads and writes static tensors.
Work = Callable[[], Iterator[object]]


class Replay(Protocol):
    """Launches captured work on the current stream. It owns all memory that its kernels use."""

    def __call__(self) -> None:
        """All of it."""
        ...

    def run(self, part: int, end: int | None = None) -> None:
        """The part between two stops; parts are run in order. end: run all parts before this one without a stop."""
        ...


#: Captures work, which meanwhile runs on batch slots that are only padding.
Capture = Callable[[Work], Replay]


def without_stops(step: Callable[[], object]) -> Work:
    """Work without stops, which yields what the step returns."""

    def work() -> Iterator[object]:
        yield step()

    return work


def recorded(work: Work) -> Replay:
    """A :data:`Capture` for a CPU, which runs nothing.

    It is recorded twice: so what is created on first use exists already, and is not created again by each replay.
    """
    for _ in range(2):
        with recording() as replay:
            for _ in work():
                replay.cut()
    return replay


class Eager:
    """A :data:`Capture` that captures nothing: the work is called directly."""

    def __init__(self, work: Work) -> None:
        self._work, self._going = work, work()

    def __call__(self) -> None:
        """From the beginning to the end."""
        for _ in self._work():
            pass

    def run(self, part: int, end: int | None = None) -> None:
        """Run to the next stop, or past those before ``end``."""
        if not part:
            self._going = self._work()
        for _ in range(part, end or part + 1):
            next(self._going, None)


class CudaGraphs:
    """A :data:`Capture`: a CUDA graph for each part. All share one memory pool, since no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Work) -> Replay:
        """Run it a few times, then capture it."""
        parts = 0
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP):
                parts = sum(1 for _ in work())
        torch.cuda.current_stream().wait_stream(self._stream)
        going, graphs, results = work(), [torch.cuda.CUDAGraph() for _ in range(parts)], []
        for graph in graphs:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                results.append(next(going))
        return CapturedGraphs(graphs, going, results)


@dataclass(frozen=True, slots=True)
class CapturedGraphs:
    """The graphs of some work, one for each part, with all memory that their kernels use: a graph only keeps addresses,
    whose memory may have been freed.

    work: the generator at its last stop, so that all its tensors stay allocated. results: what it yielded, which each
    replay overwrites.
    """

    graphs: list[torch.cuda.CUDAGraph]
    work: Iterator[object]
    results: list[object]

    def __call__(self) -> None:
        """All of them."""
        for graph in self.graphs:
            graph.replay()

    def run(self, part: int, end: int | None = None) -> None:
        """Run one of them, or all before ``end``."""
        for graph in self.graphs[part : end or part + 1]:
            graph.replay()


@dataclass(frozen=True, slots=True)
class Arrival:
    """An outcome being copied to the host. host: the destination. event: set when the copy is done; None: it already
    is."""

    host: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Wait for the outcome and return it."""
        if self.event is not None:
            self.event.synchronize()
        return self.host


def fetched(out: Tensor) -> Arrival:
    """Start to copy a step's outcome to the host, after the step itself."""
    if out.device.type != "cuda":
        return Arrival(out.cpu().clone(), None)
    # Pinned memory comes from torch's cache, which waits for the copy before it reuses a block.
    host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
    host.copy_(out, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Arrival(host, event)


def packed(parts: Sequence[Tensor]) -> Tensor:
    """uint8: all of them in one tensor, so that they reach the host in one copy."""
    return torch.cat([parts[index].flatten().view(torch.uint8) for index in _order(parts)])


def unpacked(whole: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that were packed. parts: of the same dtypes and shapes."""
    order = _order(parts)
    pieces = dict(zip(order, whole.split([parts[index].nbytes for index in order]), strict=True))
    return [pieces[index].view(part.dtype).view(part.shape) for index, part in enumerate(parts)]


def on_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the host: copied at once from a device; unchanged on a CPU."""
    return list(parts) if parts[0].device.type == "cpu" else unpacked(packed(parts).cpu(), parts)


def _order(parts: Sequence[Tensor]) -> list[int]:
    """Tensors with the widest numbers first, so that each is aligned to the size of its numbers."""
    return sorted(range(len(parts)), key=lambda index: -parts[index].itemsize)
