"""RMSNorm in one launch, alone or behind a residual addition: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def inverse_rms(squares, WIDTH: tl.constexpr, eps):
    """``1 / sqrt(squares / WIDTH + eps)``, rounded like torch's, not approximated."""
    return tl.div_rn(1.0, tl.sqrt_rn(squares / WIDTH + eps))


@triton.jit
def norm_rows(x, y, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """out = norm(x) * weight, or x += y before it; one program a row."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(x + start + columns, inside, 0.0)
    kind: tl.constexpr = row.dtype
    wide = row.to(tl.float32)
    if ADD:
        # The sum is rounded before it is normed: the next layer reads it back from memory.
        row = (wide + tl.load(y + start + columns, inside, 0.0).to(tl.float32)).to(kind)
        tl.store(x + start + columns, row, inside)
        wide = row.to(tl.float32)
    scale = inverse_rms(tl.sum(wide * wide, axis=0), WIDTH, eps)
    normed = (wide * scale).to(kind).to(tl.float32) * tl.load(weight + columns, inside, 0.0).to(tl.float32)
    tl.store(out + start + columns, normed.to(kind), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`verifier.ops.norm.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    _launch(rows, rows, weight, out, eps, add=False)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`verifier.ops.norm.add_rms_norm`."""
    assert x.is_contiguous() and y.is_contiguous() and x.shape == y.shape, "x and y are whole tensors of one shape"
    out = torch.empty_like(x)
    _launch(x, y, weight, out, eps, add=True)
    return out


def _launch(x: Tensor, y: Tensor, weight: Tensor, out: Tensor, eps: float, add: bool) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    # Triton compiles other code for other alignments, and it may sum in another order.
    assert x.data_ptr() % 16 == 0, "rows begin on 16 bytes, as every new tensor does"
    if rows:
        norm_rows[(rows,)](x, y, weight, out, eps, width, block(width), ADD=add, num_warps=warps(width))


def block(width: int) -> int:
    """Columns of a program: the whole row."""
    return int(triton.next_power_of_2(width))


def warps(width: int) -> int:
    """By the width alone: the order of a row's sum must not depend on how many rows there are."""
    return 8 if width > 1024 else 4 if width > 256 else 1
