"""Linears in Triton: 64 outputs against 16, 32 or 64 rows of x at a time; of a prompt's chunk 128 against 128.

    weight [O, K]   outputs of a tile x (segment 0 | segment 1 | ...)   one program each, for a tile's rows of x

A segment is a fixed range of the inner width, chosen by the weight's shape alone. Its sum is one chain of MMAs in order
of k (:mod:`foresay.verifier.ops.kernels.tile`); segments are added in order by whoever reads the product
(:mod:`foresay.verifier.ops.kernels.segments`), or by one program for each tile where that makes enough of them, so
nothing is added by whoever comes first. One row and a prefill chunk run chains of one instruction, so a row's bits do
not depend on the number of rows. Programs for other rows of the same outputs run side by side: a weight is read from
memory once.

The beginning of a weight is prefetched into the L2 before its product starts: by the product's own programs, which are
launched early and wait, and after attention by those of the product before it (:attr:`BlockedWeight.then`).

A gate and what it is for are outputs I apart. A tile of a gated weight takes eight of the former and eight of the
latter in turns: so they come to lie in one thread, and it is a product like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from foresay.verifier.ops.kernels.blocked import FLOATS, TILE, BlockedWeight
from foresay.verifier.ops.kernels.chain import capability, chained, wait_turn
from foresay.verifier.ops.kernels.segments import GATES, ROWS, finish, finished, gated, squared
from foresay.verifier.ops.kernels.tile import DOT, added, bring_tile, columns_of, nothing, tile_product
from foresay.verifier.ops.records import Gate, Partials, turns_of


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program multiplies: rows and outputs, by how many warps; stages: blocks of floats on their way at once."""

    rows: int
    outputs: int = TILE
    warps: int = 4
    stages: int = 4

    def grid(self, rows: int, outer: int) -> tuple[int, int]:
        """How many of them rows and outputs fill."""
        return triton.cdiv(rows, self.rows), triton.cdiv(outer, self.outputs)


#: Of up to 64 rows; a GPU of compute capability 8.9 has 99 KB.
SMALL = (Tile(16), Tile(32), Tile(64, stages=3))
#: From compute capability 9.0 on, of blocks that eight warps can fetch ahead: floats of up to 64 rows, and all of more.
#: Each program reads half as much of x for each product.
WIDE = (SMALL[0], Tile(32, 128, warps=8, stages=3), Tile(64, 128, warps=8, stages=3))
LARGE, _BLOCK = Tile(128, 128, warps=8, stages=3), 128
#: Blocks that each program prefetches of its own weight; 0: none. More after attention, which leaves memory idle for
#: longest (:attr:`BlockedWeight.then` is set there).
AHEAD, AHEAD_OF_OUTPUT = 6, 8
#: Blocks of each program of the next product that are prefetched by a product after attention; 0: none.
AHEAD_OF_NEXT = 4
#: Prefetch by two requests for each output, where rows begin on 16 bytes; else line by line.
BULK = True
#: Programs of up to 64 rows that are resident on an H100 or H200: two on each processor.
RESIDENT = 264
#: Bytes that are prefetched while attention runs: if both products have more, the next one's wait until this one
#: starts. The L2 of an H100 or H200 has 50 MB.
L2_ROOM = 40 << 20
#: Programs that keep all processors busy: with so many one program adds up all segments of its outputs. Rows behind
#: which that stays as it is: what a full chunk of a prompt launches more rows do, too.
ENOUGH, _FULL = 128, 512
#: Blocks of few bits, by their length: they are small.
_STAGES = {128: 4, 64: 6, 32: 8, 16: 8}


class Prefetch(NamedTuple):
    """What is prefetched of a weight: the first blocks of each program that is resident at the start. A constant of a
    kernel. outputs: of a tile. segment, width: of the filled inner width. bulk: by two requests for each output, not
    line by line. bytes: in all."""

    blocks: int
    programs: int
    tiles: int
    outputs: int
    outer: int
    inner: int
    block: int
    kind: str
    gated: bool
    segment: int
    width: int
    bulk: bool
    bytes: int

    @classmethod
    def of(cls, weight: BlockedWeight, rows: int, blocks: int) -> Prefetch:
        """blocks: of each program."""
        tile, programs, (_, segment) = _tile(weight, rows), _programs(weight, rows), weight.cut
        tiles, gated = triton.cdiv(weight.outer, tile.outputs), turns_of(weight.gated) == 2 and programs == 1
        programs = min(tiles * programs, RESIDENT)
        width, of_block = weight.blocks * weight.block, weight.values.nbytes // (weight.outer * weight.blocks)
        bytes = programs * tile.outputs * min(blocks, segment // weight.block) * of_block
        return cls(blocks, programs, tiles, tile.outputs, weight.outer, weight.inner, weight.block, weight.kind, gated,
                   segment, width, in_bulk(weight), bytes)  # fmt: skip


@triton.jit
def _halved(pairs):
    """Two of [TILE / 2, DOT] of one: eight rows each in turns."""
    tile: tl.constexpr = pairs.shape[0]
    dot: tl.constexpr = pairs.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(pairs, [tile // 16, 2, 8, dot]), [0, 2, 3, 1]))
    return tl.reshape(first, [tile // 2, dot]), tl.reshape(second, [tile // 2, dot])


@triton.jit
def _prefetch_next(weight, NEXT: tl.constexpr):
    """Prefetch the next product's weight, shared out among the programs of this one. NEXT: :class:`Prefetch`."""
    kind: tl.constexpr = NEXT.kind
    own = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    for number in tl.range(own, NEXT.programs, tl.num_programs(1) * tl.num_programs(2), num_stages=1):
        begin = number // NEXT.tiles * NEXT.segment
        columns = columns_of(number % NEXT.tiles, NEXT.outer, NEXT.outputs, NEXT.gated)
        bring_tile(weight, columns, begin, tl.minimum(begin + NEXT.segment, NEXT.width), NEXT.outer, NEXT.inner,
                   NEXT.block, kind, NEXT.blocks, NEXT.bulk)  # fmt: skip


@triton.jit(do_not_specialize=ROWS)
def linear_tiles(x, weight, scales, offsets, steps, bias, then, out, R, OUTER: tl.constexpr, K: tl.constexpr,
                 TILE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr,
                 OFFSETS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr,
                 ALL: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, AHEAD: tl.constexpr,
                 BULK: tl.constexpr, NEXT: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Grid (R / ROWS, outputs / TILE, segments; 1 if a program adds up ALL of them). out: [R, O], or [R, O / 2] of
    halves, finished; or fp32[segments, R, O] where there are several programs. WIDTH: the filled inner width. AHEAD:
    blocks that are prefetched. NEXT: what is prefetched of the next weight, ``then``; EARLY: before this one starts."""
    row, part = tl.program_id(0) * ROWS, tl.program_id(2)
    columns = columns_of(tl.program_id(1), OUTER, TILE, GATED > 0)
    own = columns  # of out
    outputs: tl.constexpr = OUTER // 2 if GATED > 0 else OUTER
    if GATED > 0:
        own = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
    start = part * SEGMENT
    end = tl.minimum(start + SEGMENT, WIDTH)
    if CHAINED:
        bring_tile(weight, columns, start, end, OUTER, K, BLOCK, KIND, AHEAD, BULK)
    if EARLY:
        _prefetch_next(then, NEXT)
    wait_turn(CHAINED)
    if NEXT is not None and not EARLY:
        _prefetch_next(then, NEXT)
    if ALL:
        sums = nothing(TILE, ROWS)
        for begin in tl.range(0, WIDTH, SEGMENT):
            more = tile_product(x, weight, scales, offsets, steps, row, columns, begin,
                                tl.minimum(begin + SEGMENT, WIDTH), R, OUTER, K, ROWS, BLOCK, KIND, GROUPS, SPAN,
                                OFFSETS)  # fmt: skip
            sums = added(sums, more, ROWS)
    else:
        sums = tile_product(x, weight, scales, offsets, steps, row, columns, start, end, R, OUTER, K, ROWS, BLOCK, KIND,
                            GROUPS, SPAN, OFFSETS)  # fmt: skip
    for chain in tl.static_range(ROWS // DOT):
        rows = row + chain * DOT + tl.arange(0, DOT)
        result = finished(sums[chain], bias, columns[:, None], (columns < OUTER)[:, None], out.dtype.element_ty, BIAS)
        if GATED < 0:
            result = squared(result)
        if GATED > 0:
            gate, up = _halved(result)
            result = gated(gate, up, GATED)
        where = (tl.cast(part, tl.int64) * R + rows[None, :]) * outputs + own[:, None]
        tl.store(out + where, result, mask=(own < outputs)[:, None] & (rows < R)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As :func:`foresay.verifier.ops.linear.linear`."""
    return whole(x, BlockedWeight.of(weight, bias), x.dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: Gate = "silu") -> Tensor:
    """As :func:`foresay.verifier.ops.linear.gated_linear`."""
    return whole(x, BlockedWeight.of(weight, bias, gated), x.dtype)


def whole(x: Tensor, weight: BlockedWeight, dtype: torch.dtype) -> Tensor:
    """:func:`product`, finished."""
    made = product(x, weight, dtype)
    return made if isinstance(made, Tensor) else finish(made, dtype, weight.gated)


def product(x: Tensor, weight: BlockedWeight, dtype: torch.dtype) -> Tensor | Partials:
    """``x @ weight.T + bias``, rounded to ``dtype``, and what is done to it: [R, O], or [R, O / 2] of halves. If
    the weight is cut the sums of its segments. x: [R, K].
    """
    assert x.is_contiguous() and weight.values.is_contiguous(), "rows lie one behind the other"
    assert x.data_ptr() % 16 == 0 and weight.values.data_ptr() % 16 == 0, "they begin on 16 bytes, as a new tensor does"
    tile, programs = _tile(weight, len(x)), _programs(weight, len(x))
    if programs > 1:
        sums = x.new_empty(programs, len(x), weight.outer, dtype=torch.float32)
        _launch(x, weight, sums, tile, programs)
        return Partials(sums, weight.bias)
    out = x.new_empty(len(x), weight.outer // turns_of(weight.gated), dtype=dtype)
    _launch(x, weight, out, tile, programs)
    return out


def tile_of(rows: int, large: bool, floats: bool = True) -> Tile:
    """That of a program, where there are so many rows in all. large: whether there is a large one; of floats wide ones
    too."""
    tiles = WIDE if large and floats else SMALL
    return next((tile for tile in tiles if tile.rows >= rows), LARGE if large else SMALL[-1])


def _tile(weight: BlockedWeight, rows: int) -> Tile:
    able = knobs.runtime.interpret or capability() >= 90
    return tile_of(rows, able and weight.block == _BLOCK, weight.kind == FLOATS)


def _programs(weight: BlockedWeight, rows: int) -> int:
    """For each tile: one for each segment, or one for all of them."""
    tiles = math.prod(_tile(weight, rows).grid(min(rows, _FULL), weight.outer))
    return 1 if tiles >= ENOUGH else weight.cut[0]


def _launch(x: Tensor, weight: BlockedWeight, out: Tensor, tile: Tile, programs: int) -> None:
    """programs: for each tile."""
    whole, then = programs == 1, weight.then
    bias = weight.bias if whole else None
    given = weight.scales, weight.offsets, weight.steps, bias, None if then is None else then.values
    stages = tile.stages if weight.scales is None else _STAGES[weight.block]
    gate = GATES[weight.gated] if whole else 0
    linear_tiles[(*tile.grid(len(x), weight.outer), programs)](
        x, weight.values, *(_given(one, x) for one in given), out, len(x), **_about(weight), TILE=tile.outputs,
        ROWS=tile.rows, SEGMENT=weight.cut[1], ALL=programs < weight.cut[0], BIAS=bias is not None,
        GATED=gate, **_prefetched(weight, len(x)), num_warps=tile.warps, num_stages=stages,
        enable_fp_fusion=False, **chained(),
    )  # fmt: skip


def in_bulk(weight: BlockedWeight) -> bool:
    """Whether a weight is prefetched by two requests for each output: of floats, if each half begins on 16 bytes."""
    return BULK and weight.kind == FLOATS and weight.inner % 16 == 0


def can_prefetch() -> bool:
    """Whether the device does: a GPU from compute capability 9.0 on."""
    return not knobs.runtime.interpret and capability() >= 90


def _prefetched(weight: BlockedWeight, rows: int) -> dict[str, Any]:
    """Constants of the kernel: what is prefetched of this weight and of the next."""
    blocks, then, early = AHEAD if weight.then is None else AHEAD_OF_OUTPUT, None, False
    if weight.then is not None and AHEAD_OF_NEXT and rows <= SMALL[-1].rows and can_prefetch():
        then = Prefetch.of(weight.then, rows, AHEAD_OF_NEXT)
        early = Prefetch.of(weight, rows, blocks).bytes + then.bytes <= L2_ROOM
    return {"AHEAD": blocks, "BULK": in_bulk(weight), "NEXT": then, "EARLY": early}


def _given(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel wants a pointer even where it reads nothing."""
    return instead if tensor is None else tensor


def _about(weight: BlockedWeight) -> dict[str, Any]:
    """What a tile's product is compiled for."""
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
