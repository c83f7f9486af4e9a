"""Tree attention over paged KV, with bits that depend on absolute positions only.

Keys are taken in blocks of one page: block *j* holds positions ``j*S .. j*S + S - 1``, always S of them (hidden ones
weigh exactly zero). The weights are summed inside each block, then over the blocks, in an order that depends on their
numbers alone; the weighted values inside spans of some blocks, then over the spans (:mod:`verifier.ops.spans`).
A row of a tree meets its keys in just the order in which it will meet them when its path has been compacted. So a row's
result does not depend on the tree it was in, on its place in the batch or on where the committed text ended.
docs/same-tokens.md has the argument.

Legend: G kv heads, H query heads, D head dim, S page size, B blocks, N resident slots, W those of the tail, P spans,
r rows of one sequence, M = r * H / G.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from verifier.batch import Segment
from verifier.ops.spans import of_paths, span_sums

#: Batched products of few columns have other bits: a text shorter than this is padded.
_LEAST_COLUMNS = 16
#: A contiguous row whose length is a multiple of this is summed in lanes that its trailing zeros do not change.
_SUM_LANES = 64


def attend(query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float, windowed: bool) -> Tensor:
    """Attention of one sequence's rows over its pages, the rows' own keys and values stored beforehand.

    query: [r, H, D]. keys, values: [slots, G, D], one layer of a store. Returns fp32[r, H * D].
    scale: what scores are multiplied by. windowed: whether the layer has a sliding window (its mask is in the segment).
    """
    rows, heads, width = query.shape
    groups = keys.shape[1]
    keys, values = _resident(keys, values, segment)
    stacked = _stack_queries(query, groups, segment.least).mul_(scale)
    weights = _weights(stacked, keys, segment, windowed)
    total = (_sifted if segment.sifted else _summed)(weights, values, segment)
    mixed = total / _weight_sums(weights, segment)
    mixed = mixed[:, : rows * heads // groups].view(groups, rows, heads // groups, width)
    return mixed.permute(1, 0, 2, 3).reshape(rows, heads * width)


def _resident(keys: Tensor, values: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
    """fp32 keys and values of the resident slots; a view where the pages lie side by side.

    Slots past the last row may hold anything, NaN too; a zero weight does not stop NaN, so their values are cleared.
    They belong to this sequence and to no committed token.
    """
    if segment.slots is None:
        span = slice(segment.first_slot, segment.first_slot + segment.resident)
        values[segment.first_slot + segment.used : span.stop].zero_()
        keys, values = keys[span], values[span]
    else:
        keys, values = keys.index_select(0, segment.slots), values.index_select(0, segment.slots)
        values[segment.used :].zero_()
    return keys.float(), values.float()


def _stack_queries(query: Tensor, groups: int, least: int) -> Tensor:
    """[r, H, D] -> fp32[G, max(M, least), D]: the rows and heads that share a kv head side by side."""
    rows, heads, width = query.shape
    count = rows * heads // groups
    stacked = query.new_zeros(groups, max(count, least), width, dtype=torch.float32)
    own = query.view(rows, groups, heads // groups, width).permute(1, 0, 2, 3)
    stacked[:, :count].view(groups, rows, heads // groups, width).copy_(own)
    return stacked


def _weights(stacked: Tensor, keys: Tensor, segment: Segment, windowed: bool) -> Tensor:
    """fp32[G, M, N]: ``exp(score - largest)``, zero where hidden; the columns are slots."""
    scores = torch.bmm(stacked, _wide(keys).permute(1, 2, 0))[..., : len(keys)].contiguous()
    hidden = segment.window_mask if windowed and segment.window_mask is not None else None
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    else:
        scores[..., segment.full * segment.page_size :].masked_fill_(segment.tail_mask, -torch.inf)
    if segment.first:
        scores[..., : segment.first] = -torch.inf
    return scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()


def _summed(weights: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """fp32[G, M, D]: the weighted values, which must be finite wherever they lie: zero times NaN is NaN."""
    return _merge(span_sums(weights, values, segment))


def _sifted(weights: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """The same, of values that need not be finite: those count as zeros, and make NaN of whoever weighs them."""
    broken = ~values.isfinite()
    total = _summed(weights, values.masked_fill(broken, 0.0), segment)
    seen = torch.bmm((weights != 0).float(), broken.float().transpose(0, 1))
    return total.masked_fill_(seen > 0, torch.nan)


def _wide(keys: Tensor) -> Tensor:
    """[N, G, D] -> at least ``_LEAST_COLUMNS`` of them."""
    lacking = _LEAST_COLUMNS - len(keys)
    return keys if lacking <= 0 else functional.pad(keys, (0, 0, 0, 0, 0, lacking))


def _weight_sums(weights: Tensor, segment: Segment) -> Tensor:
    """fp32[G, M, 1]: inside each block first, then over the blocks, in an order fixed by the position of each."""
    size, full = segment.page_size, segment.full * segment.page_size
    if segment.path_columns is None:
        in_blocks = weights.unflatten(-1, (-1, size)).sum(dim=-1)
    else:
        tail = of_paths(weights[..., full:], segment)
        parts = [part.unflatten(-1, (-1, size)).sum(dim=-1) for part in (weights[..., :full], tail) if part.shape[-1]]
        in_blocks = torch.cat(parts, dim=-1)
    return functional.pad(in_blocks, (0, -segment.blocks % _SUM_LANES)).sum(dim=-1, keepdim=True)


def _merge(blocks: Tensor) -> Tensor:
    """[P, G, M, D] -> [G, M, D]: the sum over the spans, which are overwritten.

    Neighbours are added, then neighbouring pairs, and so on: a tree over the absolute numbers of the spans, in
    single additions, since torch's own ``sum`` takes its terms in an order that depends on the column and the threads.
    """
    count, step = len(blocks), 1
    while step < count:
        blocks[: count - step : 2 * step].add_(blocks[step :: 2 * step])
        step *= 2
    return blocks[0]
