"""The likeliest children of each node of a draft, with the noise that the target will sample with.

What :mod:`foresay.drafters.candidates` does for the nodes of one request, for the nodes of several requests at once and
without a number on the host: so that the levels of a draft can be part of a captured graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.records import COLDEST, MOST_CHILDREN, RowSampling
from foresay.verifier.ops.sample import noise_of


def best_children(
    logits: Tensor,
    sampling: RowSampling,
    count: int,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row's ``logit / T + noise``, largest first, ties to the first column.

    logits: fp32[N, V]; NaN and plus infinity count as minus infinity. count: 1 to 64. token_ids: int64[V], which token
    of the target each column is, for a drafter that has a vocabulary of its own; None where they are the same.

    A row at temperature 0 has neither noise nor filters. Otherwise top-k, top-p and min-p leave tokens out, as the
    target's sample will, in that order and with ties to the first column; a row that keeps more than 64 tokens by these
    filters keeps all, and a top-k above 64 is no filter.

    Returns int64[N, count], tokens of the target, and fp32[N, count], log chances: the log softmax of what was ranked.
    A place for which no token is left has token 0 and minus infinity.
    """
    assert 1 <= count <= MOST_CHILDREN, "one node has 1 to 64 children"
    if logits.is_cuda:
        from foresay.verifier.ops.kernels import children as kernels

        return kernels.best_children(logits, sampling, count, token_ids)
    if compiled(logits):
        from foresay.verifier.ops.kernels.cpu import children as of_cpu

        return of_cpu.best_children(logits, sampling, count, token_ids)
    greedy = (sampling.temperature < COLDEST)[:, None]
    scaled = logits.where(logits < math.inf, -math.inf) / sampling.temperature[:, None].masked_fill(greedy, 1.0)
    noisy = (scaled + _noise(logits, sampling, token_ids)).where(_kept(scaled, sampling), -math.inf)
    noisy = scaled.where(greedy, noisy)
    short = max(0, count - noisy.shape[1])
    best, columns = functional.pad(noisy, (0, short), value=-math.inf).sort(dim=-1, descending=True, stable=True)
    best, columns = best[:, :count], columns[:, :count]
    left = best > -math.inf
    columns = columns.where(left, 0)
    tokens = columns if token_ids is None else token_ids[columns]
    chances = best - noisy.logsumexp(dim=-1, keepdim=True)
    return tokens.where(left, 0), chances.where(left, -math.inf)


def _noise(logits: Tensor, sampling: RowSampling, token_ids: Tensor | None) -> Tensor:
    rows = [noise_of(sampling, n, logits.shape[1], token_ids) for n in range(len(logits))]
    return torch.stack(rows) if rows else torch.zeros_like(logits)


def _kept(scaled: Tensor, sampling: RowSampling) -> Tensor:
    """bool[N, V]: what the filters keep, decided among the likeliest."""
    likeliest, columns = scaled.sort(dim=-1, descending=True, stable=True)
    likeliest, columns = likeliest[:, :MOST_CHILDREN], columns[:, :MOST_CHILDREN]
    weights = (likeliest - likeliest[:, :1]).exp()
    ranks = torch.arange(weights.shape[1], device=weights.device)
    top_k, top_p = sampling.top_k[:, None], sampling.top_p[:, None]
    by_k = (top_k > 0) & (top_k <= MOST_CHILDREN)
    allowed = ~by_k | (ranks < top_k)
    all_mass = (scaled - likeliest[:, :1]).exp().sum(dim=-1, keepdim=True)
    mass = (weights * allowed).sum(dim=-1, keepdim=True).where(by_k, all_mass)
    before = weights.cumsum(dim=-1) - weights
    allowed &= ((before < top_p * mass) | (top_p >= 1.0)) & (weights >= sampling.min_p[:, None])
    decided = by_k | ~allowed.all(dim=-1, keepdim=True)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter(1, columns, allowed) | ~decided
