"""Skinny linears: the kernels against the reference, and a row's bits among any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops import linear as op
from foresay.verifier.ops.kernels import blocked, linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.records import Norm
from foresay.verifier.ops.rows import add_norm
from tests.combinations import alternating
from tests.kernels.on_device.conftest import DTYPES, EXACT, noise

# In the interpreter exp() is numpy's, which warns where it gives infinity, as it is meant to far below zero.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")]


#: Inner positions of a block of floats.
BLOCK = 128


@pytest.fixture
def one_segment(monkeypatch) -> None:
    """As with a weight so tall that one program for each of its tiles is enough."""
    monkeypatch.setattr(blocked, "_PROGRAMS", 1)


def close(result: Tensor, wanted: Tensor) -> bool:
    """Within roundings of the dtype, and those of long sums in fp32."""
    eps = torch.finfo(wanted.dtype).eps
    return torch.allclose(result.cpu().double(), wanted.cpu().double(), rtol=4 * eps, atol=8 * eps + 1e-5)


def cut(outer: int, inner: int) -> tuple[int, int]:
    return blocked.segments_of(outer, -(-inner // BLOCK), BLOCK)


SHAPES = [(1, 128, 64), (3, 100, 70), (64, 200, 130), (65, 1100, 64), (2, 1536, 33)]


def case(device: torch.device, dtype: torch.dtype, rows: int, inner: int, outer: int) -> tuple[Tensor, ...]:
    x, weight = noise(device, rows, inner, dtype=dtype), noise(device, outer, inner, dtype=dtype) / inner**0.5
    return x, weight, noise(device, outer, dtype=dtype), noise(device, rows, outer, dtype=dtype)


def check_all(device: torch.device, dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    x, weight, bias, stream = case(device, dtype, rows, inner, outer)
    on_cpu = [part.cpu() for part in (x, weight, bias)]
    assert close(linear.linear(x, weight), op.linear(*on_cpu[:2]))
    whole = linear.linear(x, weight, bias)
    assert close(whole, op.linear(*on_cpu[:3]))
    read, scale = linear.product(x, BlockedWeight.pack(weight, bias), dtype), noise(device, outer, dtype=dtype)
    streams = stream.clone(), stream.clone()
    normed = [add_norm.launch(to, y, Norm(scale, 1e-5)) for to, y in zip(streams, (read, whole), strict=True)]
    assert torch.equal(*streams), "added up by the norm, the same bits as by a launch of their own"
    assert close(*normed)
    if outer % 2 == 0:
        assert close(linear.gated_linear(x, weight, bias), op.gated_linear(on_cpu[0], on_cpu[1], on_cpu[2]))
    squared = linear.gated_linear(x, weight, bias, "relu2")
    assert torch.equal(squared, functional.relu(whole).square()), "the same bits as in steps"


@pytest.mark.parametrize(("shape", "dtype"), alternating(SHAPES, DTYPES), ids=str)
def test_in_segments(shape, dtype, device) -> None:
    rows, inner, outer = shape
    assert inner <= 512 or cut(outer, inner)[0] > 1
    check_all(device, dtype, rows, inner, outer)


@pytest.mark.usefixtures("one_segment")
@pytest.mark.parametrize(("shape", "dtype"), alternating(SHAPES, DTYPES, 1), ids=str)
def test_in_one_segment(shape, dtype, device) -> None:
    rows, inner, outer = shape
    assert cut(outer, inner)[0] == 1
    check_all(device, dtype, rows, inner, outer)


@pytest.mark.parametrize("programs", [1, 264], ids=["one_segment", "segments"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(programs, device, monkeypatch) -> None:
    monkeypatch.setattr(blocked, "_PROGRAMS", programs)
    x, weight, bias, stream = case(device, EXACT, 70, 1100, 96)
    scale = noise(device, 96, dtype=EXACT)

    def normed(rows: slice) -> Tensor:
        read = linear.product(x[rows].clone(), BlockedWeight.pack(weight, bias), EXACT)
        return add_norm.launch(stream[rows].clone(), read, Norm(scale, 1e-5))

    product, gated = linear.linear(x, weight, bias), linear.gated_linear(x, weight, bias)
    every = normed(slice(0, 70))
    with monkeypatch.context() as patched:
        patched.setattr(linear, "ENOUGH", 1)
        assert torch.equal(linear.linear(x, weight, bias), product), "one program adds up all segments"
        assert torch.equal(linear.gated_linear(x, weight, bias), gated)
        patched.setattr(linear, "ENOUGH", 1000)
        patched.setattr(linear, "EARLY", True)
        assert torch.equal(linear.linear(x, weight, bias), product), "the first block is loaded before"
    for rows in (slice(0, 1), slice(0, 16), slice(17, 19), slice(11, 40), slice(3, 67), slice(69, 70)):
        part = x[rows].clone()
        assert torch.equal(linear.linear(part, weight, bias), product[rows])
        assert torch.equal(normed(rows), every[rows])
        assert torch.equal(linear.gated_linear(part, weight, bias), gated[rows])


@pytest.mark.parametrize(("outer", "inner"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_the_bits_of_served_shapes(outer, inner, device, monkeypatch) -> None:
    """The weights of a layer of an 8B, cut as they are served; the interpreter has time for a few outputs of them."""
    served = cut(outer, inner)
    monkeypatch.setattr(blocked, "segments_of", lambda *_: served)
    some = outer if EXACT is torch.bfloat16 else 6
    x, weight = case(device, EXACT, 70, inner, some)[:2]
    product = linear.linear(x, weight)
    for rows in (slice(0, 1), slice(60, 66), slice(0, 64)):
        assert torch.equal(linear.linear(x[rows].clone(), weight), product[rows])
    if outer > 2 * inner:
        gated = linear.gated_linear(x, weight)
        assert torch.equal(linear.gated_linear(x[17:19].clone(), weight), gated[17:19])


@pytest.mark.parametrize(
    ("outer", "inner"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (576, 1536), (8, 8)]
)
def test_segments_cover_the_inner_width_in_whole_blocks(outer, inner) -> None:
    segments, length = cut(outer, inner)
    assert length % BLOCK == 0
    assert (segments - 1) * length < inner <= segments * length
