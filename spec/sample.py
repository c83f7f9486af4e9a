"""The sample: one token from each row of logits, as plain sampling with position-keyed noise would take it.

At temperature 0 the sample is the first largest logit. Otherwise it is ``argmax(logits / T + G)`` over the tokens that
survive top-k, top-p and min-p, with ``G`` the Gumbel row of the position being decided: an exact sample of the warped
softmax (the Gumbel-max trick). Nothing here looks at the tree, so a node's sample is what plain decoding samples there.
Every decision is a function of its own row alone.

This says what kernels are held to (:mod:`foresay.verifier.ops.sample`), which sort no row.

Contract of the filters (order: top-k, top-p, min-p; ties stay in):

* top-k keeps every token whose logit is at least the k-th largest;
* top-p, over what top-k kept, keeps a token while the mass of strictly likelier tokens is below p;
* min-p keeps a token of at least ``min_p`` times the largest probability.
"""

from __future__ import annotations

import math

from torch import Tensor

from foresay.spec.sampling import SamplingParams

#: What is sampled from a row that holds NaN or nothing finite. No token and no child of a node has this id.
BROKEN = -1


def sample(logits: Tensor, sampling: SamplingParams, noise: Tensor | None) -> Tensor:
    """Sample one token per row.

    logits: fp32[N, V]. noise: fp32[N, V], Gumbel rows of the positions being decided (None at temperature 0).
    Returns int64[N], ``BROKEN`` for a row that holds NaN or nothing finite: a node nobody steps into may be that.
    """
    noisy = logits
    if not sampling.greedy:
        assert noise is not None, "sampling above temperature 0 needs noise"
        scaled = keep_top_k(logits / sampling.temperature, sampling.top_k)
        noisy = keep_top_p_min_p(scaled, sampling.top_p, sampling.min_p) + noise
    winners = noisy.argmax(dim=-1)  # the first of the largest; NaN is larger than all
    sound = logits.gather(-1, winners[:, None]).squeeze(-1).isfinite()
    return winners.where(sound, BROKEN)


def keep_top_k(scaled: Tensor, k: int) -> Tensor:
    """fp32[N, V] with minus infinity in place of every token below the k-th largest of its row; k 0 or less is off."""
    if k <= 0 or k >= scaled.shape[-1]:
        return scaled
    threshold = scaled.topk(k, dim=-1, sorted=True).values[..., -1:]
    return scaled.masked_fill(scaled < threshold, -math.inf)


def keep_top_p_min_p(scaled: Tensor, top_p: float, min_p: float) -> Tensor:
    """fp32[.., V]: rows with minus infinity in place of the tokens that top-p, then min-p, take out."""
    weights = weights_of(scaled, scaled.amax(dim=-1, keepdim=True))
    if top_p < 1.0:
        ordered = weights.sort(dim=-1, descending=True).values
        mass = ordered.double().cumsum(dim=-1)
        kept = (mass - ordered < top_p * mass[..., -1:]).sum(dim=-1, keepdim=True)
        scaled = scaled.masked_fill(weights < ordered.gather(-1, (kept - 1).clamp(min=0)), -math.inf)
    return scaled.masked_fill(weights < min_p, -math.inf) if min_p > 0.0 else scaled


def weights_of(scaled: Tensor, largest: Tensor) -> Tensor:
    """Unnormalised probabilities, the largest 1, none below e**-80: ``exp`` is 40 times slower where it underflows."""
    return (scaled - largest).clamp_(min=-80.0).exp_()
