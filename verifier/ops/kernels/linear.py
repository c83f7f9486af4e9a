"""Linears in Triton: 64 outputs against 16, 32 or 64 rows of x at a time; of a prompt's chunk 128 against 128.

    weight [O, K]   outputs of a tile x (segment 0 | segment 1 | ...)   one program each, for a tile's rows of x

A segment is a fixed range of the inner width, chosen only by the weight's shape. Its sum is one chain of MMAs in order
of k (:mod:`foresay.verifier.ops.kernels.tile`); segments are added in order by the reader of the product, or by one
program for each tile if there are enough of these, so the order never depends on which one finishes first. Programs for
other rows of the same outputs run concurrently: a weight is read from memory once.

The beginning of a weight is prefetched into the L2 before its product starts, by the product's own programs, which are
launched early and wait. More of it, or the next product's too, makes a step slower on an H200 (bench/LOG.md).

A gate and its up output are I outputs apart. A tile of a gated weight alternates eight of the former and eight of the
latter: so they end up in one thread, and it is a product like any other.

At the end of a product its segments are added in order, then the bias, and the sum is rounded: by the next reader, if
it is one of our kernels: the norm after an output, the rotation of queries and keys. For others this is a separate
launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from foresay.verifier.ops.kernels.blocked import FLOATS, TILE, BlockedWeight
from foresay.verifier.ops.kernels.pdl import capability, gdc_wait, pdl_args
from foresay.verifier.ops.kernels.tile import bring_tile, columns_of, float_block, nothing, tile_product
from foresay.verifier.ops.launch import as_read
from foresay.verifier.ops.records import Gate, SplitKSums, gate_parts

#: A kernel is not compiled again for numbers of rows that are 1 or even, nor for segments that were added already.
ROWS, APART = ("R",), ("apart",)
_WIDTH = 256


@triton.jit
def finished(total, bias, columns, inside, kind: tl.constexpr, BIAS: tl.constexpr):
    """Sums plus bias, rounded. total: fp32 of the shape of ``columns``, which are outputs."""
    if BIAS:
        total = total + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return total.to(kind)


@triton.jit
def product_at(product, bias, row, columns, inside, apart, kind: tl.constexpr, OUTER: tl.constexpr,
               SEGMENTS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """One row's outputs ``columns`` of a product, zeros outside.

    product: [R, OUTER] of ``kind`` if there is one segment, else fp32[SEGMENTS, R, OUTER]. apart: numbers from one
    segment to the next; 0: they were added already, and nothing is read of the others.
    """
    where = row.to(tl.int64) * OUTER + columns
    if SEGMENTS == 1:
        return tl.load(product + where, inside, 0.0)
    total = tl.load(product + where, inside, 0.0)
    for segment in tl.static_range(1, SEGMENTS):
        more = tl.load(product + tl.cast(apart, tl.int64) * segment + where, inside & (apart > 0), 0.0)
        total = tl.where(apart > 0, total + more, total)
    return finished(total, bias, columns, inside, kind, BIAS)


#: The activation of a product, as a number for kernels: above zero it applies to its halves.
GATES: dict[Gate, int] = {"": 0, "silu": 1, "gelu": 2, "clamped": 3, "relu2": -1}


@triton.jit
def opened(gate, GATED: tl.constexpr):
    """The activation of a gate, rounded to its dtype. GELU is ``x * sigmoid(2 y)``, which equals the tanh form
    ``x * (1 + tanh(y)) / 2``."""
    wide = gate.to(tl.float32)
    steep = wide
    if GATED == 2:
        steep = 1.5957691216057308 * (wide + 0.044715 * (wide * wide * wide))
    return (wide / (1.0 + tl.exp(-steep))).to(gate.dtype)


@triton.jit
def _clamped(gate, up):
    """gpt-oss's activation of both halves, rounded after each step."""
    kind: tl.constexpr = gate.dtype
    wide, other = gate.to(tl.float32), up.to(tl.float32)
    wide = tl.where(wide > 7.0, 7.0, wide)
    other = tl.where(other > 7.0, 7.0, tl.where(other < -7.0, -7.0, other))
    wide = (wide * (1.0 / (1.0 + tl.exp(wide * -1.702))).to(kind).to(tl.float32)).to(kind)
    return ((other + 1.0).to(kind).to(tl.float32) * wide.to(tl.float32)).to(kind)


@triton.jit
def gated(gate, up, GATED: tl.constexpr):
    """``act(gate) * up``, rounded."""
    if GATED == 3:
        return _clamped(gate, up)
    return (opened(gate, GATED).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def squared(value):
    """``relu(value) ** 2``, rounded."""
    kept = value.to(tl.float32)
    kept = tl.where(kept < 0.0, 0.0, kept)
    return (kept * kept).to(value.dtype)


@triton.jit(do_not_specialize=APART)
def add_segments(product, bias, out, apart, OUTER: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
                 GATED: tl.constexpr, WIDTH: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R, width of out / WIDTH). out: [R, O], or [R, O / 2] of halves."""
    gdc_wait(USE_GDC)
    row, columns = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    width: tl.constexpr = OUTER // 2 if GATED > 0 else OUTER
    kind: tl.constexpr = out.dtype.element_ty
    inside = columns < width
    result = product_at(product, bias, row, columns, inside, apart, kind, OUTER, SEGMENTS, BIAS)
    if GATED < 0:
        result = squared(result)
    if GATED > 0:
        up = product_at(product, bias, row, columns + width, inside, apart, kind, OUTER, SEGMENTS, BIAS)
        result = gated(result, up, GATED)
    tl.store(out + row.to(tl.int64) * width + columns, result, mask=inside)


def finish(product: SplitKSums, dtype: torch.dtype, gate: Gate = "") -> Tensor:
    """As :func:`foresay.verifier.ops.linear.finish`."""
    pointers, apart, about = as_read(product)
    rows, outer = product.sums.shape[1:]
    out = product.sums.new_empty(rows, outer // gate_parts(gate), dtype=dtype)
    add_segments[(rows, triton.cdiv(out.shape[1], _WIDTH))](
        *pointers, out, apart, OUTER=outer, **about, GATED=GATES[gate], WIDTH=_WIDTH, num_warps=2,
        enable_fp_fusion=False, **pdl_args(),
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's rows, outputs and warps; stages: blocks of floats loaded ahead."""

    rows: int
    outputs: int = TILE
    warps: int = 4
    stages: int = 4

    def grid(self, rows: int, outer: int) -> tuple[int, int]:
        """The grid for these rows and outputs."""
        return triton.cdiv(rows, self.rows), triton.cdiv(outer, self.outputs)


#: Tiles for up to 64 rows; a GPU of compute capability 8.9 has 99 KB of shared memory.
SMALL = (Tile(16), Tile(32), Tile(64, stages=3))
#: The tile for more rows, from compute capability 9.0 on, if blocks are long; and for 64 of an expert.
LARGE, _BLOCK = Tile(128, 128, warps=8, stages=3), 128
_OF_EXPERT = Tile(64, 128, warps=8, stages=3)
#: Blocks that each program prefetches of its own weight; 0: none.
AHEAD = 2
#: Whether a program of one segment of floats loads its first block before its turn.
EARLY = False
#: Programs that keep all SMs busy: with this many, one program adds up all segments of its outputs. And the rows from
#: which on that no longer changes: more rows launch the same as a full prompt chunk.
ENOUGH, _FULL = 128, 512
#: Stages of quantised blocks, by their length: they are small.
_STAGES = {128: 4, 64: 6, 32: 8, 16: 8}


@triton.jit
def _halved(pairs):
    """Split one into two of [TILE / 2, ROWS]: alternating groups of eight outputs."""
    tile: tl.constexpr = pairs.shape[0]
    rows: tl.constexpr = pairs.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(pairs, [tile // 16, 2, 8, rows]), [0, 2, 3, 1]))
    return tl.reshape(first, [tile // 2, rows]), tl.reshape(second, [tile // 2, rows])


@triton.jit
def tile_sums(x, weight, scales, offsets, steps, rows, columns, start, end, R, OUTER: tl.constexpr, K: tl.constexpr,
              BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
              OFFSETS: tl.constexpr, SEGMENT: tl.constexpr, ALL: tl.constexpr, early=None):  # fmt: skip
    """fp32[TILE, ROWS]: the sums over start .. end - 1, which are ALL segments, added in order, or one. early: of one
    its first block, or None."""
    if ALL:
        sums = nothing(columns.shape[0], rows.shape[0])
        for begin in tl.range(start, end, SEGMENT):
            more = tile_product(x, weight, scales, offsets, steps, rows, columns, begin,
                                tl.minimum(begin + SEGMENT, end), R, OUTER, K, BLOCK, KIND, GROUPS, SPAN,
                                OFFSETS)  # fmt: skip
            sums = sums + more
        return sums
    return tile_product(x, weight, scales, offsets, steps, rows, columns, start, end, R, OUTER, K, BLOCK, KIND, GROUPS,
                        SPAN, OFFSETS, early)  # fmt: skip


@triton.jit
def activated(sums, bias, columns, kind: tl.constexpr, OUTER: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr):
    """A tile's sums plus bias, with their activation."""
    result = finished(sums, bias, columns[:, None], (columns < OUTER)[:, None], kind, BIAS)
    if GATED < 0:
        result = squared(result)
    if GATED > 0:
        gate, up = _halved(result)
        result = gated(gate, up, GATED)
    return result


@triton.jit
def own_numbers(tile, TILE: tl.constexpr, GATED: tl.constexpr):
    """The numbers of a row that a tile makes: half as many as outputs if these have gates."""
    width: tl.constexpr = TILE // 2 if GATED > 0 else TILE
    return tile * width + tl.arange(0, width)


@triton.jit(do_not_specialize=ROWS)
def linear_tiles(x, weight, scales, offsets, steps, bias, out, R, OUTER: tl.constexpr, K: tl.constexpr,
                 TILE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
                 OFFSETS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr,
                 ALL: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, AHEAD: tl.constexpr,
                 EARLY: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R / ROWS, outputs / TILE, segments; 1 if a program adds up ALL of them). out: [R, O], or [R, O / 2] of
    halves, finished; or fp32[segments, R, O] where there are several programs. WIDTH: the filled inner width. AHEAD:
    blocks that are prefetched. EARLY: whether the first one is loaded before this kernel's turn."""
    rows, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2)
    columns, own = columns_of(tl.program_id(1), OUTER, TILE, GATED > 0), own_numbers(tl.program_id(1), TILE, GATED)
    outputs: tl.constexpr = OUTER // 2 if GATED > 0 else OUTER
    start = part * SEGMENT
    end = tl.minimum(start + SEGMENT, WIDTH)
    if USE_GDC:
        bring_tile(weight, columns, start, end, OUTER, K, BLOCK, KIND, AHEAD)
    early = float_block(weight, columns, start, OUTER, K, BLOCK) if EARLY else None
    gdc_wait(USE_GDC)
    sums = tile_sums(x, weight, scales, offsets, steps, rows, columns, 0 if ALL else start, WIDTH if ALL else end, R,
                      OUTER, K, BLOCK, KIND, GROUPS, SPAN, OFFSETS, SEGMENT, ALL, early)  # fmt: skip
    result = activated(sums, bias, columns, out.dtype.element_ty, OUTER, BIAS, GATED)
    where = (tl.cast(part, tl.int64) * R + rows[None, :]) * outputs + own[:, None]
    tl.store(out + where, result, mask=(own < outputs)[:, None] & (rows < R)[None, :])


@triton.jit(do_not_specialize=ROWS)
def head_tiles(x, weight, scales, offsets, steps, out, R, HEADS: tl.constexpr, OUTER: tl.constexpr, K: tl.constexpr,
               TILE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
               OFFSETS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, USE_GDC: tl.constexpr):  # fmt: skip
    """Grid (R / ROWS, outputs of a head / TILE, HEADS). x: [R, HEADS * K], out: [R, OUTER]: each head with its own rows
    of the weight, in one chain. A head of a row is a row of x [R * HEADS, K]."""
    gdc_wait(USE_GDC)
    first, head = tl.program_id(0) * ROWS, tl.program_id(2)
    outputs: tl.constexpr = OUTER // HEADS
    own, rows = tl.program_id(1) * TILE + tl.arange(0, TILE), first + tl.arange(0, ROWS)
    columns = tl.where(own < outputs, head * outputs + own, OUTER)
    sums = tile_product(x, weight, scales, offsets, steps, rows * HEADS + head, columns, 0, WIDTH, R * HEADS, OUTER, K,
                        BLOCK, KIND, GROUPS, SPAN, OFFSETS)  # fmt: skip
    where = rows.to(tl.int64)[None, :] * OUTER + columns[:, None]
    inside = (own < outputs)[:, None] & (rows < R)[None, :]
    tl.store(out + where, sums.to(out.dtype.element_ty), mask=inside)


def head_product(x: Tensor, weight: BlockedWeight, dtype: torch.dtype) -> Tensor:
    """As :func:`foresay.verifier.ops.linear.head_linear`."""
    assert x.is_contiguous() and weight.values.is_contiguous(), "rows lie one behind the other"
    assert x.data_ptr() % 16 == 0 and weight.values.data_ptr() % 16 == 0, "they begin on 16 bytes, as a new tensor does"
    heads, tile = x.shape[1] // weight.inner, tile_of(len(x), False)
    out = x.new_empty(len(x), weight.outer, dtype=dtype)
    head_tiles[(*tile.grid(len(x), weight.outer // heads), heads)](
        x, weight.values, *(given(one, x) for one in (weight.scales, weight.offsets, weight.steps)), out, len(x),
        HEADS=heads, **about(weight), TILE=tile.outputs, ROWS=tile.rows, **options(tile, weight),
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As :func:`foresay.verifier.ops.linear.linear`."""
    return whole(x, BlockedWeight.pack(weight, bias), x.dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: Gate = "silu") -> Tensor:
    """As :func:`foresay.verifier.ops.linear.gated_linear`."""
    return whole(x, BlockedWeight.pack(weight, bias, gated), x.dtype)


def whole(x: Tensor, weight: BlockedWeight, dtype: torch.dtype) -> Tensor:
    """:func:`product`, finished."""
    made = product(x, weight, dtype, finished=True)
    return made if isinstance(made, Tensor) else finish(made, dtype, weight.gated)


def product(x: Tensor, weight: BlockedWeight, dtype: torch.dtype, finished: bool = False) -> Tensor | SplitKSums:
    """``x @ weight.T + bias``, rounded to ``dtype``, with its activation: [R, O], or [R, O / 2] of halves. x: [R, K].

    If the weight is cut, the sums of its segments; one program adds them up if there are enough programs. finished:
    then it finishes them too. Where it does not, one compilation of their reader is for any number of rows.
    """
    assert x.is_contiguous() and weight.values.is_contiguous(), "rows lie one behind the other"
    assert x.data_ptr() % 16 == 0 and weight.values.data_ptr() % 16 == 0, "they begin on 16 bytes, as a new tensor does"
    tile, programs = _tile(weight, len(x)), _programs(weight, len(x))
    if programs > 1 or (weight.cut[0] > 1 and not (finished or weight.gated)):
        sums = x.new_empty(programs, len(x), weight.outer, dtype=torch.float32)
        _launch(x, weight, sums, tile, programs, False)
        return SplitKSums(sums, weight.bias, weight.cut[0])
    out = x.new_empty(len(x), weight.outer // gate_parts(weight.gated), dtype=dtype)
    _launch(x, weight, out, tile, programs, True)
    return out


def tile_of(rows: int, large: bool) -> Tile:
    """A program's tile, for this many rows in all. large: whether there is a large one."""
    return next((tile for tile in SMALL if tile.rows >= rows), LARGE if large else SMALL[-1])


def _tile(weight: BlockedWeight, rows: int) -> Tile:
    return tile_of(rows, _long(weight))


def tile_of_expert(weight: BlockedWeight, rows: int) -> Tile:
    """The tile of a mixture's product, with 16, 32 or 64 rows of one expert."""
    return _OF_EXPERT if rows == _OF_EXPERT.rows and _long(weight) else tile_of(rows, False)


def _long(weight: BlockedWeight) -> bool:
    """Whether tiles of 128 outputs multiply it."""
    return weight.block == _BLOCK and (knobs.runtime.interpret or capability() >= 90)


def _programs(weight: BlockedWeight, rows: int) -> int:
    """For each tile: one for each segment, or one for all of them."""
    tiles = math.prod(_tile(weight, rows).grid(min(rows, _FULL), weight.outer))
    return 1 if tiles >= ENOUGH else weight.cut[0]


def _launch(x: Tensor, weight: BlockedWeight, out: Tensor, tile: Tile, programs: int, finished: bool) -> None:
    """programs: for each tile."""
    bias, gate = (weight.bias, GATES[weight.gated]) if finished else (None, 0)
    tensors = weight.scales, weight.offsets, weight.steps, bias
    linear_tiles[(*tile.grid(len(x), weight.outer), programs)](
        x, weight.values, *(given(one, x) for one in tensors), out, len(x), **about(weight), TILE=tile.outputs,
        ROWS=tile.rows, SEGMENT=weight.cut[1], ALL=programs < weight.cut[0], BIAS=bias is not None,
        GATED=gate, AHEAD=AHEAD, EARLY=EARLY and weight.kind == FLOATS and programs == weight.cut[0],
        **options(tile, weight),
    )  # fmt: skip


def options(tile: Tile, weight: BlockedWeight) -> dict[str, Any]:
    """How a product of tiles is launched."""
    stages = tile.stages if weight.scales is None else _STAGES[weight.block]
    return {"num_warps": tile.warps, "num_stages": stages, "enable_fp_fusion": False, **pdl_args()}


def given(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel needs a pointer even if it reads nothing."""
    return instead if tensor is None else tensor


def about(weight: BlockedWeight) -> dict[str, Any]:
    """The compile-time constants of a tile's product."""
    return {
        "OUTER": weight.outer,
        "K": weight.inner,
        "BLOCK": weight.block,
        "KIND": weight.kind,
        "GROUPS": weight.groups,
        "SPAN": weight.groups // weight.spans if weight.spans else 0,
        "OFFSETS": "minimums" if weight.minimums else "none" if weight.offsets is None else "zeros",
        "WIDTH": weight.blocks * weight.block,
    }
