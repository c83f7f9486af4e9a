"""How a step is launched: replayed from a captured graph, or called as it is; and how its outcome reaches the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verifier.ops.kernels.cpu.launch import recording

#: Runs of a step before it is captured: kernels are compiled and libraries make their handles.
_WARM_UP = 2


class Launcher(Protocol):
    """Launches one step on the current stream."""

    def __call__(self) -> None: ...


#: Makes a launcher of a step.
Capture = Callable[[Callable[[], None]], Launcher]


def direct(step: Callable[[], None]) -> Launcher:
    """Call it: with ``--no-graphs``."""
    return step


def recorded(step: Callable[[], None]) -> Launcher:
    """A :data:`Capture` for a CPU: run it on places that are only padding, then record it."""
    step()
    with recording() as replay:
        step()
    return replay


class CudaGraphs:
    """A :data:`Capture`: graphs that share one pool of memory, since no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, step: Callable[[], None]) -> Launcher:
        """Run it a few times on places that are only padding, then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        return graph.replay


@dataclass(frozen=True, slots=True)
class Arrival:
    """An outcome on its way to the host. host: where it arrives. event: when it has; None: it is there."""

    host: Tensor
    event: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The outcome, once it is there."""
        if self.event is not None:
            self.event.synchronize()
        return self.host


def fetched(out: Tensor) -> Arrival:
    """Start to copy a step's outcome to the host, behind the step itself."""
    if out.device.type != "cuda":
        return Arrival(out.cpu().clone(), None)
    # Pinned memory comes from torch's own cache, which waits for the copy before it gives a block out again.
    host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
    host.copy_(out, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Arrival(host, event)
