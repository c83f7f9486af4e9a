"""The end of a product: its segments are added in order, then the bias, and the sum is rounded.

That is done by whoever reads the product next, where a kernel of ours does: the norm behind an output, the rotation of
queries and keys. Others get it from a launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn
from foresay.verifier.ops.launch import as_read
from foresay.verifier.ops.records import Gate, Partials, turns_of

#: A kernel is not compiled again for numbers of rows that are 1 or even.
ROWS = ("R",)
_WIDTH = 256


@triton.jit
def finished(total, bias, columns, inside, kind: tl.constexpr, BIAS: tl.constexpr):
    """Sums plus bias, rounded. total: fp32 of the shape of ``columns``, which are outputs."""
    if BIAS:
        total = total + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return total.to(kind)


@triton.jit
def product_at(product, bias, row, columns, inside, R, kind: tl.constexpr, OUTER: tl.constexpr,
               SEGMENTS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """One row's outputs ``columns`` of a product, zeros outside.

    product: [R, OUTER] of ``kind`` if there is one segment, else fp32[SEGMENTS, R, OUTER].
    """
    where = row.to(tl.int64) * OUTER + columns
    if SEGMENTS == 1:
        return tl.load(product + where, inside, 0.0)
    total = tl.load(product + where, inside, 0.0)
    for segment in tl.static_range(1, SEGMENTS):
        total = total + tl.load(product + tl.cast(R, tl.int64) * (segment * OUTER) + where, inside, 0.0)
    return finished(total, bias, columns, inside, kind, BIAS)


#: What is done to a product, as a number for kernels: above zero to its halves.
GATES: dict[Gate, int] = {"": 0, "silu": 1, "gelu": 2, "relu2": -1}


@triton.jit
def opened(gate, GATED: tl.constexpr):
    """What a gate goes through, rounded to the dtype it came in. GELU is ``x * sigmoid(2 y)`` where tanh's form has
    ``x * (1 + tanh(y)) / 2``."""
    wide = gate.to(tl.float32)
    steep = wide
    if GATED == 2:
        steep = 1.5957691216057308 * (wide + 0.044715 * (wide * wide * wide))
    return (wide / (1.0 + tl.exp(-steep))).to(gate.dtype)


@triton.jit
def gated(gate, up, GATED: tl.constexpr):
    """``act(gate) * up``, rounded."""
    return (opened(gate, GATED).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def squared(value):
    """``relu(value) ** 2``, rounded."""
    kept = value.to(tl.float32)
    kept = tl.where(kept < 0.0, 0.0, kept)
    return (kept * kept).to(value.dtype)


@triton.jit(do_not_specialize=ROWS)
def add_segments(product, bias, out, R, OUTER: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
                 GATED: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R, width of out / WIDTH). out: [R, O], or [R, O / 2] of halves."""
    wait_turn(CHAINED)
    row, columns = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    width: tl.constexpr = OUTER // 2 if GATED > 0 else OUTER
    kind: tl.constexpr = out.dtype.element_ty
    inside = columns < width
    result = product_at(product, bias, row, columns, inside, R, kind, OUTER, SEGMENTS, BIAS)
    if GATED < 0:
        result = squared(result)
    if GATED > 0:
        up = product_at(product, bias, row, columns + width, inside, R, kind, OUTER, SEGMENTS, BIAS)
        result = gated(result, up, GATED)
    tl.store(out + row.to(tl.int64) * width + columns, result, mask=inside)


def finish(product: Partials, dtype: torch.dtype, gate: Gate = "") -> Tensor:
    """As :func:`foresay.verifier.ops.linear.finish`."""
    pointers, about = as_read(product)
    rows, outer = product.sums.shape[1:]
    out = product.sums.new_empty(rows, outer // turns_of(gate), dtype=dtype)
    add_segments[(rows, triton.cdiv(out.shape[1], _WIDTH))](
        *pointers, out, rows, OUTER=outer, **about, GATED=GATES[gate], WIDTH=_WIDTH, num_warps=2,
        enable_fp_fusion=False, **chained(),
    )  # fmt: skip
    return out
