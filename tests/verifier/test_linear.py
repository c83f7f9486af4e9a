"""Linear layers: right values, and rows with the same bits at any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.model.linear import Linear
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels.cpu.launch import recording
from foresay.verifier.ops.records import Gate
from tests.simulated.device import DEVICE, simulated
from tests.verifier.conftest import by_pairs, by_processor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: in, out: narrow, odd, the widths of a tiny model, of many terms.
SHAPES = [(64, 64), (50, 33), (33, 50), (256, 768), (3072, 512)]
everywhere = pytest.mark.parametrize(
    ("processor", "dtype", "shape"), by_processor(DTYPES, SHAPES), ids=str, indirect=["processor"]
)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 17, 31, 48, 65, 100)


#: What is done to a product, step by step as torch has it.
STEPS: dict[Gate, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "gelu": lambda x: functional.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "relu2": lambda x: functional.relu(x).square(),
}


def layer_of(
    shape: tuple[int, int], dtype: torch.dtype, bias: bool, kept: torch.dtype | None = None, gated: Gate = ""
) -> tuple[Linear, Tensor, Tensor | None]:
    """kept: the dtype of the weight, where it is not that of the layer."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = (torch.randn(shape[::-1], generator=generator) / shape[0] ** 0.5).to(kept or dtype)
    offset = torch.randn(shape[1], generator=generator).to(dtype) if bias else None
    return Linear(weight.clone(), offset, dtype, gated), weight, offset


def rows_of(shape: tuple[int, int], dtype: torch.dtype, count: int = 100) -> Tensor:
    return torch.randn(count, shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)


def differing(linear: Linear, x: Tensor, counts: tuple[int, ...]) -> list[int]:
    """The row counts at which some row has other bits than among all rows, wherever in ``x`` the rows are taken."""
    whole = linear(x)
    pieces = {count: [slice(at, at + count) for at in (0, len(x) // 3, len(x) - count)] for count in counts}
    return [n for n, parts in pieces.items() if any(not torch.equal(linear(x[p].clone()), whole[p]) for p in parts)]


@by_pairs("dtype, shape, bias, kept", DTYPES, SHAPES, [False, True], [None, torch.bfloat16, torch.float16])
def test_it_multiplies(processor, shape, dtype, bias, kept) -> None:
    linear, weight, offset = layer_of(shape, dtype, bias, kept)
    assert (linear.in_features, linear.out_features) == shape
    x = rows_of(shape, dtype, 21)
    weight = weight if dtype is torch.float32 else weight.to(dtype)
    expected = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    result = linear(x)
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert torch.allclose(result.double(), expected, atol=max(4e-5, 8 * eps), rtol=2 * eps)
    assert torch.allclose(linear.wide(x).double(), expected, atol=4e-5, rtol=1e-5)
    with references():
        assert torch.allclose(linear(x).double(), expected, atol=max(4e-5, 8 * eps), rtol=2 * eps)


@by_pairs("dtype, shape, kept, gated", DTYPES, SHAPES, [None, torch.bfloat16, torch.float16], ["", *STEPS])
def test_a_row_has_the_same_bits_at_any_count(processor, shape, dtype, kept, gated) -> None:
    linear, _, _ = layer_of((shape[0], 2 * shape[1]), dtype, True, kept, gated)
    assert differing(linear, rows_of(shape, dtype), COUNTS) == []


@everywhere
def test_a_recording_multiplies_what_there_is_when_it_runs(processor, shape, dtype) -> None:
    linear, _, _ = layer_of(shape, dtype, True, torch.bfloat16)
    x = rows_of(shape, dtype, 8)
    expected = linear(x)
    later = torch.full_like(x, torch.nan)
    with recording() as replay:
        result = linear(later)
    later.copy_(x)
    replay()
    assert torch.equal(result, expected)


@by_pairs("gated, shape, dtype", list(STEPS), [(64, 96), (50, 66), (576, 3072)], DTYPES)
def test_the_gate_rounds_as_a_step_of_its_own(processor, gated, shape, dtype) -> None:
    linear, weight, offset = layer_of(shape, dtype, True, gated=gated)
    x = 3 * rows_of(shape, dtype, 9)
    plain = Linear(weight, offset, dtype)
    expected = STEPS[gated](plain(x))
    torch.testing.assert_close(linear.gated(x), expected, rtol=2 * torch.finfo(dtype).eps, atol=5e-6)
    with references():
        torch.testing.assert_close(linear.gated(x), expected, rtol=1e-2, atol=1e-2)


@by_pairs("kept, gated", DTYPES, ["", *STEPS])
def test_a_weight_is_packed_as_it_is(processor, kept, gated) -> None:
    for shape in ((64, 64), (50, 34), (33, 200)):
        linear, weight, offset = layer_of(shape, torch.float32, True, kept, gated)
        assert offset is not None
        assert torch.equal(linear._packed.plain(), weight)
        bias = linear._packed.plain_bias()
        assert bias is not None and torch.equal(bias, offset)


def test_what_16_bits_hold_is_kept_in_16_bits() -> None:
    weight = torch.randn(64, 96)
    assert Linear(weight).nbytes == 4 * weight.numel()
    assert Linear(weight.bfloat16().float()).nbytes == 2 * weight.numel()
    assert Linear(weight.half().float()).nbytes == 2 * weight.numel()
    assert Linear(weight.half(), dtype=torch.float32).nbytes == 2 * weight.numel()
    assert Linear(weight, dtype=torch.bfloat16).nbytes == 2 * weight.numel()


def test_extremes_are_what_ieee_says(processor) -> None:
    """Infinity and NaN come through, and what is next to them does not notice."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    x = torch.tensor([[torch.inf, 1.0], [1.0, 2.0], [torch.nan, 3.0], [-torch.inf, 3e38]])
    result = Linear(weight)(x)
    assert result[1].tolist() == [1.0, 2.0]
    assert result[0, 0] == torch.inf and result[0, 1].isnan()
    assert result[2].isnan().all()
    gated = Linear(torch.eye(2), gated="silu").gated(torch.tensor([[-1e4, 2.0], [1e4, 2.0], [0.0, 5.0]]))
    assert gated.flatten().tolist() == [0.0, 2e4, 0.0]
    squared = Linear(torch.eye(1), gated="relu2").gated(
        torch.tensor([[-3.0], [3.0], [-torch.inf], [1e30], [torch.nan]])
    )
    assert squared.flatten().tolist()[:4] == [0.0, 9.0, 0.0, torch.inf] and squared[4].isnan()


def test_off_the_cpu_the_weight_stays_as_it_is_and_the_op_multiplies() -> None:
    here, weight, offset = layer_of((64, 96), torch.float32, bias=True)
    x = rows_of((64, 96), torch.float32, 9)
    with simulated():
        there = Linear(weight.to(DEVICE), None if offset is None else offset.to(DEVICE))
        product = there(x.to(DEVICE)).cpu()
    torch.testing.assert_close(product, here(x))
