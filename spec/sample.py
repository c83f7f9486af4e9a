"""The sample: one token from each row of logits, as plain sampling with position-keyed noise would take it.

At temperature 0 the sample is the first largest logit. Otherwise it is ``argmax(logits / T + G)`` over the tokens that
survive top-k, top-p and min-p, with ``G`` the Gumbel row of the position being decided: an exact sample of the warped
softmax (the Gumbel-max trick). Nothing here looks at the tree, so a node's sample is what plain decoding samples there.

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

from foresay.spec.sampling import SamplingParams

#: What is sampled from a row that holds NaN or nothing finite. No token and no child of a node has this id.
BROKEN = -1
#: Rows are summed in pieces of this many: a row's sum then never depends on how many rows or threads there are.
_SUM_CHUNK = 4096
#: The search for the largest entry goes over the maxima of pieces of this many.
_SEARCH_CHUNK = 128


def sample(logits: Tensor, sampling: SamplingParams, noise: Tensor | None) -> Tensor:
    """Sample one token per row.

    logits: fp32[N, V]. noise: fp32[N, V], Gumbel rows of the positions being decided (None at temperature 0).
    Returns int64[N], ``BROKEN`` for a row that holds NaN or nothing finite: a node nobody steps into may be that.
    """
    if sampling.greedy:
        winners = first_largest(logits)
    else:
        assert noise is not None, "sampling above temperature 0 needs noise"
        scaled = logits if sampling.temperature == 1.0 else logits / sampling.temperature
        winners = _sample_with_noise(scaled, sampling, noise)
    sound = logits.gather(-1, winners[:, None]).squeeze(-1).isfinite()
    return winners.where(sound, BROKEN)


def _sample_with_noise(scaled: Tensor, sampling: SamplingParams, noise: Tensor) -> Tensor:
    if sampling.top_k > 0:
        scaled = keep_top_k(scaled, sampling.top_k)
    winners = first_largest(scaled + noise)
    if sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return winners
    # Of the rows only those are looked at whose winner is not the likeliest token, which no filter takes out.
    doubtful = scaled.gather(-1, winners[:, None]).squeeze(-1) < scaled.amax(dim=-1)
    for row in doubtful.nonzero().flatten().tolist():
        winners[row] = _filtered_winner(scaled[row], noise[row], int(winners[row]), sampling)
    return winners


def _filtered_winner(scaled: Tensor, noise: Tensor, winner: int, sampling: SamplingParams) -> int:
    """The winner of one row after top-p and min-p; scaled and noise: fp32[V]."""
    weights = weights_of(scaled, scaled.max())
    enough = sampling.top_p * row_sum(weights[None])
    if float(weights[winner]) >= sampling.min_p and (
        sampling.top_p >= 1.0 or row_sum(weights.masked_fill(scaled <= scaled[winner], 0.0)[None]) < enough
    ):
        return winner
    return int((keep_top_p_min_p(scaled, sampling.top_p, sampling.min_p) + noise).argmax())


def keep_top_p_min_p(row: Tensor, top_p: float, min_p: float) -> Tensor:
    """fp32[V]: one row with minus infinity in place of the tokens that top-p, then min-p, take out."""
    weights = weights_of(row, row.max())
    least = _least_weight(weights, top_p)
    return row.masked_fill(weights < max(least, min_p), -math.inf)


def _least_weight(weights: Tensor, top_p: float) -> float:
    """The weight of the last token that top-p keeps; 0 if it keeps all. weights: fp32[V], the largest 1."""
    if top_p >= 1.0:
        return 0.0
    total = row_sum(weights[None])
    enough = float(top_p * total)
    # All tokens lighter than this weigh less than 1 - p together, so none of them can be needed to reach p.
    candidates = weights[weights >= (1.0 - top_p) * float(total) / len(weights)]
    ordered = candidates.sort(descending=True).values
    before = ordered.cumsum(0) - ordered
    return float(ordered[max(int((before < enough).sum()) - 1, 0)])


def weights_of(scaled: Tensor, largest: Tensor) -> Tensor:
    """Unnormalised probabilities, the largest 1, none below e**-80: ``exp`` is 40 times slower where it underflows."""
    return (scaled - largest).clamp_(min=-80.0).exp_()


def first_largest(values: Tensor) -> Tensor:
    """int64[N]: the first largest entry of each row, as ``argmax``; four times faster, since maxima vectorise.

    values: fp32[N, V]. NaN counts as largest.
    """
    rows, width = values.shape
    if width % _SEARCH_CHUNK:
        return values.argmax(dim=-1)
    chunks = values.view(rows, -1, _SEARCH_CHUNK)
    where = chunks.amax(dim=-1).argmax(dim=-1)
    return chunks[torch.arange(rows), where].argmax(dim=-1) + where * _SEARCH_CHUNK


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
