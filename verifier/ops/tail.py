"""The end of a tree's attention: the blocks that hold uncommitted slots, where each row has a path of its own.

What a row adds up must come in the order of its path, as it will when the path has been compacted. Paths follow the
order of the slots, so a product over all slots of the tail meets the keys of each path in order, between hidden ones of
weight zero. Where a product adds term by term, those change no bit; that is tried once, and where it is not so the
values are gathered row by row.

Legend: G kv heads, D head dim, S page size, T blocks of the tail, W slots of the tail, M stacked rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from verifier.batch import Segment

#: Rows and slots of the products by which it is tried.
_TRIED_ROWS, _TRIED_SLOTS = (8, 9, 12, 24, 45, 96, 130), (32, 48, 64, 80)


def of_paths(weights: Tensor, segment: Segment) -> Tensor:
    """fp32[G, M, W] by slots -> fp32[G, M, T*S] by positions."""
    assert segment.path_columns is not None
    return weights.gather(-1, segment.path_columns.expand(len(weights), -1, -1))


def tail_sums(weights: Tensor, values: Tensor, segment: Segment, out: Tensor) -> None:
    """The weighted values of a tree's tail, summed inside each block in the order of each path.

    weights: fp32[G, M, W]. values: fp32[W, G, D]. out: fp32[T, G, M, D], where the sums go.
    """
    if not adds_in_order(values.shape[-1], segment.page_size):
        out.copy_(_over_paths(of_paths(weights, segment), values, segment))
        return
    by_head = values.transpose(0, 1)
    for block, sums in enumerate(out):
        held = weights if segment.tail_blocks is None else weights * segment.tail_blocks[block]
        torch.bmm(held, by_head, out=sums)


def _over_paths(weights: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """fp32[T, G, M, D]: each row's values gathered; it is multiplied as eight, as no product may have fewer rows."""
    assert segment.path_columns is not None
    size = segment.page_size
    own = values[segment.path_columns].unflatten(1, (-1, size)).permute(1, 3, 0, 2, 4)  # [T, G, M, S, D]
    mine = weights.unflatten(-1, (-1, size)).permute(2, 0, 1, 3).unsqueeze(3).expand(-1, -1, -1, 8, -1)
    return torch.matmul(mine, own)[:, :, :, 0]


@lru_cache
def adds_in_order(width: int, size: int) -> bool:
    """Whether a product over more slots, the others' weights being zero, has the bits of one over a block's own.

    width: head dim. size: slots of a block.
    """
    generator = torch.Generator().manual_seed(0)
    return all(
        _bits_stay(rows, size * -(-slots // size), width, size, generator)
        for rows in _TRIED_ROWS
        for slots in (*_TRIED_SLOTS, 2 * size)
    )


def _bits_stay(rows: int, slots: int, width: int, size: int, generator: torch.Generator) -> bool:
    """For rows of random paths over so many slots."""
    values = torch.randn(1, slots, width, generator=generator)
    columns = torch.rand(rows, slots, generator=generator).argsort(dim=1)[:, :size].sort(dim=1).values
    weights = torch.rand(rows, size, generator=generator)
    spread = torch.zeros(1, rows, slots).scatter_(2, columns[None], weights[None])
    own = torch.matmul(weights[:, None].expand(-1, 8, -1), values[0, columns])[:, 0]
    return torch.equal(torch.bmm(spread, values)[0], own)
