"""Norm, activation and rotation: what they compute, and that no row's bits depend on its neighbours or on threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.verifier.reading import threads
from verifier.ops.activation import silu_mul
from verifier.ops.norm import rms_norm
from verifier.ops.rope import rotate

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 70


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_rows_are_independent(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    alone = torch.cat([op(row) for row in x.split(1)])
    for count in (2, 3, 11, 16, 17, 33, 45, 65, 70):
        assert torch.equal(op(x[:count].clone()), alone[:count]), f"among {count} rows"


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [100, 160, 1000, 3072, 8192])
def test_activation(width, dtype, count) -> None:
    x = noise(ROWS, 2 * width, dtype=dtype)
    with threads(count):
        wanted = functional.silu(x[:, :width].double()) * x[:, width:].double()
        assert torch.allclose(silu_mul(x).double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        assert_rows_are_independent(silu_mul, x)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 100, 576, 4096])
def test_norm(width, dtype, count) -> None:
    x, weight = noise(ROWS, width, dtype=dtype), noise(width, dtype=dtype)
    with threads(count):
        wide = x.double()
        wanted = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        result = rms_norm(x, weight, 1e-5)
        assert torch.allclose(result.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        assert_rows_are_independent(lambda part: rms_norm(part, weight, 1e-5), x)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(6, 64), (32, 128)], ids=str)
def test_norm_of_the_heads_of_each_row(heads, dtype, count) -> None:
    """Query and key norms: all heads of a row are normed alike, and lie among others in memory."""
    x, weight = noise(ROWS, heads[0] + 2, heads[1], dtype=dtype), noise(heads[1], dtype=dtype)
    with threads(count):
        one_by_one = torch.stack([rms_norm(head.contiguous(), weight, 1e-5) for head in x[:, :-2].unbind(1)], dim=1)
        assert torch.equal(rms_norm(x[:, :-2], weight, 1e-5), one_by_one)
        assert_rows_are_independent(lambda part: rms_norm(part[:, :-2], weight, 1e-5), x)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(6, 64), (9, 16), (40, 128)], ids=str)
def test_rotation(heads, dtype, count) -> None:
    x, angle = noise(ROWS, *heads, dtype=dtype), noise(ROWS, 1, heads[1] // 2)
    cos = torch.cat((angle, angle), dim=-1).cos().to(dtype)
    sin = torch.cat((-angle, angle), dim=-1).sin().to(dtype)
    with threads(count):
        turned = torch.view_as_complex(torch.stack(x.double().chunk(2, dim=-1), dim=-1)) * torch.polar(
            torch.ones_like(angle.double()), angle.double()
        )
        wanted = torch.cat((turned.real, turned.imag), dim=-1)
        tolerance = 1e-5 if dtype == torch.float32 else 0.06
        assert torch.allclose(rotate(x, cos, sin).double(), wanted, atol=tolerance)
        both = torch.cat((x, cos, sin), dim=1)
        assert_rows_are_independent(lambda part: rotate(part[:, :-2], part[:, -2:-1], part[:, -1:]), both)
