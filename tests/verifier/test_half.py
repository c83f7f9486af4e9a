"""Weights kept in fp16 and multiplied in fp32: nothing is lost, and rows have the same bits at any number of rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.verifier.reading import threads
from verifier.model import half
from verifier.model.half import HalfWeight
from verifier.model.linear import Linear, OneDnnWeight
from verifier.model.rows import RowCounts

#: in, out: narrow, odd, longer than a block of the library's sums (512), wider than its groups of columns.
SHAPES = [(64, 64), (50, 33), (600, 80), (1536, 320), (520, 3000)]
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 16, 31, 32, 33, 64, 100, 255, 256, 257, 300)

needed = pytest.mark.skipif(not half.usable(), reason="torch has no products of fp16 weights for this processor")


def weight_of(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    weight: Tensor = (torch.randn(shape[::-1], generator=generator) / shape[0] ** 0.5).to(dtype)
    return weight.float()


def rows_of(width: int, count: int = 300) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("weight", "held"),
    [
        (weight_of((64, 3000)), True),
        (weight_of((64, 3000), torch.float16), True),
        (weight_of((64, 64), torch.float32), False),
        (torch.tensor([[2.0**-30, -(2.0**-17), 0.0, 65504.0]]), True),
        (torch.tensor([[1.0, 65536.0]]), False),
        (torch.tensor([[1.0, -torch.inf]]), False),
        (torch.tensor([[1.0, torch.nan]]), False),
        (torch.tensor([[1.0 + 2.0**-12]]), False),
        (weight_of((64, 64), torch.float32) * 2.0**-12, False),
        (weight_of((64, 64)) * 2.0**-18, False),
        (torch.zeros(4, 4), True),
    ],
    ids=["bf16", "fp16", "fp32", "small", "large", "infinite", "nan", "digits", "tiny fp32", "tiny bf16", "zeros"],
)
def test_it_holds_what_loses_no_digit(weight, held) -> None:
    assert half.holds(weight) == held


def test_one_weight_among_many_is_enough_not_to_be_held() -> None:
    weight = weight_of((64, 3000))
    weight[2999, 63] = 1e5
    assert not half.holds(weight)


@needed
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_multiplies_in_fp32(shape, bias) -> None:
    weight, x = weight_of(shape), rows_of(shape[0])
    offset = rows_of(shape[1], 1)[0] if bias else None
    result = HalfWeight(weight, offset)(x)
    expected = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert result.dtype == torch.float32
    assert torch.allclose(result.double(), expected, atol=1e-5, rtol=1e-5)


@needed
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_at_any_count_wherever_it_stands(shape, count) -> None:
    product, x = HalfWeight(weight_of(shape), None), rows_of(shape[0])
    with threads(count):
        whole = product(x)
        for rows in COUNTS:
            for at in {0, (len(x) - rows) // 3, len(x) - rows}:
                assert torch.equal(product(x[at : at + rows].clone()), whole[at : at + rows]), (rows, at)


@needed
def test_counts_that_fit_are_not_padded() -> None:
    for rows in range(1, 700):
        assert rows <= half.fitting(rows) == half.fitting(half.fitting(rows))


@needed
def test_without_padding_bits_would_differ() -> None:
    """What the padding is for; if a library mends it, the padding may go."""
    if all(half.fitting(rows) == rows for rows in range(1, 100)):
        pytest.skip("on this processor no number of rows is padded")
    product, x = HalfWeight(weight_of((600, 80)), None), rows_of(600)
    whole = product(x)
    odd = [rows for rows in range(1, 100) if half.fitting(rows) > rows]
    bare = [torch.ops.quantized.linear_dynamic_fp16(x[:rows], product._packed) for rows in odd]
    assert all(not torch.equal(part, whole[: len(part)]) for part in bare)


@needed
def test_a_layer_in_fp32_keeps_what_fp16_holds_in_it_and_nothing_else() -> None:
    linear = Linear(weight_of((64, 96)), rows_of(96, 1)[0])
    assert linear.nbytes == 2 * 64 * 96
    assert linear.dtype == torch.float32
    assert torch.equal(linear(rows_of(64, 9))[:1], linear(rows_of(64, 1)))
    assert linear.fitting(1) == half.fitting(2)
    other = Linear(weight_of((64, 96), torch.float32))
    assert other.nbytes == 4 * 64 * 96
    assert other.fitting(1) == 2


@needed
def test_a_pass_has_two_rows_even_where_these_products_take_one(monkeypatch) -> None:
    """Another matrix of the model may be one that fp16 does not hold."""
    monkeypatch.setattr(half, "row_counts", lambda: RowCounts(range(1, 257)))
    assert half.fitting(1) == 1
    assert Linear(weight_of((64, 96))).fitting(1) == 2


def test_torch_has_them_where_it_says_so() -> None:
    """Else all that needs them here would be skipped in silence when torch drops or renames them."""
    assert half.usable() == ("fbgemm" in torch.backends.quantized.supported_engines)


def unknown(*_: object) -> object:
    raise RuntimeError("quantized::linear_prepack_fp16 is currently not supported by ONEDNN")


@pytest.mark.parametrize("ops", [SimpleNamespace(), SimpleNamespace(linear_prepack_fp16=unknown)], ids=["gone", "none"])
def test_where_there_are_no_such_products_others_are_made(monkeypatch, ops) -> None:
    half.row_counts.cache_clear()
    monkeypatch.setattr(torch.ops, "quantized", ops)
    try:
        assert not half.usable()
        linear, x = Linear(weight_of((64, 96))), rows_of(64, 9)
        assert not isinstance(linear._packed, HalfWeight)
        assert torch.allclose(linear(x), x @ weight_of((64, 96)).T, atol=1e-5)
    finally:
        half.row_counts.cache_clear()


def test_what_agrees_with_nothing_is_not_used(monkeypatch) -> None:
    """A library whose rows depend on their number."""
    half.row_counts.cache_clear()
    monkeypatch.setattr(half, "_multiplied", lambda x, packed: torch.rand(len(x), 3))
    try:
        assert not half.usable()
    finally:
        half.row_counts.cache_clear()


def test_bf16_and_what_fp16_does_not_hold_are_packed_for_onednn() -> None:
    assert isinstance(Linear(weight_of((64, 96), torch.float32))._packed, OneDnnWeight | None)
    assert not isinstance(Linear(weight_of((64, 96)).bfloat16())._packed, HalfWeight)
