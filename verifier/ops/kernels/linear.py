"""Skinny linears in Triton: the weight is streamed once, 64 of its rows against up to 64 rows of x at a time.

    weight [O, K]   64 outputs x (segment 0 | segment 1 | ...)   one program each, for up to 64 rows of x

A segment is a fixed range of the inner width, chosen by the weight's shape alone. Its sum is one chain of MMAs in order
of k (:mod:`verifier.ops.kernels.tile`); segments are added in order by a second launch, so nothing is added by whoever
comes first. One row and a prefill chunk run the same compiled code on tiles of the same shape, so a row's bits do not
depend on the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifier.ops.kernels.blocked import BlockedWeight
from verifier.ops.kernels.tile import tile_product

#: Outputs of a program, and rows of x: one tile, whatever the number of rows.
TILE = 64
#: Programs wanted for one tile of rows: two for each processor of the largest GPUs of today.
_PROGRAMS = 264
#: Inner positions a segment holds at least: shorter ones spend their time on filling the pipeline.
_LEAST = 512
#: A kernel is not compiled again for numbers of rows that are 1 or even.
_ROWS = ("R",)
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
#: Blocks of few bits that are on their way at once, by their length: they are small, and a GPU of compute capability
#: 8.9 has 99 KB for them and the rows.
_STAGES = {128: 4, 64: 6, 32: 8, 16: 8}


def segments_of(outer: int, blocks: int, block: int) -> tuple[int, int]:
    """How many segments a weight of so many outputs is cut into, and the inner width of each, whole blocks; rows have
    no say in it. blocks: of the inner width. block: numbers of one.
    """
    wanted = max(1, _PROGRAMS // triton.cdiv(outer, TILE))
    length = max(triton.cdiv(blocks, wanted), min(_LEAST // block, blocks))
    return triton.cdiv(blocks, length), length * block


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
def linear_tiles(x, weight, scales, offsets, steps, bias, residual, out, R, OUTER: tl.constexpr, K: tl.constexpr,
                 TILE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
                 OFFSETS: tl.constexpr, WIDTH: tl.constexpr, SEGMENT: tl.constexpr, BIAS: tl.constexpr,
                 RESIDUAL: tl.constexpr):  # fmt: skip
    """Grid (O / TILE, R / TILE, segments). out: [R, O], finished; or fp32[segments, R, O] where there are several.
    WIDTH: the filled inner width."""
    part = tl.program_id(2)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    begin = part * SEGMENT
    end = tl.minimum(begin + SEGMENT, WIDTH)
    total = tile_product(x, weight, scales, offsets, steps, rows, columns, begin, end, R, OUTER, K, TILE, BLOCK, KIND,
                         GROUPS, SPAN, OFFSETS)  # fmt: skip
    kind: tl.constexpr = out.dtype.element_ty
    where = rows.to(tl.int64)[None, :] * OUTER + columns[:, None]
    inside = (columns < OUTER)[:, None] & (rows < R)[None, :]
    result = _finished(total, bias, columns, OUTER, kind, BIAS)
    if RESIDUAL:
        stream = tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + stream).to(kind)
    tl.store(out + part.to(tl.int64) * R * OUTER + where, result, mask=inside)


@triton.jit(do_not_specialize=_ROWS)
def gated_tiles(x, weight, scales, offsets, steps, bias, out, R, OUTER: tl.constexpr, K: tl.constexpr,
                TILE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
                OFFSETS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Grid (I / TILE, R / TILE). weight: of 2 I = O outputs. out: [R, I], the activation of both halves."""
    half: tl.constexpr = OUTER // 2
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tile_product(x, weight, scales, offsets, steps, rows, columns, 0, WIDTH, R, OUTER, K, TILE, BLOCK, KIND,
                        GROUPS, SPAN, OFFSETS)  # fmt: skip
    up = tile_product(x, weight, scales, offsets, steps, rows, columns + half, 0, WIDTH, R, OUTER, K, TILE, BLOCK,
                      KIND, GROUPS, SPAN, OFFSETS)  # fmt: skip
    kind: tl.constexpr = out.dtype.element_ty
    opened = _silu(_finished(gate, bias, columns, half, kind, BIAS))
    up = _finished(up, bias + half, columns, half, kind, BIAS)
    result = (opened.to(tl.float32) * up.to(tl.float32)).to(kind)
    inside = (columns < half)[:, None] & (rows < R)[None, :]
    tl.store(out + rows.to(tl.int64)[None, :] * half + columns[:, None], result, mask=inside)


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
    out = x.new_empty(len(x), len(weight))
    multiply(x, BlockedWeight.of(weight, bias), out, residual)
    return out


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As :func:`verifier.ops.linear.gated_linear`."""
    out = x.new_empty(len(x), len(weight) // 2)
    multiply(x, BlockedWeight.of(weight, bias, gated=True), out)
    return out


def multiply(x: Tensor, weight: BlockedWeight, out: Tensor, residual: Tensor | None = None) -> None:
    """``out = x @ weight.T + bias``, rounded, then ``+ residual``, rounded again; if gated ``silu(gate) * up``.

    x: [R, K]. out: [R, O], or [R, O / 2] if gated, of x's dtype or fp32. residual: [R, O] of out's.
    """
    _check(x, weight.values)
    segments, segment = segments_of(weight.outer, weight.blocks, weight.block)
    if segments > 1:
        _add(_partials(x, weight, segments, segment), weight.bias, residual, out, weight.gated)
        return
    grid, has_bias = (triton.cdiv(out.shape[1], TILE), triton.cdiv(len(x), TILE), 1), weight.bias is not None
    pointers, about, options = _pointers(weight, x), _about(weight), _options(weight)
    if weight.gated:
        gated_tiles[grid](*pointers, _given(weight.bias, x), out, len(x), *about, has_bias, **options)
    else:
        beside = _given(weight.bias, x), _given(residual, x)
        linear_tiles[grid](*pointers, *beside, out, len(x), *about, segment, has_bias, residual is not None, **options)


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.is_contiguous() and weight.is_contiguous(), "rows lie one behind the other"
    assert x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0, "they begin on 16 bytes, as every new tensor does"


def _given(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel wants a pointer even where it reads nothing."""
    return instead if tensor is None else tensor


def _pointers(weight: BlockedWeight, x: Tensor) -> tuple[Tensor, ...]:
    """x, values, scales, offsets and steps."""
    return x, weight.values, *(_given(one, x) for one in (weight.scales, weight.offsets, weight.steps))


def _about(weight: BlockedWeight) -> tuple[Any, ...]:
    """What a tile's product is compiled for: OUTER to WIDTH."""
    offsets = "minimums" if weight.minimums else "none" if weight.offsets is None else "zeros"
    span = weight.groups // weight.spans if weight.spans else 0
    width = weight.blocks * weight.block
    return weight.outer, weight.inner, TILE, weight.block, weight.kind, weight.groups, span, offsets, width


def _options(weight: BlockedWeight) -> dict[str, Any]:
    return OPTIONS if weight.scales is None else OPTIONS | {"num_stages": _STAGES[weight.block]}


def _partials(x: Tensor, weight: BlockedWeight, segments: int, segment: int) -> Tensor:
    """fp32[segments, R, O]: the sum of each segment by itself."""
    partials = x.new_empty(segments, len(x), weight.outer, dtype=torch.float32)
    grid = (triton.cdiv(weight.outer, TILE), triton.cdiv(len(x), TILE), segments)
    linear_tiles[grid](
        *_pointers(weight, x), x, x, partials, len(x), *_about(weight), segment, False, False, **_options(weight)
    )
    return partials


def _add(partials: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, gated: bool) -> None:
    segments, rows, outer = partials.shape
    width = 256
    add_segments[(rows, triton.cdiv(out.shape[1], width))](
        partials, _given(bias, out), _given(residual, out), out, rows, outer, segments, bias is not None,
        residual is not None, gated, width, **OPTIONS | {"num_warps": 2},
    )  # fmt: skip
