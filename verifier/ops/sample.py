"""The sample at every row of a pass, and the likeliest children of each node of a draft with the noise of that sample.

Like :func:`foresay.spec.sample.sample`, which is for the rows of one request, but each row has its own sampling
parameters, seed and position, and no number is read on the host: so it can be part of a captured graph.

Before that, requests change their logits (:mod:`foresay.spec.adjust`), on the logits' device.

Which children of a level are kept, and their parents, is also decided here.

Legend: S sequences, F expanded nodes of a level, k children looked at below each, W of all these that are kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from foresay.spec import adjust
from foresay.spec.sample import BROKEN, gumbel_row, keep_top_k, keep_top_p_min_p, sample
from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.eager import compiled, op
from foresay.verifier.ops.launch import empty, launch, padded
from foresay.verifier.ops.records import MOST_CHILDREN, Above, Kept, Pieces, RowSampling


def sample_rows(
    logits: Tensor, sampling: RowSampling, token_ids: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """Sample one token per row, under the contract of :func:`foresay.spec.sample.sample`.

    logits: fp32[N, V]. token_ids: int64[V], the target's token of each column, for a drafter with its own vocabulary;
    None if they are the same. The noise is that of the target's tokens, and ties go to the first column. count:
    int64[1], how many rows are sampled, read when it runs (by compiled kernels; None: all).
    Returns int64[N], tokens of the target, ``BROKEN`` for a row that holds NaN, plus infinity or nothing finite.
    """
    if logits.is_cuda or compiled(logits):
        return _by_kernels(logits, sampling, 1, token_ids, True, count)[0].flatten()
    sampled = [_sample_row(row, sampling, n, token_ids) for n, row in enumerate(logits.split(1))]
    return torch.cat(sampled) if sampled else torch.empty(0, dtype=torch.int64)


def best_children(
    logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row's ``logit / T + noise``, largest first, ties to the first column.

    logits: fp32[N, V]; NaN and plus infinity count as minus infinity. count: 1 to 64. token_ids: as above.

    A row at temperature 0 has neither noise nor filters. Otherwise top-k, top-p and min-p remove tokens, as for the
    sample. But a row keeps all tokens if top-p and min-p keep the 64 likeliest, or top-k, because of ties, more than
    its number; and a top-k above 64 is ignored.

    Returns int64[N, count], tokens of the target, and fp32[N, count], log chances: the log softmax of what was ranked.
    A position for which no token is left has token 0 and minus infinity.
    """
    assert 1 <= count <= MOST_CHILDREN, "one node has 1 to 64 children"
    if logits.is_cuda or compiled(logits):
        return _by_kernels(logits, sampling, count, token_ids, False, None)
    if not len(logits):
        return torch.zeros(0, count, dtype=torch.int64), torch.zeros(0, count)
    noisy = torch.cat([_noisy_row(row, sampling, n, token_ids) for n, row in enumerate(logits.split(1))])
    short = max(0, count - noisy.shape[1])
    best, columns = functional.pad(noisy, (0, short), value=-math.inf).sort(dim=-1, descending=True, stable=True)
    best, columns = best[:, :count], columns[:, :count]
    left = best > -math.inf
    columns = columns.where(left, 0)
    tokens = columns if token_ids is None else token_ids[columns]
    chances = best - noisy.logsumexp(dim=-1, keepdim=True)
    return tokens.where(left, 0), chances.where(left, -math.inf)


def _by_kernels(
    logits: Tensor, sampling: RowSampling, count: int, token_ids: Tensor | None, exact: bool, live: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens and log chances, [N, count]; or, ``exact``, one sample of each of the first ``live`` rows."""
    if logits.is_cuda:
        from foresay.verifier.ops.kernels import candidates as of_gpu

        return of_gpu.candidates(logits, sampling, count, token_ids, exact)
    from foresay.verifier.ops.kernels.cpu import candidates as of_cpu

    return of_cpu.candidates(logits, sampling, count, token_ids, exact, live)


# -- references -------------------------------------------------------------------------------------------------------


def _sample_row(row: Tensor, sampling: RowSampling, n: int, token_ids: Tensor | None) -> Tensor:
    params = sampling.row_params(n)
    noise = None if params.greedy else _noise_of(sampling, n, row.shape[1], token_ids)
    sampled = sample(row, params, noise)
    return sampled if token_ids is None else token_ids[sampled].where(sampled != BROKEN, BROKEN)


def _noisy_row(row: Tensor, sampling: RowSampling, n: int, token_ids: Tensor | None) -> Tensor:
    params, row = sampling.row_params(n), row.where(row < math.inf, -math.inf)
    if params.greedy:
        return row
    return _filtered(row / params.temperature, params) + _noise_of(sampling, n, row.shape[1], token_ids)


def _filtered(scaled: Tensor, params: SamplingParams) -> Tensor:
    """One row, with minus infinity for tokens that the filters remove."""
    limit = params.top_k if 0 < params.top_k <= MOST_CHILDREN else 0
    listed = keep_top_k(scaled, limit)
    kept = keep_top_p_min_p(listed, params.top_p, params.min_p)
    decided = listed.isfinite().sum() <= limit if limit else kept.isfinite().sum() < MOST_CHILDREN
    return kept if decided else scaled


def _noise_of(sampling: RowSampling, n: int, columns: int, token_ids: Tensor | None) -> Tensor:
    """fp32[1, V]: the noise of row n at each column; a token's does not depend on the size of the vocabulary."""
    vocab_size = columns if token_ids is None else int(token_ids.max()) + 1
    noise = gumbel_row(int(sampling.seeds[n]), int(sampling.positions[n]), vocab_size)
    return (noise if token_ids is None else noise[token_ids])[None]


def edit_logits(logits: Tensor, edits: adjust.LogitEdits) -> None:
    """See :func:`foresay.spec.adjust.edit_logits`."""
    adjust.edit_logits(logits, edits, keep_allowed)


def keep_allowed(logits: Tensor, allowed: Tensor) -> None:
    """See :func:`foresay.spec.adjust.keep_allowed`.

    logits: fp32[N, V], contiguous; allowed: int32[N, ceil(V / 32)], or one row for all.
    """
    if not compiled(logits):
        adjust.keep_allowed(logits, allowed)
        return
    from foresay.verifier.ops.kernels.cpu import topk as kernels

    kernels.keep_allowed(logits, allowed.contiguous())  # a grammar's masks may be one repeated row


@op()
def keep_children(children: Tensor, chances: Tensor, above: Above, marks: Tensor, curves: Pieces) -> Kept:
    """The likeliest of all children, best first, ties to the first.

    children, chances: int64 and fp32 [S, F, k], or [S, 1, k], the same below all; contiguous. A log chance above 0,
    from rounding, counts as 0: no child is likelier than its parent. marks: int64[W], the bits that each kept one adds
    to its parent's word.
    """
    count, (front, looked) = len(marks), (above.scores.shape[1], children.shape[2])
    flat = (_on_curves(chances, curves).clamp(max=0.0) + above.scores[:, :, None]).flatten(1)
    ranked = flat.sort(dim=1, descending=True, stable=True)
    kept, best = ranked.values[:, :count], ranked.indices[:, :count]
    best = best.where(kept > -math.inf, 0)
    indices = best // looked
    tokens = children.expand(-1, front, -1).flatten(1).gather(1, best)
    return Kept(tokens, indices, above.numbers[indices], kept.contiguous(), above.words.gather(1, indices) | marks)


@keep_children.kernel
def _keep_children(children: Tensor, chances: Tensor, above: Above, marks: Tensor, curves: Pieces) -> Kept:
    (sequences, rows, looked), (front, count) = children.shape, (above.scores.shape[1], len(marks))
    assert front <= MOST_CHILDREN and looked <= MOST_CHILDREN, "a tree has no more nodes"
    tokens, indices, parents, words = (empty((sequences, count), children) for _ in range(4))
    kept, room = Kept(tokens, indices, parents, empty((sequences, count), chances), words), front * looked
    launch(
        "trees.rank_children", (sequences,),
        (children, chances, *above, marks, *curves[:3], *kept, empty((sequences, room), chances),
         rows, front, looked, count),
        {"LEAST": curves.least, "GROUPS": curves.slopes.shape[1] // curves.pieces, "PIECES": curves.pieces,
         "KNOTS": len(curves.knots), "EACH": padded(looked), "BLOCK": padded(room)},
        rows=True, num_warps=1 if room <= 512 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return kept


def _on_curves(chances: Tensor, curves: Pieces) -> Tensor:
    rank = torch.arange(chances.shape[2], device=chances.device)
    groups = curves.slopes.shape[1] // curves.pieces
    sound = chances.clamp(min=curves.least)
    piece = torch.searchsorted(curves.knots, sound) + rank.clamp(max=groups - 1) * curves.pieces
    flat = piece.flatten(1)
    made = curves.slopes.gather(1, flat) * sound.flatten(1) + curves.shifts.gather(1, flat)
    return made.view_as(chances).masked_fill(chances == -math.inf, -math.inf)


@op()
def worth_another(front: Tensor, bars: Tensor) -> Tensor:
    """fp32[S, F]: the scores of the nodes that are expanded next, all minus infinity in trees whose next level is not
    worth its price.

    front: their scores before, log chances. bars: fp32[S, N], contiguous: shares, the price of a row, and that of the
    level, which the children's excess over the row's price must reach (:class:`foresay.spec.price.Bar`).
    """
    shares, row, level = bars[:, None, :-2], bars[:, -2, None, None], bars[:, -1, None]
    beyond = (front.exp()[:, :, None] * shares - row).clamp(min=0).sum(dim=(1, 2))[:, None]
    return front.where(beyond >= level, -math.inf)


@worth_another.kernel
def _worth_another(front: Tensor, bars: Tensor) -> Tensor:
    out, (sequences, width) = empty(front.shape, front), front.shape
    constants = {"SHARES": bars.shape[1] - 2, "WORD": MOST_CHILDREN}
    launch("trees.weigh_level", (sequences,), (front, bars, out, width), constants, rows=True, num_warps=1)
    return out
