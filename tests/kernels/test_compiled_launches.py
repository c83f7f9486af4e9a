"""Kernels of rows, trees and recurrent layers compile for the GPUs we name, in bf16, and no register spills."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.states import NODES, LayerStates
from foresay.verifier.ops import records
from foresay.verifier.ops.kernels import rows, trees
from foresay.verifier.ops.kernels.recurrence import replay_paths
from foresay.verifier.ops.launch import row_of, warps
from foresay.verifier.ops.records import AttentionMetadata, DeltaWeights, Norm, Scan, SplitKSums, StateRows
from foresay.verifier.ops.recurrence import gated_delta, short_conv
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
from foresay.verifier.ops.sample import keep_children, worth_another
from foresay.verifier.ops.trees import accept_paths, advance, choose_tree, lay_out, report, rows_of_paths, text_ends
from tests.combinations import alternating, pairwise
from tests.kernels.compiling import CAPABILITIES, Compiled, compile_kernel, compile_launches

FP32, INT32, INT64 = torch.float32, torch.int32, torch.int64


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def product(width: int, segments: int) -> Tensor | SplitKSums:
    return of(6, width) if segments == 1 else SplitKSums(of(segments, 6, width, dtype=FP32), None)


def a_pass_begins() -> None:
    tokens = of(6, dtype=INT64)
    take_both.launch(of(64, 128), of(64, 128), tokens)
    put_rows.launch(of(64, 4096), tokens, of(6, 4096))
    embed.launch(of(64, 4096), tokens, Norm(of(4096), 1e-5))
    pair.launch(of(64, 4096), tokens, of(6, 4096), (of(4096), of(4096)), 1e-5, keep_normed=False)


def embeddings(layers: int, width: int, segments: int) -> None:
    """As wide as published models have them; and one for which a row does not fill its block."""
    how, whole = Norm(of(width, dtype=FP32), 1e-6), layers * width
    table, tokens = of(64, whole), of(6, dtype=INT64)
    layer_inputs.launch(product(whole, segments), torch.bfloat16, table, tokens, how, (0.02, 16.0))
    gate_inputs.launch(product(width, segments), of(6, whole), 2)


def accepted() -> None:
    each, counts = of(2, 60, dtype=INT64), of(2, dtype=INT64)
    found = accept_paths.launch(each, each, each, each, counts, each, of(2, dtype=INT32))
    report.launch(found, each, each, counts, each, of(2, 241, dtype=INT64), -2)


def chosen() -> None:
    counts = of(2, dtype=INT64)
    columns, scores, fixed = of(2, 238, dtype=INT64), of(2, 238, dtype=FP32), of(238, dtype=INT64)
    choose_tree.launch((counts, columns, columns, scores, fixed, fixed), counts, of(2, 32, dtype=FP32), counts)
    worth_another.launch(of(2, 4, dtype=FP32), of(2, 6, dtype=FP32))
    above = records.Above(of(2, 4, dtype=FP32), of(2, 4, dtype=INT64), of(4, dtype=INT64))
    pieces = records.Pieces(of(32, dtype=FP32), scores, scores, 28, -1000.0)
    keep_children.launch(of(2, 4, 8, dtype=INT64), of(2, 4, 8, dtype=FP32), above, of(32, dtype=INT64), pieces)


def texts() -> None:
    lengths, each, counts = of(2, dtype=INT32), of(2, 60, dtype=INT64), of(2, dtype=INT64)
    lay_out.launch(of(2, 64, dtype=INT32), 48, lengths, of(2, 60, dtype=INT32), each, lengths)
    known, ends, emitted = (of(2, width, dtype=INT64) for width in (100, 1, 6))
    advance.launch(known, lengths, ends, emitted, counts)
    text_ends.launch(known, lengths, 6, 1)
    rows_of_paths.launch(each, each, lengths, 5)


def rows_of(count: int, with_trees: bool) -> StateRows:
    ints = partial(of, dtype=INT32)
    words = of(count, dtype=INT64) if with_trees else None
    paged = AttentionMetadata(ints(2, 4), 16, ints(2), ints(3), words, None, ints(2) if with_trees else None)
    return StateRows(paged, ints(2, 3), ints(2, 2), ints(2))


#: Heads, keys and values of each, heads that share a key, parts that a scan normalises: Qwen3.5's 9B, and Granite 4's.
SHAPES = {"Qwen3.5 9B": (32, 128, 128, 2, 0), "Granite 4 H tiny": (48, 128, 64, 48, 1)}


def remembered(shape: tuple[int, int, int, int, int], with_trees: bool) -> None:
    (heads, dim, width, shared, parts), f = shape, partial(of, dtype=FP32)
    keys, values = heads // shared * dim, heads * width
    channels, nodes = 2 * keys + values, 2 * NODES
    states = f(2, 5, heads, width // 16, dim, 16), f(2, 5, 3, channels)
    whole = LayerStates(*states, f(2, nodes, keys + values + heads), f(2, nodes, channels))
    scan = Scan(f(channels), f(heads), parts) if parts else None
    weights = DeltaWeights(f(4, channels), f(heads), f(heads), f(values if scan else width), 1e-6, scan=scan)
    layer = LayerStates(*(part[0] for part in whole))
    mixed, rates = f(40, channels + values), f(40, heads if scan else 2 * heads)
    gated_delta.launch(mixed, rates, weights, layer, rows_of(40, with_trees), torch.bfloat16)
    ints, paths = of(2, dtype=INT32), of(2, 8, dtype=INT64)
    replay_paths(whole, of(2, 3, dtype=INT32), ints, of(2, dtype=INT64), paths, 16)


def convolved(with_trees: bool) -> None:
    f = partial(of, dtype=FP32)
    layer = LayerStates(f(5, 0, 0, 0, 16), f(5, 2, 2048), f(2 * NODES, 0), f(2 * NODES, 2048))
    short_conv.launch(f(40, 3 * 2048), f(3, 2048), layer, rows_of(40, with_trees), torch.bfloat16)


REMEMBERED = "convolve_rows remember_rows finish_rows replay_states replay_tails"
#: What is launched, the kernels that are, and how many registers each has at most.
LAUNCHES: dict[str, tuple[Callable[[], object], str, int]] = {
    "what a pass begins with": (a_pass_begins, "both_rows embedded_rows paired_rows put_rows", 64),
    "logits": (lambda: finish_logits.launch(of(6, 50_257, dtype=FP32), 0.5, None), "finish_rows", 64),
    "capped logits": (lambda: finish_logits.launch(of(6, 50_257, dtype=FP32), 0.5, 30.0), "finish_rows", 64),
    "gates": (lambda: gate_heads.launch(of(6, 4096), of(6, 4096)), "gate_rows", 64),
    "gates of segments": (lambda: gate_heads.launch(of(6, 4096), product(4096, 3)), "gate_rows", 64),
    **{
        f"embeddings of {layers} layers, {segments}": (
            partial(embeddings, layers, width, segments), "layer_input_rows gated_input_rows", 64,
        )
        for layers, width, segments in ((35, 256, 1), (35, 256, 3), (3, 24, 1), (3, 24, 3))
    },
    "accept": (accepted, "walk_trees report_rows", 64),
    "trees": (chosen, "choose_nodes rank_children weigh_level", 128),
    "texts": (texts, "lay_out_rows advance_rows end_rows path_rows", 64),
    **{
        f"{name}, trees {with_trees}": (partial(remembered, shape, with_trees), REMEMBERED, 128)
        for name, shape in SHAPES.items()
        for with_trees in (False, True)
    },
    "short convolutions, text": (partial(convolved, False), "short_rows", 64),
    "short convolutions, trees": (partial(convolved, True), "short_rows", 64),
}  # fmt: skip


def fits(made: Compiled, registers: int) -> bool:
    """Whether nothing spills and so few registers are used that as many programs stay resident as were meant to."""
    return made.stack == 0 and made.registers <= registers


@pytest.mark.parametrize(("name", "capability"), alternating([*LAUNCHES], CAPABILITIES))
def test_no_register_spills(name, capability, tmp_path) -> None:
    call, kernels, registers = LAUNCHES[name]
    made = compile_launches(call, tmp_path, capability)
    assert set(made) == set(kernels.split())
    assert all(fits(each, registers) for each in made.values())
    if "logits" in name:
        assert ("ex2" in made["finish_rows"].ptx) == ("capped" in name)
    if "advance_rows" in made:
        ptx = made["advance_rows"].ptx
        assert "bar.sync" in ptx[ptx.rindex("ld.global") : ptx.index("st.global")], "all is read before any is written"
    if "remember_rows" in made:
        assert made["remember_rows"].ptx.count("bar.sync") < 8, "a row's sums are within a warp"


def bf16(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*bf16")


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
    read = {"SEGMENTS": 4 if share else 1, "BIAS": bool(share), "USE_GDC": capability >= 90}
    how = {"SHARE": share, "SCALED": share == 0.22, "NORM": True, "SHIFTED": centred, "CENTRED": centred}
    constants = row_of(torch.empty(0, device="meta"), width) | how | read
    made = compile_kernel(rows.norm_rows, arguments, constants, tmp_path, capability, warps(width))
    assert fits(made, registers=120 if centred else 80 if share else 64)
    assert "rsqrt.approx" not in made.ptx, "the root is rounded as torch's"


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
    constants |= {"SEGMENTS": 3, "BIAS": True, "USE_GDC": capability >= 90}
    largest = 0.0 if kind == "alone" else {"bf16": 0.0, "i8": 127.0, "u8": 448.0}[kept]
    if largest:
        arguments["scales"] = "*fp32"
    made = compile_kernel(rows.rotate_and_store_rows, arguments, constants | {"LARGEST": largest}, tmp_path, capability)
    assert fits(made, registers=128 if dim > 256 else 80 if largest and dim > 128 else 64)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows", [8, 64])
def test_move(rows, capability, tmp_path) -> None:
    types = dict.fromkeys(("sources", "destinations", "lengths"), "*i64") | {"keys": "*i32", "values": "*i32"}
    sizes = {"KEY_WIDTH": 512, "VALUE_WIDTH": 512, "ROWS": rows, "COLUMNS": 64, "USE_GDC": capability >= 90}
    made = compile_kernel(
        trees.move_columns, types | {"slots": "i32", "path_width": "i32"}, sizes, tmp_path, capability
    )
    assert made.stack == 0 and made.registers <= 128
    last_read, first_write = made.ptx.rindex("ld.global"), made.ptx.index("st.global")
    assert "bar.sync" in made.ptx[last_read:first_write], "every thread has read before any writes"
