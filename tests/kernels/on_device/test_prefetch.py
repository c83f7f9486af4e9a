"""What products ask for ahead: the first blocks of each program's weight and of the next product's, nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.kernels import blocked, linear, tile
from foresay.verifier.ops.kernels.blocked import BlockedWeight

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU does not say what it fetched"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
LINE = 128


class Asked:
    """Bytes that were asked for, in place of the instructions that ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.bulk = self.lines = 0
        monkeypatch.setattr(tile, "bring", self.bring)
        monkeypatch.setattr(tile, "bring_bytes", self.bring_bytes)
        monkeypatch.setattr(linear, "can_prefetch", lambda: True)
        monkeypatch.setattr(linear, "chained", lambda: {"CHAINED": True, "launch_pdl": False})
        monkeypatch.setattr(linear, "wait_turn", lambda chained: None)

    def bring(self, pointers: Any) -> None:
        starts = pointers.handle.data.ravel().astype(np.int64) // LINE * LINE
        self.ranges += [(start, start + LINE) for start in starts.tolist()]
        self.lines += len(starts)

    def bring_bytes(self, pointers: Any, size: Any) -> None:
        starts, count = pointers.handle.data.ravel().astype(np.int64), int(size.handle.data.item())
        assert count > 0 and count % 16 == 0 and not (starts % 16).any(), "as the instruction wants it"
        self.ranges += [(start, start + count) for start in starts.tolist()]
        self.bulk += len(starts)

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


@pytest.mark.parametrize(("rows", "bulk", "gated"), [(1, True, True), (1, False, False), (20, True, False)])
def test_it_is_the_beginning_of_each_program(rows, bulk, gated, monkeypatch) -> None:
    monkeypatch.setattr(linear, "BULK", bulk)
    monkeypatch.setattr(linear, "AHEAD", 2)
    weight = BlockedWeight.of(placed(140, 1088), gated="silu" if gated else "")
    assert weight.cut[0] > 1
    x = torch.randn(rows, 1088).half()
    without = linear.whole(x, weight, torch.float16)
    asked = Asked(monkeypatch)
    assert torch.equal(linear.whole(x, weight, torch.float16), without), "it changes no bit"
    assert torch.equal(asked.of(weight.values), first_blocks(weight, 2))
    assert (asked.bulk > 0, asked.lines > 0) == (bulk, not bulk)
    ends = weight.values.data_ptr(), weight.values.data_ptr() + weight.values.nbytes
    assert all(ends[0] <= begin and end <= ends[1] for begin, end in asked.ranges), "nothing else"


def test_rows_that_begin_anywhere_are_asked_for_by_line(monkeypatch) -> None:
    asked = Asked(monkeypatch)
    linear.linear(torch.randn(1, 1100).half(), placed(70, 1100))
    assert asked.lines and not asked.bulk


@pytest.mark.parametrize(
    ("rows", "segments", "room"), [(1, True, 0), (1, False, 0), (1, False, 1 << 20), (20, False, 0)]
)
def test_that_of_the_next_product_is_dealt_out_to_the_programs(rows, segments, room, monkeypatch) -> None:
    monkeypatch.setattr(linear, "L2_ROOM", room)
    monkeypatch.setattr(linear, "AHEAD_OF_OUTPUT", 0)
    monkeypatch.setattr(linear, "AHEAD_OF_NEXT", 3)
    if not segments:
        monkeypatch.setattr(blocked, "_PROGRAMS", 1)
    then = BlockedWeight.of(placed(400, 1088), gated="silu")
    assert (then.cut[0] > 1) == segments
    weight = replace(BlockedWeight.of(placed(70, 640)), then=then)
    x = torch.randn(rows, 640).half()
    without = linear.whole(x, weight, torch.float16)
    asked = Asked(monkeypatch)
    assert torch.equal(linear.whole(x, weight, torch.float16), without), "it changes no bit"
    assert torch.equal(asked.of(then.values), first_blocks(then, 3))
    monkeypatch.setattr(linear, "RESIDENT", 2)
    some = Asked(monkeypatch)
    linear.whole(x, weight, torch.float16)
    outputs = 2 * linear.tile_of(rows, True).outputs
    first = torch.arange(400) < outputs if segments else torch.arange(400) % 200 < outputs // 2
    wanted = first_blocks(then, 3) & first[:, None]
    wanted[:, then.cut[1] :] = False
    assert torch.equal(some.of(then.values), wanted), "only for the programs that there is room for"


def test_nothing_is_asked_for_where_that_is_off(monkeypatch) -> None:
    for name in ("AHEAD", "AHEAD_OF_OUTPUT", "AHEAD_OF_NEXT"):
        monkeypatch.setattr(linear, name, 0)
    weight = BlockedWeight.of(placed(70, 640))
    asked = Asked(monkeypatch)
    for one in (weight, replace(weight, then=weight)):
        linear.whole(torch.randn(1, 640).half(), one, torch.float16)
    assert not asked.ranges
