"""The kernels of ops on rows against the references, and each row by itself (the cases: tests/kernels/row_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.store import as_bytes, dequantized
from foresay.verifier.ops.attention import rotate_and_store
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels import linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.records import Norm, Rotation, SplitKSums
from foresay.verifier.ops.rows import add_norm, norm
from tests.combinations import pairwise
from tests.kernels.on_device.conftest import DTYPES, INTERPRETED, noise
from tests.kernels.row_cases import CASES, Noise, close, parted

# In the interpreter exp() is numpy's, which warns where it gives infinity, as it is meant to far below zero.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")]
ROWS = 5


def launched(op: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = op.launch
    return found


def bits(found: Tensor) -> Tensor:
    return found.cpu().nan_to_num(7.0)


@pytest.mark.parametrize(("name", "dtype"), pairwise([*CASES], DTYPES), ids=str)
def test_what_an_op_computes(name, dtype, device) -> None:
    """As references have it; the bits of other launches; and of a row alone. Segments of a product are added as the
    product itself adds them."""
    draw = Noise(device, dtype, ROWS)
    case, there = CASES[name](draw), CASES[name](Noise(torch.device("cpu"), dtype, ROWS))
    found = case.run(launched, case.of(slice(None)))
    with references():
        wanted = there.run(lambda op: op, there.of(slice(None)))
    for mine, its in zip(found, wanted, strict=True):
        assert mine.shape == its.shape and close(mine, its, case.launched or 2 * case.ulps, mine.dtype)
    for mine, its in case.equal(launched, found):
        assert torch.equal(mine, its)
    for row in range(ROWS):
        alone = case.run(launched, case.of(slice(row, row + 1)))
        assert all(torch.equal(bits(a)[0], bits(b)[row]) for a, b in zip(alone, found, strict=True))
    if case.product:
        sums = parted(case.rows[case.product], draw)
        both = [case.run(launched, case.of(slice(None)) | {case.product: one}) for one in (sums, sums.reduce(dtype))]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*both, strict=True))


def test_norm_of_heads_that_lie_among_others(dtype, device) -> None:
    x, weight = noise(device, ROWS, 6, 64, dtype=dtype), noise(device, 64, dtype=dtype)
    found = norm.launch(x[:, 1:5], Norm(weight, 1e-5))
    assert close(found, norm(x.cpu()[:, 1:5], Norm(weight.cpu(), 1e-5)), 4.0, dtype)


def test_no_rows_is_no_launch(device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert norm.launch(empty, Norm(torch.ones(64, device=device), 1e-5)).shape == (0, 64)


@pytest.mark.parametrize(
    ("heads", "stored", "dtype"),
    pairwise([(4, 2, 64), (9, 3, 96), (8, 8, 128)], [torch.int8, torch.float8_e4m3fn], DTYPES),
    ids=str,
)
def test_rows_are_quantised_on_the_way(heads, stored, dtype, device) -> None:
    """Zeros, heads that are tiny, huge or no numbers among them; and no row notices another."""
    (_, groups, dim), draw = heads, Noise(device, dtype, ROWS)
    qkv, cos, sin = draw(ROWS, (sum(heads[:2]) + groups) * dim), draw(ROWS, 1, dim), draw(ROWS, 1, dim)
    slots = torch.tensor([11, 4, 7, 8, 19], device=device)
    qkv[1] = 0.0
    qkv[2] *= 3e-4
    powers = torch.tensor(2.0).pow(torch.arange(-12, 4).repeat(dim)[:dim]).repeat(sum(heads[:2]) + groups)
    qkv[3] *= powers.to(device)
    qkv[4, -1] = torch.nan

    def run(kernel, part: slice, where: torch.device) -> tuple[Tensor, ...]:
        kept = [torch.full((24, groups, dim), 7.0, device=where).to(stored) for _ in range(2)]
        scales = torch.full((24, 2, groups), 7.0, device=where)
        rows = [each[part].to(where, copy=True) for each in (qkv, cos, sin, slots)]
        query = kernel(rows[0], Rotation(rows[1], rows[2]), (*kept, scales), rows[3])
        return query.cpu(), *(as_bytes(each).cpu() for each in kept), scales.cpu()

    ours = run(rotate_and_store.launch, slice(None), device)
    wanted = run(rotate_and_store, slice(None), torch.device("cpu"))
    assert torch.equal(ours[2], wanted[2]) and torch.equal(ours[3][:, 1].nan_to_num(), wanted[3][:, 1].nan_to_num())
    assert (ours[3][slots[4].cpu(), 1, -1]).isnan() and not ours[3][slots[3].cpu()].isnan().any()
    wide = [dequantized(part[1].view(stored), part[3][:, 0]) for part in (ours, wanted)]
    assert torch.allclose(wide[0], wide[1], rtol=0.13, atol=0.05), "next to a rounding border a number is the next one"
    for row in range(ROWS):
        alone, slot = run(rotate_and_store.launch, slice(row, row + 1), device), slots[row].cpu()
        assert all(
            torch.equal(a[slot].nan_to_num(), b[slot].nan_to_num()) for a, b in zip(alone[1:], ours[1:], strict=True)
        )


#: Inner width of products, outer width of one, and heads of another: an 8B's; and what is cut like them.
PRODUCTS = (640, 64, 2, 1, 16) if INTERPRETED else (4096, 4096, 32, 8, 128)


@pytest.mark.parametrize("dtype", DTYPES[: 1 if INTERPRETED else None], ids=str)
def test_a_row_is_normed_and_rotated_alike_in_a_prompt_of_any_length(dtype, device, monkeypatch) -> None:
    """From some number of rows on one program adds up the segments that readers add up below."""
    if INTERPRETED:
        monkeypatch.setattr(linear, "ENOUGH", 3)
    inner, outer, queries, groups, dim = PRODUCTS
    shapes = (outer, inner), ((queries + 2 * groups) * dim, inner)
    output, qkv = (BlockedWeight.pack(noise(device, *shape, dtype=dtype) * inner**-0.5) for shape in shapes)
    x, stream, weight = (noise(device, *shape, dtype=dtype) for shape in ((512, inner), (512, outer), (outer,)))
    cos, sin = noise(device, 2, 512, 1, dim, dtype=dtype)
    parts = [len(part.sums) for n in (256, 512) if isinstance(part := linear.product(x[:n], output, dtype), SplitKSums)]
    assert parts[0] > parts[1] == 1, "the longest are added up"

    def read(rows: int) -> tuple[Tensor, ...]:
        keys, values = torch.zeros(2, 512, groups, dim, dtype=dtype, device=device)
        summed, read = stream[:rows].clone(), x[:rows].clone()
        normed = add_norm.launch(summed, linear.product(read, output, dtype), Norm(weight, 1e-5))
        turn, slots = Rotation(cos[:rows].clone(), sin[:rows].clone()), torch.arange(rows, device=device)
        query = rotate_and_store.launch(linear.product(read, qkv, dtype), turn, (keys, values, None), slots)
        return summed, normed, query, keys[:rows], values[:rows]

    whole = read(512)
    for rows in (1, 257) if INTERPRETED else (1, 64, 257, 385):
        assert all(torch.equal(mine, its[:rows]) for mine, its in zip(read(rows), whole, strict=True)), rows
