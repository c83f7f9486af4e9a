"""The kernels of recurrent layers compile for the GPUs we name, at the sizes of real models, and no register spills."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.states import NODES, LayerStates
from foresay.verifier.ops.kernels.recurrence import gated_delta, replay, short_conv
from foresay.verifier.ops.records import AttentionMetadata, DeltaWeights, StateRows
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


@pytest.mark.parametrize("trees", [False, True])
def test_heads_that_remember(trees, capability, tmp_path) -> None:
    """Of Qwen3.5's 9B: 16 keys, 32 values."""
    heads, keys, channels, path = 32, 16 * 128, 2 * 16 * 128 + 32 * 128, of(3, dtype=torch.int64)
    whole = LayerStates(
        of(2, 5, heads, 8, 128, 16),
        of(2, 5, 3, channels),
        of(2, 2 * NODES, keys + heads * 129),
        of(2, 2 * NODES, channels),
    )
    weights = DeltaWeights(of(4, channels), of(heads), of(heads), of(128), 1e-6)

    def call() -> None:
        layer = LayerStates(*(part[0] for part in whole))
        mixed, rates = of(40, channels + heads * 128), of(40, 2 * heads)
        gated_delta(mixed, rates, weights, layer, rows_of(40, trees), torch.bfloat16)
        replay(whole, 1, 2, False, 0, path)

    made = compile_launches(call, tmp_path, capability)
    assert set(made) == {"convolve_rows", "remember_rows", "finish_rows", "replay_states", "replay_tails"}
    assert all(one.stack == 0 and one.registers <= 128 for one in made.values())


@pytest.mark.parametrize("trees", [False, True])
def test_short_convolutions(trees, capability, tmp_path) -> None:
    layer = LayerStates(of(5, 0, 0, 0, 16), of(5, 2, 2048), of(2 * NODES, 0), of(2 * NODES, 2048))

    def call() -> None:
        short_conv(of(40, 3 * 2048), of(3, 2048), layer, rows_of(40, trees), torch.bfloat16)

    (made,) = compile_launches(call, tmp_path, capability).values()
    assert made.stack == 0 and made.registers <= 64
