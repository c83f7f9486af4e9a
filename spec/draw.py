"""The draw: one token from each row of logits, as plain sampling with position-keyed noise would take it.

At temperature 0 the draw is the first largest logit. Otherwise it is ``argmax(logits / T + G)`` over the tokens that
survive top-k, top-p and min-p, with ``G`` the Gumbel row of the position being decided: an exact sample of the warped
softmax (the Gumbel-max trick). Nothing here looks at the tree, so a node's draw is what plain decoding draws there.

The filters are asked about the winner first: if the largest of *all* tokens survives, it is the largest of the
survivors too, and the survivors never have to be listed. Every decision is a function of its own row alone.

Contract of the filters (order: top-k, top-p, min-p; ties stay in):

* top-k keeps every token whose logit is at least the k-th largest;
* top-p, over what top-k kept, keeps a token while the mass of strictly likelier tokens is below p;
* min-p keeps a token of at least ``min_p`` times the largest probability.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from spec.errors import NumericalError
from spec.sampling import SamplingParams

#: Rows are summed in pieces of this many: a row's sum then never depends on how many rows or threads there are.
_SUM_CHUNK = 4096


def draw(logits: Tensor, sampling: SamplingParams, noise: Tensor | None) -> Tensor:
    """Draw one token per row.

    logits: fp32[N, V]. noise: fp32[N, V], Gumbel rows of the positions being decided (None at temperature 0).
    Returns int64[N]. Raises :class:`NumericalError` if a row holds NaN or nothing finite.
    """
    if sampling.greedy:
        winners = logits.argmax(dim=-1)
    else:
        assert noise is not None, "sampling above temperature 0 needs noise"
        winners = _draw_with_noise(logits / sampling.temperature, sampling, noise)
    if not logits.gather(-1, winners[:, None]).isfinite().all():
        raise NumericalError("the model's logits are not finite")
    return winners


def _draw_with_noise(scaled: Tensor, sampling: SamplingParams, noise: Tensor) -> Tensor:
    if sampling.top_k > 0:
        scaled = keep_top_k(scaled, sampling.top_k)
    winners = (scaled + noise).argmax(dim=-1)
    if sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return winners
    for row in (~_survives(scaled, winners, sampling)).nonzero().flatten().tolist():
        kept = keep_top_p_min_p(scaled[row], sampling.top_p, sampling.min_p)
        winners[row] = (kept + noise[row]).argmax()
    return winners


def _survives(scaled: Tensor, winners: Tensor, sampling: SamplingParams) -> Tensor:
    """bool[N]: whether each row's winner passes top-p and min-p."""
    largest = scaled.amax(dim=-1, keepdim=True)
    chosen = scaled.gather(-1, winners[:, None])
    alive = torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
    if sampling.min_p > 0.0:
        alive &= (chosen >= largest + math.log(sampling.min_p)).squeeze(-1)
    if sampling.top_p < 1.0:
        weights = (scaled - largest).exp_()
        likelier = row_sum(weights * (scaled > chosen))
        alive &= likelier < sampling.top_p * row_sum(weights)
    return alive


def row_sum(values: Tensor) -> Tensor:
    """fp32[N]: the sum of each row, in an order fixed by the row's length alone."""
    short = -values.shape[-1] % _SUM_CHUNK
    if short:
        values = functional.pad(values, (0, short))
    chunks = values.view(*values.shape[:-1], -1, _SUM_CHUNK)
    return chunks.sum(dim=-1).sum(dim=-1)


def keep_top_k(scaled: Tensor, k: int) -> Tensor:
    """fp32[N, V] with minus infinity in place of every token below the k-th largest of its row."""
    if k >= scaled.shape[-1]:
        return scaled
    threshold = scaled.topk(k, dim=-1, sorted=True).values[:, -1:]
    return scaled.masked_fill(scaled < threshold, -math.inf)


def keep_top_p_min_p(row: Tensor, top_p: float, min_p: float) -> Tensor:
    """fp32[V]: one row with minus infinity in place of the tokens that top-p, then min-p, take out."""
    weights = (row - row.max()).exp_()
    total = float(row_sum(weights[None]))
    # All tokens lighter than this weigh less than 1 - p together, so none of them can be needed to reach p.
    candidates = (weights > (1.0 - top_p) * total / len(row)).nonzero().flatten()
    ordered = weights[candidates].sort(descending=True).values
    before = ordered.cumsum(0) - ordered
    least = float(ordered[int((before < top_p * total).sum()) - 1]) if len(ordered) else 1.0
    return row.masked_fill(weights < max(least, min_p), -math.inf)
