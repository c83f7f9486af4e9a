"""Norms in one launch, alone or after a residual addition, and that addition alone: one program per row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.kernels.segments import ROWS, as_read, product_at
from foresay.verifier.ops.records import Norm, Partials


@triton.jit
def inverse_rms(squares, WIDTH: tl.constexpr, eps):
    """``1 / sqrt(squares / WIDTH + eps)``, rounded like torch's, not approximated."""
    return tl.div_rn(1.0, tl.sqrt_rn(squares / WIDTH + eps))


@triton.jit
def weights_of(weight, shift, columns, inside, SHIFTED: tl.constexpr):
    """What a norm multiplies by, and what it adds if SHIFTED. They never change, and nobody else keeps them in the L2:
    they are asked for before anything else, their turn included."""
    factor = tl.load(weight + columns, inside, 0.0)
    return factor, tl.load(shift + columns, inside, 0.0) if SHIFTED else factor


@triton.jit
def normed(row, factor, shift, inside, eps, WIDTH: tl.constexpr, SHIFTED: tl.constexpr, CENTRED: tl.constexpr):
    """One row's norm, times ``factor``, plus ``shift`` if SHIFTED, in its dtype. CENTRED: its mean is subtracted."""
    wide = row.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.div_rn(tl.sum(wide, axis=0), WIDTH * 1.0), 0.0)
    scale = inverse_rms(tl.sum(wide * wide, axis=0), WIDTH, eps)
    if SHIFTED:
        # Said, and not left to the compiler, which could do it in one kernel and not in the next.
        value = tl.fma(as_weighted(wide * scale, factor, row.dtype), factor.to(tl.float32), shift.to(tl.float32))
    else:
        value = weighted(wide * scale, factor, row.dtype)
    return value.to(row.dtype)


@triton.jit
def as_weighted(value, weight, KIND: tl.constexpr):
    """``value`` as it is multiplied: in fp32, rounded to KIND before, unless the weight is wider."""
    if weight.dtype == KIND:
        value = value.to(KIND).to(tl.float32)
    return value


@triton.jit
def weighted(value, weight, KIND: tl.constexpr):
    """The product in fp32."""
    return as_weighted(value, weight, KIND) * weight.to(tl.float32)


@triton.jit(do_not_specialize=ROWS)
def norm_rows(x, y, bias, weight, shift, out, R, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
              NORM: tl.constexpr, SHIFTED: tl.constexpr, CENTRED: tl.constexpr, SEGMENTS: tl.constexpr,
              BIAS: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """x += SHARE y, a product with its bias, unless SHARE is 0; then out = norm(x) if NORM. One program a row."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if NORM:
        factor, offset = weights_of(weight, shift, columns, inside, SHIFTED)
    wait_turn(CHAINED)
    number = tl.program_id(0)
    start = number.to(tl.int64) * WIDTH
    row = tl.load(x + start + columns, inside, 0.0)
    if SHARE != 0.0:
        kind: tl.constexpr = row.dtype
        # The sum is rounded before it is normed: the next layer reads it back from memory.
        added = product_at(y, bias, number, columns, inside, R, kind, WIDTH, SEGMENTS, BIAS)
        if SHARE != 1.0:
            added = (added.to(tl.float32) * SHARE).to(kind)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(kind)
        tl.store(x + start + columns, row, inside)
    if NORM:
        made = normed(row, factor, offset, inside, eps, WIDTH, SHIFTED, CENTRED)
        tl.store(out + start + columns, made, inside)


def norm(x: Tensor, how: Norm) -> Tensor:
    """As :func:`foresay.verifier.ops.norm.norm`."""
    rows = x.reshape(-1, x.shape[-1])
    return _launch(rows, None, how, 0.0).view(x.shape)


def add_norm(x: Tensor, y: Tensor | Partials, how: Norm | None, share: float = 1.0) -> Tensor:
    """As :func:`foresay.verifier.ops.norm.add_norm`."""
    whole = y if isinstance(y, Tensor) else y.sums
    assert x.is_contiguous() and whole.is_contiguous(), "rows lie one behind the other"
    assert x.shape == whole.shape[-2:], "x and y are of one shape"
    return _launch(x, y, how, share)


def _launch(x: Tensor, y: Tensor | Partials | None, how: Norm | None, share: float) -> Tensor:
    width = x.shape[-1]
    rows = x.numel() // width
    # Triton compiles other code for other alignments, and it may sum in another order.
    assert x.data_ptr() % 16 == 0, "rows begin on 16 bytes, as every new tensor does"
    out = x if how is None else torch.empty_like(x)
    added, about = as_read(x if y is None else y)
    weights, norming = as_normed(how, x)
    if rows:
        norm_rows[(rows,)](
            x, *added, *weights, out, rows, WIDTH=width, BLOCK=block(width), SHARE=share, **norming, **about,
            num_warps=warps(width), **chained(),
        )  # fmt: skip
    return out


def as_normed(how: Norm | None, otherwise: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """A norm as kernels take it that call :func:`normed` if NORM: pointers, which are ``otherwise`` where nothing is
    read; eps and constants."""
    if how is None:
        return (otherwise, otherwise), {"eps": 0.0, "NORM": False, "SHIFTED": False, "CENTRED": False}
    constants = {"NORM": True, "SHIFTED": how.bias is not None, "CENTRED": how.centred}
    return (how.weight, how.weight if how.bias is None else how.bias), {"eps": how.eps} | constants


def block(width: int) -> int:
    """Columns of a program: the whole row."""
    return int(triton.next_power_of_2(width))


def warps(width: int) -> int:
    """By the width alone: the order of a row's sum must not depend on how many rows there are."""
    return 8 if width > 1024 else 4 if width > 256 else 1
