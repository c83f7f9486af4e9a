"""Which candidates of grown trees become their nodes, computed on the device without the host.

The batched form of :meth:`foresay.drafters.tree_builder.TreeBuilder.tree`: the likeliest, as many as are worth their
rows, in the order in which they were found.

Legend: S sequences, C candidates of a tree, N nodes of the largest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foresay.verifier.graphs.proposer import DeviceTree


class Candidates(NamedTuple):
    """All candidates below the roots, level by level; number 0 is the root, the first candidate is number 1.

    roots: int64[S]. tokens, parents: int64[S, C]; parents are numbers. scores: fp32[S, C], log chances, minus infinity
    where there is none. depths, rows: int64[C], the same in all trees; rows: of a drafter's own pass, -1 for none.
    """

    roots: Tensor
    tokens: Tensor
    parents: Tensor
    scores: Tensor
    depths: Tensor
    rows: Tensor


class Cut(NamedTuple):
    """tree: its nodes past its count are undefined. rows: int64[S, N], the row of each node, -1 for none. candidates:
    int64[S, N - 1], the candidate of each node but the root; C after the last."""

    tree: DeviceTree
    rows: Tensor
    candidates: Tensor


def cut(found: Candidates, nodes: int, prices: Tensor | None = None, counts: Tensor | None = None) -> Cut:
    """prices: fp32[S, N], of the first 0, 1, .. N - 1 nodes below the root together; None: all nodes are worth it.
    counts: int64[S], how many nodes each tree may have; None: N."""
    candidates, real = _kept(found.scores, nodes - 1, prices, counts)
    size, count = found.scores.shape
    at = candidates.clamp(max=count - 1)
    order = torch.arange(nodes, device=candidates.device).expand(size, -1)
    # The node of each candidate; candidates that are not nodes go to the last column.
    numbers = torch.zeros(size, count + 2, dtype=torch.int64, device=candidates.device)
    numbers = numbers.scatter(1, candidates + 1, order[:, 1:])
    parents = numbers.gather(1, found.parents.gather(1, at)).where(real, 0)
    tokens = found.tokens.gather(1, at).clamp(min=0).where(real, 0)
    depths, rows = (each[at].where(real, nothing) for each, nothing in ((found.depths, 0), (found.rows, -1)))
    first = torch.zeros_like(found.roots)[:, None]
    tree = DeviceTree(
        torch.cat((found.roots[:, None], tokens), dim=1),
        torch.cat((first - 1, parents), dim=1),
        _words(torch.cat((first, parents), dim=1), order),
        torch.cat((first, depths), dim=1).int(),
        1 + real.sum(dim=1),
        chain=False,
    )
    return Cut(tree, torch.cat((first, rows), dim=1), candidates)


def _kept(scores: Tensor, most: int, prices: Tensor | None, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """int64[S, N - 1], the candidates that are kept, in order; and bool[S, N - 1], whether there is one."""
    count = scores.shape[1]
    ranked = scores.sort(dim=1, descending=True, stable=True)  # of equal ones the earlier, so that parents are kept
    best, candidates = ranked.values[:, :most], ranked.indices[:, :most]
    kept, rank = best > -math.inf, torch.arange(best.shape[1], device=scores.device)
    if prices is not None:
        gains = best.exp().cumsum(dim=1) - prices[:, 1 : 1 + best.shape[1]]
        worth = gains.argmax(dim=1, keepdim=True) + (gains.amax(dim=1, keepdim=True) > 0)
        kept = kept & (rank < worth.clamp(min=1))
    if counts is not None:
        kept = kept & (rank < counts[:, None] - 1)
    candidates = candidates.where(kept, count).sort(dim=1).values
    if best.shape[1] < most:
        candidates = torch.nn.functional.pad(candidates, (0, most - best.shape[1]), value=count)
    return candidates, candidates < count


def joined(found: DeviceTree, grown: Cut, levels: int) -> tuple[DeviceTree, Tensor]:
    """The found nodes, followed by those of a grown tree, of M nodes and ``levels`` levels, that are not among them, as
    :func:`foresay.spec.tree.merge` has them; and rows as in :class:`Cut`."""
    tree = grown.tree
    (size, first), count = found.tokens.shape, tree.tokens.shape[1]
    order = torch.arange(first + count, device=tree.tokens.device).expand(size, -1)
    known, real = (order[:, : each.tokens.shape[1]] < each.counts[:, None] for each in (found, tree))
    numbers, none = _same(found, tree, known, levels), first + count - 1
    fresh = real & (numbers < 0)
    behind = found.counts[:, None] - 1 + fresh.cumsum(dim=1)
    numbers = numbers.where(~fresh, behind).where(real, none)

    def of_both(theirs: Tensor, ours: Tensor, nothing: int = 0) -> Tensor:
        room = torch.nn.functional.pad(theirs.where(known, nothing), (0, count), value=nothing)
        return room.scatter(1, numbers, ours)[:, :none].contiguous()

    above = numbers.gather(1, tree.parents.clamp(min=0)).where(order[:, :count] > 0, -1)
    parents = of_both(found.parents, above)
    both = DeviceTree(
        of_both(found.tokens, tree.tokens),
        parents,
        _words(parents.clamp(min=0), order[:, :none]),
        of_both(found.depths, tree.depths),
        found.counts + fresh.sum(dim=1),
        chain=False,
    )
    return both, of_both(torch.full_like(found.tokens, -1), grown.rows, -1)


def _same(found: DeviceTree, tree: DeviceTree, known: Tensor, levels: int) -> Tensor:
    """int64[S, M]: the found node equal to each node of a tree, -1 for none: with the same token below the same
    parent."""
    root = torch.arange(tree.tokens.shape[1], device=tree.tokens.device) == 0
    alike = (tree.tokens[:, :, None] == found.tokens[:, None]) & known[:, None]
    same = torch.full_like(tree.tokens, -1).masked_fill(root, 0)
    for _ in range(levels):
        above = same.gather(1, tree.parents.clamp(min=0))[:, :, None]
        both = alike & (found.parents[:, None] == above) & (above >= 0)
        same = both.long().argmax(dim=2).where(both.any(dim=2), -1).masked_fill(root, 0)
    return same


def _words(parents: Tensor, order: Tensor) -> Tensor:
    """int64[S, N]: the ancestor words. Each iteration doubles the levels they cover."""
    words, above = torch.ones_like(order) << order, parents
    for _ in range(6):
        words, above = words | words.gather(1, above), above.gather(1, above)
    return words.contiguous()
