"""Products with weights of few bits compiled for GPUs that are not here, and the code they become."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foresay.verifier.ops.kernels import linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.quantized import E8M0, QuantizedMatrix
from foresay.verifier.ops.records import Gate
from tests.combinations import alternating, pairwise
from tests.kernels.compiling import Compiled, compile_launches
from tests.kernels.test_compiled_linear import instruction, products

META = torch.device("meta")
CAPABILITIES = (80, 89, 90)
#: What a program of sm_89 may have, in bytes.
SHARED = 99 << 10
#: Bits, numbers of a group (None: all of a row), whether zero is 0, floats.
KINDS = {
    "int8": (8, None, True, False),
    "int4": (4, 128, True, False),
    "int4 zeros": (4, 128, False, False),
    "int4 of 32": (4, 32, True, False),
    "fp8": (8, None, True, True),
    "fp8 blocks": (8, 128, True, True),
}


def weight_of(kind: str, outer: int, inner: int, gated: Gate) -> BlockedWeight:
    """Without numbers; with a bias."""
    if kind == "q4_k":
        matrix = QuantizedMatrix.empty(outer, inner, 4, 32, True, torch.int8, META).with_steps(256, minimums=True)
    elif kind == "mxfp4":
        matrix = QuantizedMatrix.empty(outer, inner, 4, 32, True, E8M0, META)
    else:
        bits, group, symmetric, floats = KINDS[kind]
        matrix = QuantizedMatrix.empty(outer, inner, bits, group or inner, symmetric, torch.bfloat16, META, floats)
    return BlockedWeight.pack(matrix, torch.empty(outer, dtype=torch.bfloat16, device=META), gated)


def compiled(
    kind: str, dtype: torch.dtype, folder: Path, capability: int, gated: Gate = "", rows: int = 8, outer: int = 28672
) -> dict[str, Compiled]:
    weight = weight_of(kind, outer, 4096, gated)
    x = torch.empty(rows, 4096, dtype=dtype, device=META)
    return compile_launches(lambda: linear.whole(x, weight, dtype), folder, capability)


@pytest.mark.parametrize(
    ("kind", "rows", "gated", "capability"),
    pairwise([*KINDS, "q4_k", "mxfp4"], [1, 64], ["", "silu", "gelu"], CAPABILITIES),
)
def test_halves_are_made_in_registers_and_multiplied_by_one_instruction(
    kind, rows, gated, capability, tmp_path
) -> None:
    (kernel,) = compiled(kind, torch.bfloat16, tmp_path, capability, gated, rows).values()
    assert products(kernel.ptx) == instruction(torch.bfloat16, rows, capability)
    assert kernel.stack == 0, "spills registers"
    assert kernel.shared <= SHARED
    assert "cp.async" in kernel.ptx, "the weight is fetched ahead"
    assert "cvt.rn.bf16x2.f32" in kernel.ptx, "two halves in one instruction"
    assert ".ftz" not in kernel.ptx, "denormals of e4m3 are numbers too"
    assert "cvt.rn.f32.s32" not in kernel.ptx and "cvt.rn.f32.s8" not in kernel.ptx, "slow where there are so many"


@pytest.mark.parametrize(("gated", "capability"), alternating(["", "relu2"], CAPABILITIES))
def test_of_fp16_too(gated, capability, tmp_path) -> None:
    (kernel,) = compiled("int4", torch.float16, tmp_path, capability, gated).values()
    assert products(kernel.ptx) == instruction(torch.float16, 8, capability)
    assert kernel.stack == 0
