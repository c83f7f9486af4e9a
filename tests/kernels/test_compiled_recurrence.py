"""The kernels of recurrent layers compile for the GPUs we name, at the sizes of real models, and no register spills."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.states import NODES, LayerStates
from foresay.verifier.ops.kernels.recurrence import replay_paths
from foresay.verifier.ops.records import AttentionMetadata, DeltaWeights, Scan, StateRows
from foresay.verifier.ops.recurrence import gated_delta, short_conv
from tests.kernels.compiling import CAPABILITIES, compile_launches

pytestmark = pytest.mark.parametrize("capability", CAPABILITIES)


def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rows_of(count: int, trees: bool) -> StateRows:
    def ints(*shape: int) -> Tensor:
        return of(*shape, dtype=torch.int32)

    words = of(count, dtype=torch.int64) if trees else None
    paged = AttentionMetadata(ints(2, 4), 16, ints(2), ints(3), words, None, ints(2) if trees else None)
    return StateRows(paged, ints(2, 3), ints(2, 2), ints(2))


#: Heads, keys and values of each, heads that share a key, parts that a scan normalises: Qwen3.5's 9B, and Granite 4's.
SHAPES = {"Qwen3.5 9B": (32, 128, 128, 2, 0), "Granite 4 H tiny": (48, 128, 64, 48, 1)}


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_heads_that_remember(shape, trees, capability, tmp_path) -> None:
    heads, dim, width, shared, parts = shape
    keys, values = heads // shared * dim, heads * width
    channels = 2 * keys + values
    whole = LayerStates(
        of(2, 5, heads, width // 16, dim, 16),
        of(2, 5, 3, channels),
        of(2, 2 * NODES, keys + values + heads),
        of(2, 2 * NODES, channels),
    )
    scan = Scan(of(channels), of(heads), parts) if parts else None
    weights = DeltaWeights(of(4, channels), of(heads), of(heads), of(values if scan else width), 1e-6, scan=scan)

    def call() -> None:
        layer = LayerStates(*(part[0] for part in whole))
        mixed, rates = of(40, channels + values), of(40, heads if scan else 2 * heads)
        gated_delta.launch(mixed, rates, weights, layer, rows_of(40, trees), torch.bfloat16)
        ints, paths = of(2, dtype=torch.int32), of(2, 8, dtype=torch.int64)
        replay_paths(whole, of(2, 3, dtype=torch.int32), ints, of(2, dtype=torch.int64), paths, 16)

    made = compile_launches(call, tmp_path, capability)
    assert set(made) == {"convolve_rows", "remember_rows", "finish_rows", "replay_states", "replay_tails"}
    assert all(one.stack == 0 and one.registers <= 128 for one in made.values())
    assert made["remember_rows"].ptx.count("bar.sync") < 8, "a row's sums are within a warp"


@pytest.mark.parametrize("trees", [False, True])
def test_short_convolutions(trees, capability, tmp_path) -> None:
    layer = LayerStates(of(5, 0, 0, 0, 16), of(5, 2, 2048), of(2 * NODES, 0), of(2 * NODES, 2048))

    def call() -> None:
        short_conv.launch(of(40, 3 * 2048), of(3, 2048), layer, rows_of(40, trees), torch.bfloat16)

    (made,) = compile_launches(call, tmp_path, capability).values()
    assert made.stack == 0 and made.registers <= 64
