"""The skinny linear compiled for GPUs that are not here, and the code it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.compiling import CAPABILITIES, Compiled
from tests.kernels.launches import compile_launches
from verifier.ops.kernels import linear

INSTRUCTION = {
    80: "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32",
    90: "wgmma.mma_async.sync.aligned.m64n64k16.f32.{0}.{0}",
}
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def blank(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls(dtype: torch.dtype, rows: int) -> list[Callable[[], Tensor]]:
    """A layer's four products in an 8B model's shapes; the first and third have a bias too."""

    def of(*shape: int) -> Tensor:
        return blank(*shape, dtype=dtype)

    x, wide, stream = of(rows, 4096), of(rows, 14336), of(rows, 4096)
    return [
        lambda: linear.linear(x, of(128256, 4096), of(128256)),
        lambda: linear.linear(x, of(4096, 4096), None, stream),
        lambda: linear.gated_linear(x, of(28672, 4096), of(28672)),
        lambda: linear.linear(wide, of(4096, 14336), None, stream),
    ]


def compiled(call: Callable[[], Tensor], folder: Path, capability: int) -> dict[str, Compiled]:
    return compile_launches(linear, ("linear_tiles", "gated_tiles", "add_segments"), call, folder, capability)


def products(code: str) -> set[str]:
    return set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]+", code))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_every_product_is_made_of_one_instruction(dtype, capability, tmp_path) -> None:
    kinds = calls(dtype, rows=8)
    for call in kinds if dtype == torch.bfloat16 else kinds[1:2]:
        for name, kernel in compiled(call, tmp_path, capability).items():
            assert kernel.stack == 0, f"{name} spills registers"
            used = products(kernel.ptx)
            assert used == (set() if name == "add_segments" else {INSTRUCTION[capability].format(NAMES[dtype])})
            if name != "add_segments":
                assert "cp.async" in kernel.ptx, "the weight is fetched ahead"


def test_one_row_and_a_chunk_run_the_same_code(tmp_path) -> None:
    call = calls(torch.bfloat16, rows=1)[1], calls(torch.bfloat16, rows=64)[1], calls(torch.bfloat16, rows=512)[1]
    one, tree, chunk = (compiled(c, tmp_path, 90) for c in call)
    assert set(one) == {"linear_tiles", "add_segments"}
    for name in one:
        assert one[name].ptx == tree[name].ptx == chunk[name].ptx
