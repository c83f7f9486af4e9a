"""Products with weights of few bits: the kernels against what they stand for, and a row's bits among any others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.kernels import blocked, linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.linear import _applied, head_linear, split_k_linear
from foresay.verifier.ops.quantized import E8M0, QuantizedMatrix
from foresay.verifier.ops.records import Gate, SplitKSums
from tests.combinations import alternating, pairwise
from tests.kernels.on_device.conftest import DTYPES, EXACT
from tests.verifier.quantized_weights import KINDS, STEPPED, matrix_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]
#: One of each way through the kernel.
SOME = ["int8", "int4", "int4 zeros", "fp8 groups", "q4_k", "mxfp4"]
#: Inner and outer width, programs wanted, and a dtype of activations: whole blocks and tiles, neither; wide enough for
#: one segment or two.
CASES = [
    ((128, 64), 264, DTYPES[0]), ((192, 70), 264, DTYPES[1]), ((640, 70), 1, DTYPES[1]), ((640, 70), 264, DTYPES[0]),
]  # fmt: skip


def weight_of(kind: str, shape: tuple[int, int], device: torch.device, gated: Gate = "") -> BlockedWeight:
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(2)).to(device)
    return BlockedWeight.pack(matrix_of(shape, kind).to(device), bias, gated)


def rows_of(count: int, inner: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(count, inner, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def meant(x: Tensor, weight: BlockedWeight) -> Tensor:
    bias = None if weight.bias is None else weight.bias.cpu().double()
    return functional.linear(x.cpu().double(), weight.plain().cpu().double(), bias)


@pytest.mark.parametrize(("kind", "case"), alternating([*KINDS, *STEPPED, "mxfp4"], CASES), ids=str)
def test_it_multiplies(kind, case, device, monkeypatch) -> None:
    shape, programs, dtype = case
    monkeypatch.setattr(blocked, "_PROGRAMS", programs)
    weight, x = weight_of(kind, shape, device), rows_of(3, shape[0], dtype, device)
    expected, eps = meant(x, weight), torch.finfo(dtype).eps
    wide = linear.whole(x, weight, torch.float32)
    assert torch.allclose(wide.cpu().double(), expected, atol=4e-5, rtol=1e-5)
    whole = wide if dtype == torch.float32 else linear.whole(x, weight, dtype)
    assert torch.allclose(whole.cpu().double(), expected, atol=max(4e-5, 8 * eps), rtol=2 * eps)
    on_cpu = split_k_linear(x.cpu(), weight_of(kind, shape, torch.device("cpu")), dtype)
    assert isinstance(on_cpu, SplitKSums) == isinstance(linear.product(x, weight, dtype), SplitKSums)
    reference = on_cpu.reduce(dtype) if isinstance(on_cpu, SplitKSums) else on_cpu
    assert torch.allclose(whole.cpu().double(), reference.double(), atol=max(4e-5, 8 * eps), rtol=4 * eps)


#: Each with programs wanted, which make one segment or several, and a dtype.
GATES = [("silu", 1, DTYPES[0]), ("gelu", 264, DTYPES[1]), ("clamped", 264, DTYPES[1]), ("relu2", 1, DTYPES[0])]


@pytest.mark.parametrize(("kind", "gate"), alternating(SOME, GATES), ids=str)
def test_the_gate_is_applied_as_in_steps(kind, gate, device, monkeypatch) -> None:
    gated, programs, dtype = gate
    monkeypatch.setattr(blocked, "_PROGRAMS", programs)
    x = rows_of(5, 576, dtype, device)
    whole = linear.whole(x, weight_of(kind, (576, 140), device), dtype)
    wanted = _applied(whole, gated)
    result = linear.whole(x, weight_of(kind, (576, 140), device, gated=gated), dtype)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(
        result.double(), wanted.double(), rtol=4 * eps, atol=eps + 2e-6
    )  # of torch's own GELU the sum of 1 and tanh


@pytest.mark.parametrize("programs", [1, 264], ids=["one_segment", "segments"])
@pytest.mark.parametrize("kind", SOME)
def test_a_row_has_the_same_bits_among_any_number_of_rows(kind, programs, device, monkeypatch) -> None:
    monkeypatch.setattr(blocked, "_PROGRAMS", programs)
    x, weight = rows_of(70, 640, EXACT, device), weight_of(kind, (640, 64), device)
    several = [weight_of(kind, (640, 64), device, "silu")] if kind == SOME[0] else []  # no kind has a gate of its own
    for each in (weight, *several):
        whole = linear.whole(x, each, torch.float32)
        for rows in (slice(0, 1), slice(17, 19), slice(3, 67), slice(69, 70)):
            assert torch.equal(linear.whole(x[rows].clone(), each, torch.float32), whole[rows])
        with monkeypatch.context() as patched:
            patched.setattr(linear, "ENOUGH", 1)
            assert torch.equal(linear.whole(x, each, torch.float32), whole), "one program adds up all segments"


def test_every_value_becomes_what_it_means(device) -> None:
    """Rows of one number each, on the diagonal of an identity: all 256 of e4m3 but for NaN, all of int8."""
    x = torch.eye(256, device=device, dtype=EXACT)
    for floats in (True, False):
        matrix = QuantizedMatrix.empty(256, 256, 8, 256, True, torch.float32, device, floats)
        bits = torch.arange(256, dtype=torch.uint8, device=device)
        bits[bits & 127 == 127] = 0 if floats else 127
        matrix.put(bits.view(matrix.values.dtype).expand(256, 256).contiguous())
        matrix.scales.fill_(1.0)
        assert torch.equal(linear.whole(x, BlockedWeight.pack(matrix), torch.float32), matrix.plain().T)


def test_every_float_of_four_bits_with_every_scale(device) -> None:
    """MXFP4's 16 codes and 256 exponents."""
    x, matrix = torch.eye(256, device=device, dtype=EXACT), QuantizedMatrix.empty(256, 256, 4, 32, True, E8M0, device)
    every = torch.arange(256, dtype=torch.uint8, device=device)
    matrix.put((every % 16).view(torch.int8).expand(256, 256).contiguous())
    matrix.scales.view(torch.uint8).copy_(every[:, None].expand(256, 8))
    assert torch.equal(linear.whole(x, BlockedWeight.pack(matrix), torch.float32), matrix.plain().T)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    pairwise(["", *SOME], [(1, 3, 128, 64), (19, 2, 64, 100), (70, 5, 96, 16)], DTYPES),
    ids=str,
)
def test_heads_are_multiplied_with_their_own_rows_of_a_weight(kind, shape, dtype, device) -> None:
    rows, heads, inner, outer = shape
    whole = weight_of(kind or "int8", (inner, heads * outer), device).plain()
    weight = weight_of(kind, (inner, heads * outer), device) if kind else BlockedWeight.pack(whole.to(dtype))
    x = rows_of(rows, heads * inner, dtype, device)
    result, eps = linear.head_product(x, weight, dtype), torch.finfo(dtype).eps
    wanted = head_linear(x.cpu().double(), BlockedWeight.pack(weight.plain().cpu()), torch.float64)
    assert torch.allclose(result.cpu().double(), wanted, atol=max(4e-5, 8 * eps), rtol=2 * eps)
    assert torch.equal(linear.head_product(x[rows - 1 :].clone(), weight, dtype)[0], result[-1]), "alone"
