"""One level of drafted trees: which tokens they hang below which nodes, in ops without a number on the host.

Legend: S sequences, F expanded nodes of a level, k children looked at below each, W of all these that are kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.records import Above, Kept, Pieces


def keep_children(
    children: Tensor,
    chances: Tensor,
    above: Above,
    marks: Tensor,
    picks: Tensor | None = None,
    curves: Pieces | None = None,
) -> Kept:
    """Of all children the likeliest, best first, ties to the first; or those that are named.

    children, chances: int64 and fp32 [S, F, k], or [S, 1, k], alike below all; contiguous. A log chance above 0, by
    rounding, counts as 0: no child is likelier than its parent. marks: int64[W], what each
    of the kept has in its word beside its parent's. picks: int64[W], flat places ``node * k + child``.
    """
    if compiled(children):
        from foresay.verifier.ops.kernels.cpu import level as kernels

        return kernels.keep_children(children, chances, above, marks, picks, curves)
    count, (front, looked) = len(marks), (above.scores.shape[1], children.shape[2])
    scores = chances if curves is None else _on_curves(chances, curves)
    flat = (scores.clamp(max=0.0) + above.scores[:, :, None]).flatten(1)
    if picks is None:
        ranked = flat.sort(dim=1, descending=True, stable=True)
        kept, best = ranked.values[:, :count], ranked.indices[:, :count]
        best = best.where(kept > -math.inf, 0)
    else:
        best = picks.expand(len(flat), -1)
        kept = flat.gather(1, best)
    places = best // looked
    tokens = children.expand(-1, front, -1).flatten(1).gather(1, best)
    return Kept(tokens, places, above.numbers[places], kept.contiguous(), above.words.gather(1, places) | marks)


def _on_curves(chances: Tensor, curves: Pieces) -> Tensor:
    rank = torch.arange(chances.shape[2], device=chances.device)
    groups = curves.slopes.shape[1] // curves.pieces
    sound = chances.clamp(min=curves.least)
    piece = torch.searchsorted(curves.knots, sound) + rank.clamp(max=groups - 1) * curves.pieces
    flat = piece.flatten(1)
    made = curves.slopes.gather(1, flat) * sound.flatten(1) + curves.shifts.gather(1, flat)
    return made.view_as(chances).masked_fill(chances == -math.inf, -math.inf)


def worth_another(front: Tensor, bars: Tensor) -> Tensor:
    """fp32[S, F]: the scores of the nodes that are expanded next, all minus infinity in trees whose next level is not
    worth its price.

    front: the same before, log chances. bars: fp32[S, 2], contiguous: what each node's chance has beyond the first of
    these must add up to the second (:class:`foresay.spec.price.Bar`).
    """
    if compiled(front):
        from foresay.verifier.ops.kernels.cpu import level as kernels

        return kernels.worth_another(front, bars)
    each, together = bars.split(1, dim=1)
    beyond = (front.exp() - each).clamp(min=0).sum(dim=1, keepdim=True)
    return front.where(beyond >= together, -math.inf)


def positions_below(ends: Tensor, depths: Tensor) -> Tensor:
    """int64[S * N]: the positions of tokens below nodes. ends: int64[S, 1], behind the roots. depths: int32[S, N]."""
    if compiled(ends):
        from foresay.verifier.ops.kernels.cpu import level as kernels

        return kernels.positions_below(ends, depths)
    return (ends + depths).flatten()


def known_tokens(tokens: Tensor, vocab_size: int, read: Tensor | None = None) -> Tensor:
    """The tokens as another model's: those it does not have as its last one, those that are none as the first.

    tokens: int64, contiguous. read: int64[V], its id for each; None where they are the same.
    """
    if compiled(tokens):
        from foresay.verifier.ops.kernels.cpu import level as kernels

        return kernels.known_tokens(tokens, vocab_size, read)
    known = tokens.clamp(0, vocab_size - 1)
    return known if read is None else read[known]
