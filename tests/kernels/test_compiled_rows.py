"""The row kernels compile for the GPUs we name, in bf16, and no register spills."""

from __future__ import annotations

import pytest
import torch

from foresay.verifier.ops.kernels import rows
from foresay.verifier.ops.launch import row_of, warps
from foresay.verifier.ops.records import Norm, SplitKSums
from foresay.verifier.ops.rows import (
    embed,
    finish_logits,
    gate_heads,
    gate_inputs,
    layer_inputs,
    pair,
    put_rows,
    take_both,
)
from tests.combinations import alternating, pairwise
from tests.kernels.compiling import CAPABILITIES, Compiled, compile_kernel, compile_launches

for_both = pytest.mark.parametrize("capability", CAPABILITIES)


def bf16(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*bf16")


def fits(made: Compiled, registers: int) -> bool:
    """Whether nothing spills and so few registers are used that as many programs stay resident as were meant to."""
    return made.stack == 0 and made.registers <= registers


@pytest.mark.parametrize(
    ("shape", "centred", "capability"),
    pairwise([(576, 1.0), (4096, 1.0), (4096, 0.22), (8192, 0.0)], [False, True], CAPABILITIES),
    ids=str,
)
def test_norm(shape, centred, capability, tmp_path) -> None:
    """Plain, or a layer norm with a bias in fp32. Of rows that are added up three programs of 256 threads are resident:
    Triton 3.6.0 takes 72 registers where 3.7.1 takes 56."""
    width, share = shape
    arguments = bf16("x", "y", "bias", "weight", "shift", "scalar", "out") | {"apart": "i32", "eps": "fp32"}
    arguments |= ({"y": "*fp32"} if share else {}) | (dict.fromkeys(("weight", "shift"), "*fp32") if centred else {})
    read = {"SEGMENTS": 4 if share else 1, "BIAS": bool(share), "CHAINED": capability >= 90}
    how = {"SHARE": share, "SCALED": share == 0.22, "NORM": True, "SHIFTED": centred, "CENTRED": centred}
    constants = row_of(torch.empty(0, device="meta"), width) | how | read
    made = compile_kernel(rows.norm_rows, arguments, constants, tmp_path, capability, warps(width))
    assert fits(made, registers=120 if centred else 80 if share else 64)
    assert "rsqrt.approx" not in made.ptx, "the root is rounded as torch's"


@for_both
def test_what_a_pass_begins_with(capability, tmp_path) -> None:
    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def call() -> None:
        tokens = of(6, dtype=torch.int64)
        take_both.launch(of(64, 128), of(64, 128), tokens)
        put_rows.launch(of(64, 4096), tokens, of(6, 4096))
        embed.launch(of(64, 4096), tokens, Norm(of(4096), 1e-5))
        pair.launch(of(64, 4096), tokens, of(6, 4096), (of(4096), of(4096)), 1e-5, keep_normed=False)

    made = compile_launches(call, tmp_path, capability)
    assert set(made) == {"both_rows", "embedded_rows", "paired_rows", "put_rows"}
    assert all(fits(each, registers=64) for each in made.values())


@pytest.mark.parametrize(("cap", "capability"), alternating([None, 30.0], CAPABILITIES))
def test_finished_logits(cap, capability, tmp_path) -> None:
    given = torch.empty(6, 50_257, device="meta")
    made = compile_launches(lambda: finish_logits.launch(given, 0.5, cap), tmp_path, capability)
    assert fits(made["finish_rows"], registers=64) and ("ex2" in made["finish_rows"].ptx) == (cap is not None)


@pytest.mark.parametrize(("segments", "capability"), alternating([1, 3], CAPABILITIES))
def test_the_gate_of_heads(segments, capability, tmp_path) -> None:
    x, sums = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((6, 4096), (3, 6, 4096)))
    product = x if segments == 1 else SplitKSums(sums.float(), x[0])
    made = compile_launches(lambda: gate_heads.launch(x, product), tmp_path, capability)
    assert fits(made["gate_rows"], registers=64)


@pytest.mark.parametrize(
    ("shape", "segments", "capability"), pairwise([(35, 256), (3, 24)], [1, 3], CAPABILITIES), ids=str
)
def test_embeddings_of_layers(shape, segments, capability, tmp_path) -> None:
    """As wide as published models have them; and one for which a row does not fill its block."""
    layers, width = shape

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def product(width: int) -> torch.Tensor | SplitKSums:
        return of(6, width) if segments == 1 else SplitKSums(of(3, 6, width, dtype=torch.float32), None)

    def call() -> None:
        how, whole = Norm(of(width, dtype=torch.float32), 1e-6), layers * width
        table, tokens = of(64, whole), of(6, dtype=torch.int64)
        layer_inputs.launch(product(whole), torch.bfloat16, table, tokens, how, (0.02, 16.0))
        gate_inputs.launch(product(width), of(6, whole), 2)

    made = compile_launches(call, tmp_path, capability)
    assert set(made) == {"layer_input_rows", "gated_input_rows"}
    assert all(fits(each, registers=64) for each in made.values())


@pytest.mark.parametrize(
    ("heads", "kept", "capability"),
    pairwise(
        [
            (64, 32, "each"),
            (96, 64, "each"),
            (128, 64, "each"),
            *((256, 128, how) for how in ("each", "whole", "after")),
            (512, 256, "valued"),
            (256, 128, "alone"),
        ],
        ["bf16", "i8", "u8"],
        CAPABILITIES,
    ),
    ids=str,
)
def test_rotation_and_store(heads, kept, capability, tmp_path) -> None:
    """kept: what keys and values are stored as; u8: the bits of fp8. kind: how heads are normed;
    "valued": values too, which are the product of keys; "alone": of queries, without keys: nothing is
    stored."""
    dim, block, kind = heads
    arguments = bf16("bias", "cos", "signed_sin", "factor", "query_weight", "key_weight", "queries", "scales")
    arguments |= {"qkv": "*fp32", "apart": "i32", "slots": "*i64", "eps": "fp32"}
    arguments |= dict.fromkeys(("keys", "values"), f"*{kept}")
    constants = {"QUERIES": 32, "DIM": dim, "HALF": dim // 2, "BLOCK": block, "HEADS": 8, "NORM": True}
    constants |= {"ALIKE": kind == "valued", "VALUED": kind == "valued", "GROUPS": 0 if kind == "alone" else 8}
    constants |= {"WHOLE": kind == "whole", "AFTER": kind == "after", "FACTOR": kind != "each"}
    constants |= {"SEGMENTS": 3, "BIAS": True, "CHAINED": capability >= 90}
    largest = 0.0 if kind == "alone" else {"bf16": 0.0, "i8": 127.0, "u8": 448.0}[kept]
    if largest:
        arguments["scales"] = "*fp32"
    made = compile_kernel(rows.rotate_and_store_rows, arguments, constants | {"LARGEST": largest}, tmp_path, capability)
    assert fits(made, registers=128 if dim > 256 else 80 if largest and dim > 128 else 64)
