"""One level of drafted trees: which tokens they hang below which nodes, in ops without a number on the host.

Legend: S sequences, F expanded nodes of a level, k children looked at below each, W of all these that are kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foresay.verifier.ops.eager import op
from foresay.verifier.ops.launch import launch, new, on_triton
from foresay.verifier.ops.records import Above, Kept, Pieces


@op(cpu="level")
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


@op()
def positions_below(ends: Tensor, depths: Tensor) -> Tensor:
    """int64[S * N]: the positions of tokens below nodes. ends: int64[S, 1], behind the roots. depths: int32[S, N]."""
    return (ends + depths).flatten()


@positions_below.kernel
def _positions_below(ends: Tensor, depths: Tensor) -> Tensor:
    out = new((depths.numel(),), ends)
    _one_by_one("trees.below_rows", (ends, depths, out), out, depths.shape[1], {})
    return out


@op()
def known_tokens(tokens: Tensor, vocab_size: int, read: Tensor | None = None) -> Tensor:
    """The tokens as another model's: those it does not have as its last one, those that are none as the first.

    tokens: int64, contiguous. read: int64[V], its id for each; None where they are the same.
    """
    known = tokens.clamp(0, vocab_size - 1)
    return known if read is None else read[known]


@known_tokens.kernel
def _known_tokens(tokens: Tensor, vocab_size: int, read: Tensor | None = None) -> Tensor:
    out = new(tokens.shape, tokens)
    translated = read is not None
    arguments = (tokens, tokens if read is None else read, out)
    _one_by_one("trees.known_rows", arguments, out, vocab_size - 1, {"TRANSLATED": translated})
    return out


def _one_by_one(
    kernel: str, arguments: tuple[Tensor, ...], out: Tensor, number: int, constants: dict[str, bool]
) -> None:
    together = 128 if on_triton(out) else 1
    grid = (-(-out.numel() // together),)
    launch(kernel, grid, (*arguments, number, out.numel()), constants | {"ROWS": together})
