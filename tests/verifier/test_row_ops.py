"""Norm and rotation: what they compute, and that no row's bits depend on its neighbours or on threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foresay.kvpaging.ops import as_bytes
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.norm import add_rms_norm, rms_norm
from foresay.verifier.ops.rope import rotate_and_store
from tests.combinations import pairwise
from tests.verifier.conftest import PROCESSORS
from tests.verifier.reading import threads

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 70


#: What keys and values can be quantised to.
STORED = [torch.int8, torch.float8_e4m3fn]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_rows_are_independent(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    alone = torch.cat([op(row) for row in x.split(1)])
    for count in (2, 3, 11, 16, 17, 33, 45, 65, 70):
        assert torch.equal(op(x[:count].clone()), alone[:count]), f"among {count} rows"


@pytest.mark.parametrize(
    ("processor", "wide", "width", "dtype", "count"),
    pairwise(PROCESSORS, [False, True], [16, 100, 576, 4096], DTYPES, [1, 3]),
    ids=str,
    indirect=["processor"],
)
def test_norm(processor, wide, width, dtype, count) -> None:
    x, weight = noise(ROWS, width, dtype=dtype), noise(width, dtype=torch.float32 if wide else dtype)
    with threads(count):
        exact = x.double()
        wanted = exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        result = rms_norm(x, weight, 1e-5)
        # One rounding, or one more before the weight.
        assert torch.allclose(
            result.double(), wanted, rtol=(0.51 if wide else 4) * torch.finfo(dtype).eps + 1e-6, atol=1e-6
        )
        assert_rows_are_independent(lambda part: rms_norm(part, weight, 1e-5), x)
        added, stream = noise(ROWS, width, dtype=dtype).flip(0).contiguous(), x.clone()
        normed = add_rms_norm(stream, added, weight, 1e-5)
        assert torch.equal(stream, x + added) and torch.equal(normed, rms_norm(x + added, weight, 1e-5))


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


@pytest.mark.parametrize(
    ("processor", "heads", "dtype", "normed", "count"),
    pairwise(
        PROCESSORS,
        [(4, 2, 64), (9, 3, 16), (32, 8, 128), (3, 1, 24)],
        [*DTYPES, torch.float16],
        [False, True, "wide"],
        [1, 3],
    ),
    ids=str,
    indirect=["processor"],
)
def test_rotation(processor, heads, dtype, normed, count) -> None:
    """As the reference has it; keys and values in their slots, and each row as if it were alone."""
    queries, groups, dim = heads
    qkv, angle = noise(ROWS, (queries + 2 * groups) * dim, dtype=dtype), noise(ROWS, 1, dim // 2)
    cos = torch.cat((angle, angle), dim=-1).cos().to(dtype)
    sin = torch.cat((-angle, angle), dim=-1).sin().to(dtype)
    of = torch.float32 if normed == "wide" else dtype
    norms = (noise(dim, dtype=of), noise(dim + 1, dtype=of)[1:].clone()) if normed else (None, None)
    slots = torch.randperm(2 * ROWS)[:ROWS]

    def turned(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (torch.zeros(2 * ROWS, groups, dim, dtype=dtype) for _ in range(2))
        turning, tables = qkv[part], (cos[part], sin[part])
        query = rotate_and_store(turning, *tables, keys, values, slots[part], norms[0], norms[1], 1e-5)
        return query, keys[slots[part]], values[slots[part]]

    with threads(count):
        found = turned(slice(None))
        with references():
            wanted = turned(slice(None))
        for mine, its in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, its, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
        for row in range(0, ROWS, 9):
            assert all(torch.equal(a[0], b[row]) for a, b in zip(turned(slice(row, row + 1)), found, strict=True))


@pytest.mark.parametrize(
    ("processor", "heads", "dtype", "stored"),
    pairwise(PROCESSORS, [(4, 2, 64), (9, 3, 16), (3, 1, 24)], [*DTYPES, torch.float16], STORED),
    ids=str,
    indirect=["processor"],
)
def test_keys_and_values_are_quantised_as_the_reference_says(processor, heads, dtype, stored) -> None:
    """Bit by bit: zeros, tiny, huge and wide heads, and such that hold no numbers, too; and each row as if alone."""
    queries, groups, dim = heads
    qkv, angle = noise(ROWS, (queries + 2 * groups) * dim, dtype=dtype), noise(ROWS, 1, dim // 2)
    qkv[1] = 0.0
    qkv[2] *= 1e-6
    qkv[3] *= 1e3
    qkv[4] *= (4 * noise(qkv.shape[1])).exp().to(dtype)
    qkv[5, -1], qkv[6, queries * dim] = torch.nan, torch.inf
    cos, sin = (torch.cat(part, dim=-1).to(dtype) for part in ((angle.cos(),) * 2, (-angle.sin(), angle.sin())))
    slots = torch.randperm(2 * ROWS)[:ROWS]

    def kept(part: slice) -> list[Tensor]:
        keys, values = (torch.zeros(2 * ROWS, groups, dim, dtype=stored) for _ in range(2))
        scales = torch.zeros(2 * ROWS, 2, groups)
        rotate_and_store(qkv[part], cos[part], sin[part], keys, values, slots[part], scales=scales)
        sizes = scales.view(torch.int32) & 0x7FFFFFFF  # NaN has a sign
        return [each[slots[part]] for each in (as_bytes(keys), as_bytes(values), sizes)]

    found = kept(slice(None))
    with references():
        assert all(torch.equal(mine, its) for mine, its in zip(found, kept(slice(None)), strict=True))
    for row in range(8):
        assert all(torch.equal(a[0], b[row]) for a, b in zip(kept(slice(row, row + 1)), found, strict=True))
