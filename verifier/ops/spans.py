"""Weighted values, summed inside each span of positions, with bits that depend on absolute positions only.

What a row adds up must come in the order of its path, as it will when the path has been compacted. Paths follow the
order of the slots, so a product over the slots of a tree meets the values of each path in order, between hidden ones of
weight zero. Where a product adds term by term, those change no bit, nor does how many there are; that is tried once. On
a processor where it is not so, every product is over one page, and a tree's values are gathered row by row.

Legend: G kv heads, D head dim, S page size, N resident slots, P spans, M stacked rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from spec.tree import MAX_NODES
from verifier.batch import LEAST_ROWS, SPAN, Segment

#: Rows of the products by which it is tried; and numbers one of which has to have the bits of more.
_TRIED_ROWS = (12, 45, 130, 1536)
_FEW_ROWS = (LEAST_ROWS, 12, 16, 24, 32)


def span_sums(weights: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """fp32[P, G, M, D]: the weighted values of each span, or of each page where products do not add in order.

    weights: fp32[G, M, N], zero where hidden. values: fp32[N, G, D], finite.
    """
    if not adds_in_order(values.shape[-1], segment.page_size, segment.span):
        return _by_page(weights, values, segment)
    last, begin = _last(segment)
    sums = _empty(begin // segment.span + last, weights, values)
    for part in _products(weights[..., :begin], values[:begin], segment.span, sums):
        torch.bmm(*part[:2], out=part[2])
    rest, by_head = weights[..., begin:], values[begin:].transpose(0, 1)
    for span in range(last):
        held = rest if segment.tail_spans is None else rest * segment.tail_spans[span]
        sums[span - last] = torch.bmm(held, by_head)
    return sums


def _empty(spans: int, weights: Tensor, values: Tensor) -> Tensor:
    """fp32[P, G, M, D], so laid out that each product of ``_products`` lies in one piece."""
    groups, rows, _ = weights.shape
    if spans <= groups:
        return weights.new_empty(spans, groups, rows, values.shape[-1])
    return weights.new_empty(groups, spans, rows, values.shape[-1]).transpose(0, 1)


def _products(weights: Tensor, values: Tensor, span: int, sums: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What to multiply by what, and where the result goes: of each span or of each kv head, whichever are fewer.

    A product of all at once would copy its factors, which takes longer than it does.
    """
    count = values.shape[0] // span
    if len(sums) <= len(weights):
        for number in range(count):
            at = slice(number * span, (number + 1) * span)
            yield weights[..., at], values[at].transpose(0, 1), sums[number]
    else:
        in_spans, by_span = weights.unflatten(-1, (-1, span)).transpose(1, 2), values.unflatten(0, (-1, span))
        for head in range(len(weights)):
            yield in_spans[head], by_span[:, :, head], sums[:count, head]


def _last(segment: Segment) -> tuple[int, int]:
    """The spans at the end that are summed one by one, at least one, and the position at which they begin."""
    if segment.path_columns is not None:
        return 1 if segment.tail_spans is None else len(segment.tail_spans), segment.begin
    return 1, (segment.resident - 1) // segment.span * segment.span


def _split(weights: Tensor, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[G, M, X * size] and [X * size, G, D] -> [X * G, M, size] and [X * G, size, D]."""
    in_parts = weights.unflatten(-1, (-1, size)).permute(2, 0, 1, 3).flatten(0, 1)
    return in_parts, values.unflatten(0, (-1, size)).transpose(1, 2).flatten(0, 1)


def of_paths(weights: Tensor, segment: Segment) -> Tensor:
    """fp32[G, M, W] by slots of a tree's tail -> fp32[G, M, T*S] by positions."""
    assert segment.path_columns is not None
    return weights.gather(-1, segment.path_columns.expand(len(weights), -1, -1))


def _by_page(weights: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """fp32[B, G, M, D]: of every page alone."""
    size, tree = segment.page_size, segment.path_columns is not None
    full = segment.full * size if tree else segment.resident
    products = torch.bmm(*_split(weights[..., :full], values[:full], size))
    sums = products.view(full // size, *weights.shape[:2], values.shape[-1])
    if not tree:
        return sums
    return torch.cat((sums, _gathered(weights[..., full:], values[full:], segment)))


def _gathered(weights: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """fp32[T, G, M, D]: the pages of a tree's tail, the values of each row gathered in the order of its path."""
    assert segment.path_columns is not None
    size, group, rows = segment.page_size, segment.group, segment.rows.stop - segment.rows.start
    own = values[segment.path_columns[: rows * group : group]].unflatten(1, (-1, size)).permute(1, 3, 0, 2, 4)
    mine = of_paths(weights, segment)[:, : rows * group].unflatten(-1, (-1, size)).unflatten(1, (rows, group))
    mine = functional.pad(mine.permute(3, 0, 1, 2, 4), (0, 0, 0, max(0, segment.least - group)))  # [T, G, r, H/G, S]
    sums = torch.matmul(mine, own)[:, :, :, :group].flatten(2, 3)
    return functional.pad(sums, (0, 0, 0, weights.shape[1] - rows * group))


@lru_cache
def adds_in_order(width: int, size: int, span: int) -> bool:
    """Whether a product over more slots, the others' weights being zero, has the bits of one over those that count.

    width: head dim. size: slots of a page. span: positions of a span. Tried for products of few rows and of many, with
    as many slots beside as the largest tree may bring.
    """
    generator, least = torch.Generator().manual_seed(0), least_rows(width)
    return all(
        _bits_stay(rows, least, own, own + more, width, generator)
        for rows in {least, *_TRIED_ROWS}
        for own in {size, 2 * size, 3 * size, span}
        for more in (0, size, 48, span, MAX_NODES + size)
    )


def _bits_stay(rows: int, least: int, own: int, slots: int, width: int, generator: torch.Generator) -> bool:
    """For random ones of so many slots, laid out as a store does; what is expected is computed by few rows."""
    values = torch.randn(slots, 2, width, generator=generator).transpose(0, 1)
    columns = torch.rand(slots, generator=generator).argsort()[:own].sort().values
    weights = torch.rand(2, -(-rows // least) * least, own, generator=generator)
    spread = torch.zeros(2, rows, slots + 16)
    spread[..., columns] = weights[:, :rows]
    alone = values[:, columns].contiguous()
    wanted = torch.cat([torch.bmm(part.contiguous(), alone) for part in weights.split(least, dim=1)], dim=1)
    return torch.equal(torch.bmm(spread[..., :slots], values), wanted[:, :rows])


@lru_cache
def least_rows(width: int) -> int:
    """The fewest rows from which on batched products of this head dim have the same bits, scores and sums of values.

    On most processors that is :data:`~verifier.batch.LEAST_ROWS`; heads of 192 to 256 need 12 on some. Where no number
    is enough, the probe finds rows that differ.
    """
    generator, counts = torch.Generator().manual_seed(0), sorted({*_FEW_ROWS, *_TRIED_ROWS})
    rows, keys = (torch.randn(2, count, width, generator=generator) for count in (counts[-1], SPAN))
    scores = [torch.bmm(rows[:, :count].contiguous(), keys.transpose(1, 2)) for count in counts]
    values = [torch.bmm(scores[-1][:, :count].contiguous(), keys) for count in counts]
    return next((few for few in _FEW_ROWS if _agree(scores, few) and _agree(values, few)), _FEW_ROWS[-1])


def _agree(products: list[Tensor], least: int) -> bool:
    """Whether the rows of all products of so many rows and more have the same bits."""
    return all(torch.equal(part, products[-1][:, : part.shape[1]]) for part in products if part.shape[1] >= least)
