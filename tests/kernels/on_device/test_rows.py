"""Norm, activation and rotation with the KV store: the kernels against the references, and each row by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.ops import as_bytes, dequantized
from foresay.verifier.ops import norm as norm_op
from foresay.verifier.ops import rope as rope_op
from foresay.verifier.ops.kernels import norm, rotate, segments, take
from foresay.verifier.ops.linear import Partials
from tests.combinations import pairwise
from tests.kernels.on_device.conftest import DTYPES

# In the interpreter exp() is numpy's, which warns where it gives infinity, as it is meant to far below zero.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")]
ROWS = 5


def noise(device: torch.device, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def close(result: Tensor, wanted: Tensor, ulps: float = 2.0) -> bool:
    """Within a few units in the last place of the dtype; a reduction's order may move a rounding."""
    eps = torch.finfo(wanted.dtype).eps
    return torch.allclose(result.cpu().double(), wanted.cpu().double(), rtol=ulps * eps, atol=ulps * eps)


@pytest.mark.parametrize(
    ("width", "wide", "dtype"), pairwise([1, 96, 128, 576, 1000, 4096], [False, True], DTYPES), ids=str
)
def test_norm(width, wide, dtype, device) -> None:
    x, weight = noise(device, ROWS, width, dtype=dtype), noise(device, width, dtype=torch.float32 if wide else dtype)
    result = norm.rms_norm(x, weight, 1e-5)
    assert close(result, norm_op.rms_norm(x.cpu(), weight.cpu(), 1e-5), ulps=4.0)
    for row in range(ROWS):
        assert torch.equal(norm.rms_norm(x[row : row + 1].clone(), weight, 1e-5), result[row : row + 1])


@pytest.mark.parametrize("width", [96, 1000])
def test_norm_behind_a_residual_addition(width, dtype, device) -> None:
    x, y = noise(device, ROWS, width, dtype=dtype), noise(device, ROWS, width, dtype=dtype).flip(0)
    weight = noise(device, width, dtype=dtype)
    stream, plain = x.clone(), x.cpu()
    result = norm.add_rms_norm(stream, y, weight, 1e-6)
    wanted = norm_op.add_rms_norm(plain, y.cpu(), weight.cpu(), 1e-6)
    assert torch.equal(stream.cpu(), plain), "the stream carries the rounded sum"
    assert close(result, wanted, ulps=4.0)
    assert torch.equal(norm.rms_norm(stream, weight, 1e-6), result), "one launch, the same bits as two"


def test_norm_of_heads_that_lie_among_others(dtype, device) -> None:
    x, weight = noise(device, ROWS, 6, 64, dtype=dtype), noise(device, 64, dtype=dtype)
    assert close(norm.rms_norm(x[:, 1:5], weight, 1e-5), norm_op.rms_norm(x.cpu()[:, 1:5], weight.cpu(), 1e-5), 4.0)


class _Attention:
    """Rows of a qkv product whose slots cross pages of 4; the last two are padding and go to page 0."""

    def __init__(self, device: torch.device, dtype: torch.dtype, queries: int, groups: int, dim: int) -> None:
        heads = queries + 2 * groups
        self.qkv = noise(device, ROWS + 2, heads * dim, dtype=dtype)
        angle = noise(device, ROWS + 2, 1, dim // 2, dtype=torch.float32) * 3
        self.cos = torch.cat((angle, angle), dim=-1).cos().to(dtype)
        self.sin = torch.cat((-angle, angle), dim=-1).sin().to(dtype)
        self.slots = torch.tensor([11, 4, 7, 8, 19, 0, 1], device=device)
        self.keys = torch.full((24, groups, dim), 7.0, dtype=dtype, device=device)
        self.values = self.keys.clone()
        self.norms: list[Tensor | None] = list(noise(device, 2, dim, dtype=dtype))

    def inputs(self, device: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        keys, values = (t.to(device, copy=True) for t in (self.keys, self.values))
        return self.qkv.to(device), self.cos.to(device), self.sin.to(device), keys, values, self.slots.to(device)


@pytest.mark.parametrize(
    ("heads", "normed", "dtype"),
    pairwise([(4, 2, 64), (9, 3, 96), (6, 1, 16), (8, 8, 128)], [False, True, "wide"], DTYPES),
    ids=str,
)
def test_rotation_and_store(heads, normed, dtype, device) -> None:
    case = _Attention(device, dtype, *heads)
    q_norm, k_norm = case.norms if normed else (None, None)
    if normed == "wide":
        q_norm, k_norm = (noise(device, heads[2], dtype=torch.float32) * scale for scale in (1, -1))
    ours, plain = case.inputs(), case.inputs(torch.device("cpu"))
    result = rotate.rotate_and_store(*ours, q_norm, k_norm, 1e-6)
    q_norm, k_norm = (None if n is None else n.cpu() for n in (q_norm, k_norm))
    wanted = rope_op.rotate_and_store(*plain, q_norm, k_norm, 1e-6)
    # Next to a rounding border the norm's last bit moves the product by one unit of a factor of size 4.
    loose = 16.0 if normed else 6.0
    assert result.shape == wanted.shape and close(result, wanted, loose)
    assert close(ours[3], plain[3], loose)
    assert torch.equal(ours[4].cpu(), plain[4]), "values are copied"
    untouched = [slot for slot in range(24) if slot not in case.slots.tolist()]
    assert (ours[3][untouched] == 7.0).all() and (ours[4][untouched] == 7.0).all()


@pytest.mark.parametrize(
    ("heads", "stored", "dtype"),
    pairwise([(4, 2, 64), (9, 3, 96), (8, 8, 128)], [torch.int8, torch.float8_e4m3fn], DTYPES),
    ids=str,
)
def test_rows_are_quantised_on_the_way(heads, stored, dtype, device) -> None:
    """Zeros, heads that are tiny, huge or no numbers among them; and no row notices another."""
    case, (_, groups, dim) = _Attention(device, dtype, *heads), heads
    case.qkv[1] = 0.0
    case.qkv[2] *= 3e-4
    case.qkv[3] *= torch.tensor(2.0).pow(torch.arange(-12, 4).repeat(dim)[:dim]).repeat(sum(heads[:2]) + groups)
    case.qkv[4, -1] = torch.nan

    def run(kernel, part: slice, where: torch.device) -> tuple[Tensor, ...]:
        kept = [torch.full((24, groups, dim), 7.0, device=where).to(stored) for _ in range(2)]
        scales = torch.full((24, 2, groups), 7.0, device=where)
        qkv, cos, sin, slots = (each[part].to(where, copy=True) for each in (case.qkv, case.cos, case.sin, case.slots))
        query = kernel(qkv, cos, sin, *kept, slots, eps=1e-6, scales=scales)
        return query.cpu(), *(as_bytes(each).cpu() for each in kept), scales.cpu()

    ours = run(rotate.rotate_and_store, slice(None), device)
    wanted = run(rope_op.rotate_and_store, slice(None), torch.device("cpu"))
    assert torch.equal(ours[2], wanted[2]) and torch.equal(ours[3][:, 1].nan_to_num(), wanted[3][:, 1].nan_to_num())
    assert (ours[3][case.slots[4].cpu(), 1, -1]).isnan() and not ours[3][case.slots[3].cpu()].isnan().any()
    wide = [dequantized(part[1].view(stored), part[3][:, 0]) for part in (ours, wanted)]
    assert torch.allclose(wide[0], wide[1], rtol=0.13, atol=0.05), "next to a rounding border a number is the next one"
    for row in range(ROWS):
        alone, slot = run(rotate.rotate_and_store, slice(row, row + 1), device), case.slots[row].cpu()
        assert all(
            torch.equal(a[slot].nan_to_num(), b[slot].nan_to_num()) for a, b in zip(alone[1:], ours[1:], strict=True)
        )


def test_a_row_is_rotated_and_stored_alike_alone_and_in_company(dtype, device) -> None:
    case = _Attention(device, dtype, 9, 3, 64)
    together = case.inputs()
    result = rotate.rotate_and_store(*together, case.norms[0], case.norms[1], 1e-6)
    for row in range(ROWS):
        part = slice(row, row + 1)
        keys, values = case.inputs()[3:5]
        qkv, cos, sin, slots = (tensor[part].clone() for tensor in (case.qkv, case.cos, case.sin, case.slots))
        query = rotate.rotate_and_store(qkv, cos, sin, keys, values, slots, case.norms[0], case.norms[1], 1e-6)
        slot = case.slots[row]
        assert torch.equal(query[0], result[row])
        assert torch.equal(keys[slot], together[3][slot]) and torch.equal(values[slot], together[4][slot])


@pytest.mark.parametrize("biased", [False, True])
def test_segments_are_added_as_the_product_itself_adds_them(biased, dtype, device) -> None:
    """Read by the rotation or by a launch of their own: the same bits."""
    case = _Attention(device, dtype, 9, 3, 64)
    sums = noise(device, 3, *case.qkv.shape, dtype=torch.float32)
    partials = Partials(sums, noise(device, case.qkv.shape[1], dtype=dtype) if biased else None)
    whole = segments.finish(partials, dtype)
    assert torch.equal(whole, partials.finished(dtype))

    def run(qkv: Tensor | Partials) -> tuple[Tensor, ...]:
        cos, sin, keys, values, slots = case.inputs()[1:]
        queries = rotate.rotate_and_store(qkv, cos, sin, keys, values, slots, case.norms[0], case.norms[1], 1e-6)
        return queries, keys, values

    assert all(torch.equal(a, b) for a, b in zip(run(partials), run(whole), strict=True))


@pytest.mark.parametrize(("keep_normed", "width", "dtype"), pairwise([False, True], [64, 96, 1600], DTYPES), ids=str)
def test_what_a_pass_begins_with(keep_normed, width, dtype, device) -> None:
    """The bits of the kernels that do it in several launches."""
    table, hidden, weights = (noise(device, n, width, dtype=dtype) for n in (9, ROWS, 2))
    tokens, places = torch.tensor([3, 8, 0, 12, -1], device=device), torch.tensor([8, 0, 0, 5, 1], device=device)
    cos, sin = take.take_both(table, -table, places)
    assert torch.equal(cos, table[places]) and torch.equal(sin, -table[places])
    x, normed = take.embed(table, places, weights[0], 1e-5)
    assert torch.equal(x, table[places]) and torch.equal(normed, norm.rms_norm(x, weights[0], 1e-5))
    both, stream = take.pair(table, tokens, hidden, (weights[0], weights[1]), 1e-5, keep_normed)
    of_hidden = norm.rms_norm(hidden, weights[1], 1e-5)
    of_tokens = norm.rms_norm(table[tokens.clamp(0, 8)], weights[0], 1e-5)
    assert torch.equal(both, torch.cat((of_tokens, of_hidden), dim=1))
    assert torch.equal(stream, of_hidden if keep_normed else hidden)
    on_cpu = [each.cpu() for each in (table, tokens, hidden, *weights)]
    wanted = norm_op.pair(on_cpu[0], on_cpu[1], on_cpu[2], (on_cpu[3], on_cpu[4]), 1e-5, keep_normed)
    assert close(both, wanted[0]) and close(stream, wanted[1])


def test_no_rows_is_no_launch(device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert norm.rms_norm(empty, torch.ones(64, device=device), 1e-5).shape == (0, 64)
