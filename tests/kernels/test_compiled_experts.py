"""The kernels of mixtures compile for the GPUs we name, at the sizes of real models, and no register spills."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.experts import mixed, route
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.kernels.experts import expert_linear, sort_rows
from foresay.verifier.ops.quantized import E8M0, QuantizedMatrix
from foresay.verifier.ops.records import Gate, Routing
from tests.combinations import pairwise
from tests.kernels.compiling import CAPABILITIES, compile_launches
from tests.kernels.test_compiled_linear import INSTRUCTIONS, products

#: Hidden width, that of an expert, and how rows find theirs: Qwen3's 30B-A3B, gpt-oss's 20B, and DeepSeek-V3's.
SHAPES: dict[str, tuple[int, int, Routing, Gate]] = {
    "Qwen3 30B": (2048, 768, Routing(128, 8), "silu"),
    "gpt-oss 20B": (2880, 2880, Routing(32, 4), "clamped"),
    "DeepSeek-V3": (7168, 2048, Routing(256, 8, sigmoid=True, groups=(8, 4), scale=2.5), "silu"),
}


def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("shape", "kind", "rows", "capability"), pairwise([*SHAPES], ["floats", "mxfp4"], [4, 2048], CAPABILITIES), ids=str
)
def test_every_product_is_made_of_one_instruction(shape, kind, rows, capability, tmp_path) -> None:
    """The dense products'."""
    hidden, inner, how, gated = SHAPES[shape]
    x, logits = of(rows, hidden, dtype=torch.bfloat16), of(rows, how.experts + 1)
    correction = of(how.experts) if how.sigmoid else None

    def weight(outer: int, inner: int, gated: Gate = "") -> BlockedWeight:
        if kind == "floats":
            return BlockedWeight.pack(of(outer, inner, dtype=torch.bfloat16), of(outer), gated, how.experts)
        matrix = QuantizedMatrix.empty(outer, inner, 4, 32, True, E8M0, torch.device("meta"))
        return BlockedWeight.pack(matrix, None, gated, how.experts)

    def call() -> None:
        chosen, weights = route.launch(
            logits, how, correction if how.sigmoid else None, None, of(rows, dtype=torch.int64)
        )
        same, where = sort_rows(x, chosen, how)
        made = expert_linear(same, weight(2 * how.experts * inner, hidden, gated), x.dtype, where)
        mixed.launch(of(rows * how.top_k, hidden), weights, where.positions, x.dtype, of(rows, hidden), logits)
        assert made.shape == (rows * how.top_k, inner)

    made = compile_launches(call, tmp_path, capability)
    assert set(made) == {"route_rows", "sort_pairs", "expert_tiles", "mix_rows"}
    assert all(one.stack == 0 for one in made.values())
    height = 16 if rows == 4 else 64
    assert products(made["expert_tiles"].ptx) == {INSTRUCTIONS[capability].format("bf16", height)}
    assert made["expert_tiles"].shared <= (227 if capability == 90 else 99) << 10
    assert "cp.async.c" in made["expert_tiles"].ptx, "weights are fetched ahead"
