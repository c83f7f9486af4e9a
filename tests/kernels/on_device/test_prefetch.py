"""What products prefetch: the first blocks of each program's weight, nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.kernels import linear, tile
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from tests.kernels.on_device.conftest import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="a GPU does not say what it fetched"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
LINE = 128


class Prefetched:
    """Bytes that were requested, in place of the instructions that request them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        monkeypatch.setattr(tile, "prefetch_l2", self.bring)
        monkeypatch.setattr(linear, "pdl_args", lambda: {"USE_GDC": True, "launch_pdl": False})
        monkeypatch.setattr(linear, "gdc_wait", lambda chained: None)

    def bring(self, pointers: Any) -> None:
        starts = pointers.handle.data.ravel().astype(np.int64) // LINE * LINE
        self.ranges += [(start, start + LINE) for start in starts.tolist()]

    def of(self, weight: Tensor) -> Tensor:
        """bool[O, K]: which numbers of a weight these are."""
        there = torch.zeros(weight.numel(), dtype=torch.bool)
        for begin, end in self.ranges:
            first, last = ((at - weight.data_ptr()) // weight.itemsize for at in (begin, end))
            there[max(first, 0) : max(last, 0)] = True
        return there.view(weight.shape)


def placed(outer: int, inner: int) -> Tensor:
    """A weight that begins on a line."""
    room = torch.randn(outer * inner + LINE, generator=torch.Generator().manual_seed(1)).half()
    return room[-room.data_ptr() % LINE // 2 :][: outer * inner].view(outer, inner)


def first_blocks(weight: BlockedWeight, blocks: int) -> Tensor:
    """bool[O, K]: those of each segment."""
    wanted = torch.zeros(weight.outer, weight.inner, dtype=torch.bool)
    for begin in range(0, weight.inner, weight.cut[1]):
        wanted[:, begin : min(begin + weight.cut[1], begin + blocks * weight.block)] = True
    return wanted


@pytest.mark.parametrize(("rows", "gated"), [(1, True), (1, False), (20, False)])
def test_it_is_the_beginning_of_each_program(rows, gated, monkeypatch) -> None:
    monkeypatch.setattr(linear, "AHEAD", 2)
    weight = BlockedWeight.pack(placed(140, 1088), gated="silu" if gated else "")
    assert weight.cut[0] > 1
    x = torch.randn(rows, 1088).half()
    without = linear.whole(x, weight, torch.float16)
    prefetched = Prefetched(monkeypatch)
    assert torch.equal(linear.whole(x, weight, torch.float16), without), "it changes no bit"
    assert torch.equal(prefetched.of(weight.values), first_blocks(weight, 2))
    ends = weight.values.data_ptr(), weight.values.data_ptr() + weight.values.nbytes
    assert all(ends[0] <= begin and end <= ends[1] for begin, end in prefetched.ranges), "nothing else"


def test_nothing_is_prefetched_where_that_is_off(monkeypatch) -> None:
    monkeypatch.setattr(linear, "AHEAD", 0)
    prefetched = Prefetched(monkeypatch)
    linear.whole(torch.randn(1, 640).half(), BlockedWeight.pack(placed(70, 640)), torch.float16)
    assert not prefetched.ranges
