"""Skinny linears in Triton: the weight is streamed once, 64 of its rows against up to 64 rows of x at a time.

    weight [O, K]   64 outputs x (segment 0 | segment 1 | ...)   one program each, for up to 64 rows of x

A segment is a fixed range of the inner width, chosen by the weight's shape alone. Its sum is one chain of MMAs in order
of k; segments are added in order by a second launch, so nothing is added by whoever comes first. One row and a prefill
chunk run the same compiled code on tiles of the same shape, so a row's bits do not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Outputs of a program, and rows of x: one tile, whatever the number of rows.
TILE = 64
#: Inner positions of one step. A segment holds a whole number of them.
BLOCK_K = 128
#: Programs wanted for one tile of rows: two for each processor of the largest GPUs of today.
_PROGRAMS = 264
#: Blocks a segment holds at least: shorter ones spend their time on filling the pipeline.
_LEAST_BLOCKS = 4
#: A kernel is not compiled again for numbers of rows that are 1 or even.
_ROWS = ("R",)
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}


def segments_of(outer: int, inner: int) -> tuple[int, int]:
    """How many segments a weight [outer, inner] is cut into, and the inner width of each; rows have no say in it."""
    blocks = triton.cdiv(inner, BLOCK_K)
    wanted = max(1, _PROGRAMS // triton.cdiv(outer, TILE))
    length = max(triton.cdiv(blocks, wanted), min(_LEAST_BLOCKS, blocks))
    return triton.cdiv(blocks, length), length * BLOCK_K


@triton.jit
def _tile_product(x, weight, row, column, begin, end, R, OUTER: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
                  BLOCK_K: tl.constexpr):  # fmt: skip
    """fp32[TILE outputs, TILE rows]: sums over begin .. end - 1, one chain of MMAs in order of k."""
    rows, columns = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
    total = tl.full([TILE, TILE], 0.0, tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        inside = inner < K
        where = columns.to(tl.int64)[:, None] * K + inner[None, :]
        left = tl.load(weight + where, mask=(columns < OUTER)[:, None] & inside[None, :], other=0.0)
        where = rows.to(tl.int64)[:, None] * K + inner[None, :]
        right = tl.load(x + where, mask=(rows < R)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit
def _silu(gate):
    """silu, rounded to the dtype it came in."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)


@triton.jit
def _finished(total, bias, columns, outer, kind: tl.constexpr, BIAS: tl.constexpr):
    """Sums plus bias, rounded. total: fp32[M, N], whose first dimension is the outputs ``columns``."""
    if BIAS:
        total = total + tl.load(bias + columns, mask=columns < outer, other=0.0).to(tl.float32)[:, None]
    return total.to(kind)


@triton.jit(do_not_specialize=_ROWS)
def linear_tiles(x, weight, bias, residual, out, R, OUTER: tl.constexpr, K: tl.constexpr, SEGMENT: tl.constexpr,
                 BIAS: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Grid (O / TILE, R / TILE, segments). out: [R, O], finished; or fp32[segments, R, O] where there are several."""
    column, row, part = tl.program_id(0) * TILE, tl.program_id(1) * TILE, tl.program_id(2)
    begin = part * SEGMENT
    end = tl.minimum(begin + SEGMENT, K)
    total = _tile_product(x, weight, row, column, begin, end, R, OUTER, K, TILE, BLOCK_K)
    rows, columns = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
    kind: tl.constexpr = out.dtype.element_ty
    where = rows.to(tl.int64)[None, :] * OUTER + columns[:, None]
    inside = (columns < OUTER)[:, None] & (rows < R)[None, :]
    result = _finished(total, bias, columns, OUTER, kind, BIAS)
    if RESIDUAL:
        stream = tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + stream).to(kind)
    tl.store(out + part.to(tl.int64) * R * OUTER + where, result, mask=inside)


@triton.jit(do_not_specialize=_ROWS)
def gated_tiles(x, weight, bias, out, R, INNER: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr,
                BLOCK_K: tl.constexpr):  # fmt: skip
    """Grid (I / TILE, R / TILE). weight: [2I, K]. out: [R, I], the activation of both halves."""
    column, row = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    gate = _tile_product(x, weight, row, column, 0, K, R, INNER, K, TILE, BLOCK_K)
    up = _tile_product(x, weight + tl.cast(INNER, tl.int64) * K, row, column, 0, K, R, INNER, K, TILE, BLOCK_K)
    rows, columns = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
    kind: tl.constexpr = out.dtype.element_ty
    opened = _silu(_finished(gate, bias, columns, INNER, kind, BIAS))
    up = _finished(up, bias + INNER, columns, INNER, kind, BIAS)
    result = (opened.to(tl.float32) * up.to(tl.float32)).to(kind)
    inside = (columns < INNER)[:, None] & (rows < R)[None, :]
    tl.store(out + rows.to(tl.int64)[None, :] * INNER + columns[:, None], result, mask=inside)


@triton.jit
def _segment_sum(partials, row, columns, inside, R, OUTER: tl.constexpr, SEGMENTS: tl.constexpr):
    """fp32[N, 1]: the segments of one row, added in order."""
    where = row.to(tl.int64) * OUTER + columns
    total = tl.load(partials + where, mask=inside, other=0.0)
    for segment in tl.static_range(1, SEGMENTS):
        total = total + tl.load(partials + tl.cast(R, tl.int64) * (segment * OUTER) + where, mask=inside, other=0.0)
    return total[:, None]


@triton.jit(do_not_specialize=_ROWS)
def add_segments(partials, bias, residual, out, R, OUTER: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
                 RESIDUAL: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Grid (R, width of out / WIDTH). partials: fp32[SEGMENTS, R, O]. out: [R, O], or [R, O / 2] if gated."""
    row, columns = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    kind: tl.constexpr = out.dtype.element_ty
    if GATED:
        half = OUTER // 2
        inside = columns < half
        gate = _segment_sum(partials, row, columns, inside, R, OUTER, SEGMENTS)
        up = _segment_sum(partials, row, columns + half, inside, R, OUTER, SEGMENTS)
        opened = _silu(_finished(gate, bias, columns, half, kind, BIAS))
        up = _finished(up, bias + half, columns, half, kind, BIAS)
        result = (opened.to(tl.float32) * up.to(tl.float32)).to(kind)
        where = row.to(tl.int64) * half + columns
    else:
        inside = columns < OUTER
        result = _finished(
            _segment_sum(partials, row, columns, inside, R, OUTER, SEGMENTS), bias, columns, OUTER, kind, BIAS
        )
        where = row.to(tl.int64) * OUTER + columns
        if RESIDUAL:
            stream = tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)[:, None]
            result = (result.to(tl.float32) + stream).to(kind)
    tl.store(out + where[:, None], result, mask=inside[:, None])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """As :func:`verifier.ops.linear.linear`."""
    _check(x, weight)
    segments, segment = segments_of(*weight.shape)
    out = x.new_empty(len(x), len(weight))
    if segments > 1:
        return _add(_partials(x, weight, segments, segment), bias, residual, out, gated=False)
    grid = (triton.cdiv(len(weight), TILE), triton.cdiv(len(x), TILE), 1)
    linear_tiles[grid](
        x, weight, _given(bias, x), _given(residual, x), out, len(x), len(weight), x.shape[1], segment,
        bias is not None, residual is not None, TILE, BLOCK_K, **OPTIONS,
    )  # fmt: skip
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As :func:`verifier.ops.linear.gated_linear`."""
    _check(x, weight)
    segments, segment = segments_of(*weight.shape)
    inner = len(weight) // 2
    out = x.new_empty(len(x), inner)
    if segments > 1:
        return _add(_partials(x, weight, segments, segment), bias, None, out, gated=True)
    grid = (triton.cdiv(inner, TILE), triton.cdiv(len(x), TILE))
    gated_tiles[grid](
        x, weight, _given(bias, x), out, len(x), inner, x.shape[1], bias is not None, TILE, BLOCK_K, **OPTIONS
    )
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.is_contiguous() and weight.is_contiguous(), "rows lie one behind the other"
    assert x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0, "they begin on 16 bytes, as every new tensor does"


def _given(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel wants a pointer even where it reads nothing."""
    return instead if tensor is None else tensor


def _partials(x: Tensor, weight: Tensor, segments: int, segment: int) -> Tensor:
    """fp32[segments, R, O]: the sum of each segment by itself."""
    partials = x.new_empty(segments, len(x), len(weight), dtype=torch.float32)
    grid = (triton.cdiv(len(weight), TILE), triton.cdiv(len(x), TILE), segments)
    linear_tiles[grid](
        x, weight, x, x, partials, len(x), len(weight), x.shape[1], segment, False, False, TILE, BLOCK_K, **OPTIONS
    )
    return partials


def _add(partials: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, gated: bool) -> Tensor:
    segments, rows, outer = partials.shape
    width = 256
    add_segments[(rows, triton.cdiv(out.shape[1], width))](
        partials, _given(bias, out), _given(residual, out), out, rows, outer, segments, bias is not None,
        residual is not None, gated, width, **OPTIONS | {"num_warps": 2},
    )  # fmt: skip
    return out
