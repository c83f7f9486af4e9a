"""Linear layers: right values, and rows with the same bits at any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.simulated.device import DEVICE, simulated
from verifier.model.linear import Linear
from verifier.model.rows import RowCounts

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: in, out: narrow, odd, the widths of a tiny model, wider than 1024 (where a single row is multiplied differently).
SHAPES = [(64, 64), (50, 33), (256, 768), (1536, 320), (3072, 512)]
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 48, 64, 65, 100)


def layer_of(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> tuple[Linear, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(shape[0])
    weight = (torch.randn(shape[::-1], generator=generator) / shape[0] ** 0.5).to(dtype)
    offset = torch.randn(shape[1], generator=generator).to(dtype) if bias else None
    return Linear(weight.clone(), offset), weight, offset


def rows_of(shape: tuple[int, int], dtype: torch.dtype, count: int = 100) -> Tensor:
    return torch.randn(count, shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)


def differing(linear: Linear, x: Tensor, counts: tuple[int, ...]) -> list[int]:
    """The row counts at which some row has other bits than among all rows, wherever in ``x`` the rows are taken."""
    whole = linear(x)
    pieces = {count: [slice(at, at + count) for at in (0, len(x) // 3, len(x) - count)] for count in counts}
    return [n for n, places in pieces.items() if any(not torch.equal(linear(x[p].clone()), whole[p]) for p in places)]


@pytest.mark.parametrize("counts", [None, RowCounts([8]), RowCounts([3, 4, 16])], ids=["any", "8", "3, 4, 16"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_multiplies(shape, dtype, bias, counts) -> None:
    linear, weight, offset = layer_of(shape, dtype, bias)
    linear.counts = counts
    assert (linear.in_features, linear.out_features) == shape
    x = rows_of(shape, dtype, 21)
    expected = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    result = linear(x)
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert torch.allclose(result.double(), expected, atol=max(1e-5, 8 * eps), rtol=2 * eps)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_at_any_count_once_it_is_tried(shape, dtype, bias) -> None:
    """Counts that were not tried among them."""
    linear, _, _ = layer_of(shape, dtype, bias)
    linear.counts = linear.agreeing(64)
    assert differing(linear, rows_of(shape, dtype), COUNTS) == []


@pytest.mark.parametrize("counts", [None, RowCounts([8])], ids=["any", "8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_done_behind_the_product_rounds_as_a_step_of_its_own(dtype, counts) -> None:
    linear, _, _ = layer_of((64, 96), dtype, bias=True)
    linear.counts = counts
    x, stream = rows_of((64, 96), dtype, 9), rows_of((96, 64), dtype, 9)
    assert torch.equal(linear(x, residual=stream), stream + linear(x))
    gate, up = linear(x).chunk(2, dim=-1)
    assert torch.equal(linear.gated(x), functional.silu(gate) * up)


def test_off_the_cpu_the_weight_is_not_packed_and_the_op_multiplies() -> None:
    here, weight, offset = layer_of((64, 96), torch.float32, bias=True)
    x, stream = rows_of((64, 96), torch.float32, 9), rows_of((96, 64), torch.float32, 9)
    with simulated():
        there = Linear(weight.to(DEVICE), None if offset is None else offset.to(DEVICE))
        product = there(x.to(DEVICE), residual=stream.to(DEVICE)).cpu()
        gated = there.gated(x.to(DEVICE)).cpu()
    torch.testing.assert_close(product, here(x, residual=stream))
    torch.testing.assert_close(gated, here.gated(x))
