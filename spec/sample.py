"""The sample: one token from each row of logits, as plain sampling with position-keyed noise would take it.

At temperature 0 the sample is the first largest logit. Otherwise it is ``argmax(logits / T + G)`` over the tokens that
survive top-k, top-p and min-p, with ``G`` the Gumbel row of the position being decided: an exact sample of the warped
softmax (the Gumbel-max trick). Nothing here depends on the tree, so a node's sample is what plain decoding samples
there. Every sample is a function of its own row only.

This is the reference for the kernels (:mod:`foresay.verifier.ops.sample`), which do not sort rows.

Contract of the filters (order: top-k, top-p, min-p; ties stay in):

* top-k keeps every token whose logit is at least the k-th largest;
* top-p, over what top-k kept, keeps a token while the mass of strictly likelier tokens is below p;
* min-p keeps a token of at least ``min_p`` times the largest probability.

The noise is the shared randomness of drafting and verifying. What is added to the logits at one absolute position is a
function only of (request seed, position, token id), never of the batch, the step, the tree or the drafter. So the token
sampled at a position is the same however many positions one forward pass computes, which is promise 1 at temperature
above 0. See docs/same-tokens.md.

The hash is a 32-bit integer mix (multiply, xor-shift), bit-identical in torch and in kernels. Its low 31 bits make a
uniform number that is finest near 0, where the winners of the exponential race are: ``E = -log1p(-u)``,
``G = -log(E)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foresay.spec.sampling import SamplingParams, mix64

#: The sample of a row that holds NaN or nothing finite. No token and no child of a node has this id.
BROKEN = -1


def sample(logits: Tensor, sampling: SamplingParams, noise: Tensor | None) -> Tensor:
    """Sample one token per row.

    logits: fp32[N, V]. noise: fp32[N, V], Gumbel rows of the positions being decided (None at temperature 0).
    Returns int64[N], ``BROKEN`` for a row that holds NaN or nothing finite, as that of an unreached node may.
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
    """fp32[.., V]: rows with minus infinity in place of the tokens that top-p, then min-p, remove."""
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


_MASK64 = (1 << 64) - 1
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def hashed(x, low, high):  # type: ignore[no-untyped-def] # Triton would read the types
    """31 random bits for each token, computed in int32. low, high: the halves of a position's key.

    It runs on torch tensors and inside GPU and CPU kernels: where ``>>`` keeps the sign, the mask after it removes the
    sign bits.
    """
    x = x * -0x61C8864F
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7A143589
    x = (x ^ ((x >> 13) & 0x7FFFF) ^ low) * -0x3D4D51C3
    x = ((x ^ ((x >> 16) & 0xFFFF)) + high) * 0x27D4EB2F
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x165667B1
    return (x ^ ((x >> 16) & 0xFFFF)) & 0x7FFFFFFF


def noise_bits(seed: int, position: int, vocab_size: int) -> Tensor:
    """int32[V]: 31 random bits for every token at one absolute position."""
    key = torch.tensor([mix64(mix64(seed & _MASK64) ^ position)], dtype=torch.uint64).view(torch.int32)
    bits: Tensor = hashed(torch.arange(vocab_size, dtype=torch.int32), key[0], key[1])  # type: ignore[no-untyped-call]
    return bits


def gumbel_row(seed: int, position: int, vocab_size: int) -> Tensor:
    """fp32[V]: standard Gumbel noise for every token at one absolute position.

    Always computed over the whole vocabulary, one row per call, so the bits cannot depend on the caller.
    """
    uniform = noise_bits(seed, position, vocab_size).to(torch.float32)
    uniform.mul_(2.0**-31).add_(2.0**-32).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one sequence, from its seed, for every token of the target."""

    seed: int
    vocab_size: int

    def row(self, position: int) -> Tensor:
        """fp32[V]: the noise for the token at ``position``."""
        return gumbel_row(self.seed, position, self.vocab_size)
