"""Positions and slots of a step's rows in one launch, one lane per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foresay.verifier.ops.kernels.chain import chained, wait_turn

_ROWS = 128


@triton.jit(do_not_specialize=["rows", "pages", "width", "depth_stride"])
def lay_out_rows(
    tables,
    lengths,
    depths,
    nodes,
    live,
    positions,
    slots,
    rows,
    pages,
    width,
    depth_stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """ROWS rows. depth_stride: from one sequence's depths to the next's, 0 where all have the same.

    Of the sizes only the page's is compiled in: trees and tables have many.
    """
    wait_turn(CHAINED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, sequence = row < rows, row // width
    real = inside & (tl.load(live + sequence, inside, 0) != 0)
    length = tl.load(lengths + sequence, real, 0).to(tl.int64)
    depth = tl.load(depths + sequence * depth_stride + row % width, real, 0)
    place = length + tl.load(nodes + row, real, 0)
    page = tl.load(tables + sequence.to(tl.int64) * pages + place // PAGE_SIZE, real, 0).to(tl.int64)
    tl.store(positions + row, tl.where(real, length + depth, 0), inside)
    tl.store(slots + row, tl.where(real, page * PAGE_SIZE + place % PAGE_SIZE, 0), inside)


def lay_out(
    tables: Tensor, page_size: int, lengths: Tensor, depths: Tensor, nodes: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`foresay.verifier.ops.lay_out.lay_out`."""
    sequences, width = nodes.shape
    whole = (tables, lengths, depths, nodes, live)
    assert all(tensor.is_contiguous() for tensor in whole), "sequences lie one behind the other"
    positions, slots = (torch.empty(sequences * width, dtype=torch.int64, device=nodes.device) for _ in range(2))
    if rows := sequences * width:
        sizes = (rows, tables.shape[1], width, width if depths.dim() == 2 else 0, page_size, _ROWS)
        lay_out_rows[(triton.cdiv(rows, _ROWS),)](
            tables, lengths, depths, nodes, live, positions, slots, *sizes, **chained()
        )
    return positions, slots
