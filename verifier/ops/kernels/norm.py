"""RMSNorm in one launch, alone or behind a residual addition: one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.segments import ROWS, as_read, product_at
from foresay.verifier.ops.linear import Partials


@triton.jit
def inverse_rms(squares, WIDTH: tl.constexpr, eps):
    """``1 / sqrt(squares / WIDTH + eps)``, rounded like torch's, not approximated."""
    return tl.div_rn(1.0, tl.sqrt_rn(squares / WIDTH + eps))


@triton.jit
def normed(row, weight, columns, inside, eps, WIDTH: tl.constexpr):
    """One row's norm, times ``weight``, in its dtype."""
    wide = row.to(tl.float32)
    scale = inverse_rms(tl.sum(wide * wide, axis=0), WIDTH, eps)
    return weighted(wide * scale, tl.load(weight + columns, inside, 0.0), row.dtype).to(row.dtype)


@triton.jit
def weighted(value, weight, KIND: tl.constexpr):
    """``value * weight`` in fp32, ``value`` rounded to KIND before, unless the weight is wider."""
    if weight.dtype == KIND:
        value = value.to(KIND).to(tl.float32)
    return value * weight.to(tl.float32)


@triton.jit(do_not_specialize=ROWS)
def norm_rows(x, y, bias, weight, out, R, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
              SEGMENTS: tl.constexpr, BIAS: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """out = norm(x) * weight, or x += y before it, a product with its bias; one program a row."""
    wait_turn(CHAINED)
    number = tl.program_id(0)
    start = number.to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(x + start + columns, inside, 0.0)
    if ADD:
        kind: tl.constexpr = row.dtype
        # The sum is rounded before it is normed: the next layer reads it back from memory.
        added = product_at(y, bias, number, columns, inside, R, kind, WIDTH, SEGMENTS, BIAS)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(kind)
        tl.store(x + start + columns, row, inside)
    tl.store(out + start + columns, normed(row, weight, columns, inside, eps, WIDTH), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`foresay.verifier.ops.norm.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    _launch(rows, None, weight, out, eps)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, y: Tensor | Partials, weight: Tensor, eps: float) -> Tensor:
    """As :func:`foresay.verifier.ops.norm.add_rms_norm`."""
    whole = y if isinstance(y, Tensor) else y.sums
    assert x.is_contiguous() and whole.is_contiguous(), "rows lie one behind the other"
    assert x.shape == whole.shape[-2:], "x and y are of one shape"
    out = torch.empty_like(x)
    _launch(x, y, weight, out, eps)
    return out


def _launch(x: Tensor, y: Tensor | Partials | None, weight: Tensor, out: Tensor, eps: float) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    # Triton compiles other code for other alignments, and it may sum in another order.
    assert x.data_ptr() % 16 == 0, "rows begin on 16 bytes, as every new tensor does"
    added, about = as_read(x if y is None else y)
    if rows:
        norm_rows[(rows,)](
            x, *added, weight, out, rows, eps, WIDTH=width, BLOCK=block(width), ADD=y is not None, **about,
            num_warps=warps(width), **chained(),
        )  # fmt: skip


def block(width: int) -> int:
    """Columns of a program: the whole row."""
    return int(triton.next_power_of_2(width))


def warps(width: int) -> int:
    """By the width alone: the order of a row's sum must not depend on how many rows there are."""
    return 8 if width > 1024 else 4 if width > 256 else 1
