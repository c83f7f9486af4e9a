"""What could follow a node: the drafter's logits as the request wants them, with the noise the target will draw with.

::

    adjusted    penalties, bias, bans, a grammar, as the target's logits will be: what may not be said is not drafted
    filtered    at the request's temperature, without what top-k, top-p or min-p would take out if the target saw these
    noisy       plus the noise of the position
    best        the likeliest tokens and their chances, the softmax of that

A drafter that has a vocabulary of its own says which token of the target each of its columns is (``token_ids``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from spec.draw import keep_top_k
from spec.sampling import SamplingParams
from spec.sequence import Sequence

#: Top-p is looked for among so many of the likeliest tokens; if it needs more, nothing is taken out.
_NUCLEUS = 256


def with_noise(
    logits: Tensor, sequence: Sequence, depth: int, token_ids: Tensor | None = None, shared: bool = True
) -> Tensor:
    """fp32[R, V']: logits at the request's temperature, plus the noise of the token drawn below depth ``depth``.

    token_ids: int64[V'], the target's id of each column; None where they are the same (columns past the target's
    vocabulary are cut off). shared: False leaves the noise out, for comparison.
    """
    if token_ids is None:
        logits = logits[:, : sequence.noise.vocab_size]
    if sequence.sampling.greedy:
        return logits
    scaled = filtered(logits / sequence.sampling.temperature, sequence.sampling)
    if not shared:
        return scaled
    noise = sequence.noise.row(len(sequence.tokens) + depth)
    return scaled + (noise[: scaled.shape[1]] if token_ids is None else noise[token_ids])


def filtered(scaled: Tensor, sampling: SamplingParams) -> Tensor:
    """fp32[R, V']: minus infinity where the request's filters would take a token out; about, since they cost a sort.

    scaled: the logits at the request's temperature. (:mod:`spec.draw` has the filters that count.)
    """
    if sampling.top_k > 0:
        scaled = keep_top_k(scaled, sampling.top_k)
    if sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return scaled
    best = scaled.topk(min(_NUCLEUS, scaled.shape[-1]), dim=-1).values
    least = best[:, :1] + (math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf)
    if sampling.top_p < 1.0:
        shares = (best - scaled.logsumexp(dim=-1, keepdim=True)).exp()
        needed = (shares.cumsum(dim=-1) - shares < sampling.top_p).sum(dim=-1, keepdim=True)
        # In a row of nothing but minus infinity or NaN nothing is needed; what comes of it is left to whoever looks.
        last = best.gather(-1, needed.clamp_(min=1) - 1)
        least = least.maximum(last.masked_fill(needed == best.shape[-1], -math.inf))
    return scaled.masked_fill(scaled < least, -math.inf)


def best_children(noisy: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row: int64[R, k] ids of the target, fp32[R, k] log chances, best first."""
    best = noisy.topk(min(count, noisy.shape[-1]), dim=-1)
    chances = best.values - noisy.logsumexp(dim=-1, keepdim=True)
    return (best.indices if token_ids is None else token_ids[best.indices]), chances


def adjusts(sequence: Sequence, depth: int) -> bool:
    """Whether the request changes the logits of the tokens drawn below this depth."""
    return sequence.adjustment is not None or sequence.constraint is not None or _early(sequence, depth)


def by_path(sequence: Sequence) -> bool:
    """Whether it changes them from node to node."""
    adjustment = sequence.adjustment
    return sequence.constraint is not None or (adjustment is not None and adjustment.by_path)


def _early(sequence: Sequence, depth: int) -> bool:
    """Whether no stop token can be drawn below this depth yet."""
    return bool(sequence.stop_ids) and sequence.output_length + depth < sequence.sampling.min_tokens


def adjusted(
    logits: Tensor,
    sequence: Sequence,
    depth: int,
    paths: Many[Many[int]],
    banned: Many[Tensor | None],
    token_ids: Tensor | None = None,
) -> Tensor:
    """fp32[R, V']: a copy of the logits, changed as the target's will be at these nodes.

    paths: of each node, the tokens from below the root. banned: bool[V], what a grammar rules out after each.
    """
    vocab_size = sequence.noise.vocab_size
    columns = torch.arange(min(logits.shape[1], vocab_size)) if token_ids is None else token_ids
    wide = torch.full((len(logits), vocab_size), -torch.inf)
    wide[:, columns] = logits[:, : len(columns)]
    if sequence.adjustment is not None:
        sequence.adjustment.apply(wide, sequence.tokens, paths)
    for row, ban in zip(wide, banned, strict=True):
        if ban is not None:
            row.masked_fill_(ban, -torch.inf)
    if _early(sequence, depth):
        wide[:, sorted(sequence.stop_ids)] = -torch.inf
    return wide[:, columns]
