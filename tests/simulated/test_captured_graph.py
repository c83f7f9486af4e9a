"""A captured graph owns what its kernels touch; stand-ins play torch's part, so this needs no GPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from bench.gpu.device import Device
from foresay.verifier.graphs.capture import CapturedGraphs, CudaGraphs, without_stops


class Step:
    """Holds a tensor that its kernels read, and gives away one that they write."""

    def __init__(self) -> None:
        self.read = torch.ones(3)

    def __call__(self) -> torch.Tensor:
        return self.read + 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """As much of ``torch.cuda`` as a capture takes."""
    stand_in = MagicMock()
    stand_in.stream.side_effect = stand_in.graph.side_effect = lambda *_, **__: nullcontext()
    for name in ("graph_pool_handle", "Stream", "current_stream", "stream", "graph", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    return stand_in


def of_the_server(step: Any) -> Any:
    return CudaGraphs()(without_stops(step))


def of_the_benchmark(step: Any) -> Any:
    device = Device("cpu")
    device.cuda = True
    return device.captured(step)


@pytest.mark.parametrize("capture", [of_the_server, of_the_benchmark])
def test_what_a_graph_reads_and_writes_lives_as_long_as_it(cuda, capture) -> None:
    step = Step()
    seen: list[weakref.ref[Any]] = [weakref.ref(step), weakref.ref(step.read)]
    graph = capture(step)
    assert isinstance(graph, CapturedGraphs)
    seen.append(weakref.ref(graph.results[0]))
    del step
    gc.collect()
    assert None not in [each() for each in seen]
    graph()
    cuda.CUDAGraph.return_value.replay.assert_called_once_with()
    del graph
    gc.collect()
    assert [each() for each in seen] == [None] * 3
