"""The skinny linear compiled for GPUs that are not here, and the code it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.kernels import linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from tests.combinations import pairwise
from tests.kernels.compiling import CAPABILITIES, compile_launches

INSTRUCTIONS = {
    80: "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32",
    90: "wgmma.mma_async.sync.aligned.m64n{1}k16.f32.{0}.{0}",
}
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def blank(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls(dtype: torch.dtype, rows: int) -> list[Callable[[], Tensor]]:
    """A layer's four products in an 8B model's shapes, the first and third with a bias too; and one of each head."""

    def of(*shape: int) -> Tensor:
        return blank(*shape, dtype=dtype)

    x, wide = of(rows, 4096), of(rows, 14336)
    return [
        lambda: linear.linear(x, of(128256, 4096), of(128256)),
        lambda: linear.linear(x, of(4096, 4096)),
        lambda: linear.gated_linear(x, of(28672, 4096), of(28672)),
        lambda: linear.linear(wide, of(4096, 14336)),
        lambda: linear.head_product(of(rows, 20 * 192), BlockedWeight.pack(of(20 * 512, 192)), dtype),
    ]


def instruction(dtype: torch.dtype, rows: int, capability: int) -> set[str]:
    """The one that a tile for so many rows is multiplied by."""
    tile = linear.tile_of(rows, large=True).rows
    return {INSTRUCTIONS[max(80, capability // 90 * 90)].format(NAMES[dtype], tile)}


def products(code: str) -> set[str]:
    return set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]+", code))


@pytest.mark.parametrize(("dtype", "capability", "rows"), pairwise([*NAMES], CAPABILITIES, [1, 17, 64]), ids=str)
def test_every_product_is_made_of_one_instruction(dtype, capability, rows, tmp_path) -> None:
    """Whatever the tile: so a row's sums are formed alike in each of them."""
    kinds = calls(dtype, rows)
    for call in kinds if dtype == torch.bfloat16 else kinds[1:2]:
        for name, kernel in compile_launches(call, tmp_path, capability).items():
            assert kernel.stack == 0, f"{name} spills registers"
            assert products(kernel.ptx) == (set() if name == "add_segments" else instruction(dtype, rows, capability))
            assert ("griddepcontrol.wait" in kernel.ptx) == (capability >= 90), "it waits for the kernel before it"
            if name != "add_segments":
                assert "cp.async.cg" in kernel.ptx, "the weight is fetched ahead"
            if name != "add_segments" and capability >= 90:
                threads = 32 * linear.tile_of(rows, large=True).warps
                assert 2 * threads * -(-kernel.registers // 8) * 8 <= 1 << 16, "two programs on a processor"
                assert 2 * (kernel.shared + 1024) <= 228 << 10


@pytest.mark.parametrize("rows", [128, 512], ids="{} rows".format)
@pytest.mark.parametrize("call", [1, 2], ids=["segments", "gated"])
def test_so_it_is_for_chunks_of_a_prompt(call, rows, tmp_path) -> None:
    """Of 512 rows a program adds up all segments."""
    kernel = compile_launches(calls(torch.bfloat16, rows)[call], tmp_path, 90)["linear_tiles"]
    assert products(kernel.ptx) == instruction(torch.bfloat16, rows, 90)
    assert kernel.stack == 0 and kernel.shared <= 227 << 10
    assert kernel.ptx.count("cp.async.cg") and "wgmma.wait_group.sync.aligned 1;" in kernel.ptx


def test_tiles_have_the_rows_that_there_are_and_at_most_128(tmp_path) -> None:
    """And what adds segments is the same for any number of them."""
    codes = []
    for rows in (1, 16, 17, 32, 33, 64, 65, 128):
        made = compile_launches(calls(torch.bfloat16, rows)[1], tmp_path, 90)
        codes.append((made["linear_tiles"].ptx, made["add_segments"].ptx))
    assert codes[::2] == codes[1::2] and len({each for each, _ in codes}) == 4
    assert len({each for _, each in codes}) == 1


def prefetched(folder: Path, capability: int = 90) -> list[int]:
    """How often code asks for memory before it waits and after."""
    weight, x = (blank(*shape, dtype=torch.bfloat16) for shape in ((4096, 4096), (1, 4096)))
    (code, *_) = compile_launches(
        lambda: linear.product(x, BlockedWeight.pack(weight), x.dtype), folder, capability
    ).values()
    return [part.count("prefetch.global.L2") for part in code.ptx.split("griddepcontrol.wait")]


def test_the_beginning_of_a_weight_is_prefetched_where_kernels_overlap(tmp_path, monkeypatch) -> None:
    assert prefetched(tmp_path) == [linear.AHEAD, 0]
    assert prefetched(tmp_path, 80) == [0], "nothing is there early enough"
    monkeypatch.setattr(linear, "AHEAD", 0)
    assert prefetched(tmp_path) == [0, 0]
