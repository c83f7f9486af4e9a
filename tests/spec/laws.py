"""What the sample is measured against: the filters spelled out, the hash in other words, and the chi-square test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.spec.sampling import SamplingParams

#: A right program fails a test of this level once in a million seeds, and the seeds are fixed.
ALPHA = 1e-6

Words = NDArray[np.uint64]


def kept(scaled: Tensor, sampling: SamplingParams) -> Tensor:
    """bool[V]: the tokens that survive top-k, top-p, min-p, by sorting everything in float64; ties stay in."""
    values = scaled.double()
    keep = values > -math.inf
    if 0 < sampling.top_k < len(values):
        keep &= values >= values.sort(descending=True).values[sampling.top_k - 1]
    weights = torch.where(keep, values, -math.inf).softmax(-1)
    distinct, which = values.unique(return_inverse=True)
    mass = torch.zeros_like(distinct).index_add_(0, which, weights)
    likelier = mass.flip(0).cumsum(0).flip(0) - mass
    if sampling.top_p < 1.0:
        keep &= likelier[which] < sampling.top_p
    return keep & (weights >= sampling.min_p * weights.max())


def law(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """fp64[V]: the exact distribution that a sample from one row of logits has at temperature above 0."""
    scaled = logits.double() / sampling.temperature
    return torch.where(kept(scaled, sampling), scaled, -math.inf).softmax(-1)


def reference_draw(logits: Tensor, sampling: SamplingParams, noise: Tensor) -> int:
    """One sample from one row: list the survivors, add the noise, take the largest."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits / sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        scaled = torch.where(kept(scaled, sampling), scaled, -math.inf)
    return int((scaled + noise).argmax())


def reference_adjust(
    logits: Tensor, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], allowed: Container[int]
) -> Tensor:
    """fp32[V]: a row of raw logits as the request wants it, token by token. allowed: what the grammar lets through."""
    row = logits.clone()
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *output}:
        row[token] = (
            row[token] / sampling.repetition_penalty if row[token] > 0 else row[token] * sampling.repetition_penalty
        )
    for token, count in Counter(output).items():
        row[token] -= torch.tensor(float(count)) * sampling.frequency_penalty + sampling.presence_penalty
    text = (*prompt, *output)
    for words in sampling.bad_words:
        if text[len(text) - len(words) + 1 :] == words[:-1] and len(words) <= len(text) + 1:
            row[words[-1]] = -math.inf
    for token in range(len(row)):
        if token not in allowed or not (sampling.allowed_token_ids is None or token in sampling.allowed_token_ids):
            row[token] = -math.inf
    return row


def chi_square_tail(counts: Tensor, probabilities: Tensor) -> float:
    """The chance of counts at least this far from ``probabilities``; cells that expect fewer than 10 are merged.

    Probability 0 must mean count 0: anything else has no chance at all.
    """
    counts, expected = counts.flatten().double(), probabilities.flatten().double() * float(counts.sum())
    if bool(counts[expected == 0].any()):
        return 0.0
    small = expected < 10
    if float(expected[small].sum()) >= 10:
        counts = torch.cat((counts[~small], counts[small].sum()[None]))
        expected = torch.cat((expected[~small], expected[small].sum()[None]))
    else:
        counts, expected = counts[~small], expected[~small]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def pair_tail(first: Tensor, second: Tensor, probabilities: Tensor) -> float:
    """The chance of the counts of pairs, if both samples have ``probabilities`` and know nothing of each other."""
    size = len(probabilities)
    counts = torch.bincount(first * size + second, minlength=size * size)
    return chi_square_tail(counts, torch.outer(probabilities, probabilities))


def gumbel(seeds: int | Sequence[int], positions: int | Sequence[int], vocab_size: int) -> Tensor:
    """fp32[N, V]: the noise rows of many (seed, position) at once."""
    words = integers(_words(seeds), _words(positions), vocab_size)
    uniform = torch.from_numpy(words.astype(np.int32)).to(torch.float32)
    uniform = (uniform * 2.0**-31 + 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def integers(seeds: Words, positions: Words, vocab_size: int) -> NDArray[np.uint32]:
    """uint32[N, V]: the 31 random bits behind each noise value, in numpy."""
    key = _mix64(_mix64(seeds) ^ positions)
    low, high = (
        np.broadcast_to(part.astype(np.uint32)[:, None], (len(key), 1)) for part in (key, key >> np.uint64(32))
    )
    x = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B1)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x85EBCA77)
    x ^= x >> np.uint32(13)
    x = x ^ low
    x *= np.uint32(0xC2B2AE3D)
    x ^= x >> np.uint32(16)
    x += high
    x *= np.uint32(0x27D4EB2F)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x165667B1)
    x ^= x >> np.uint32(16)
    return x & np.uint32(0x7FFFFFFF)


def _words(values: int | Sequence[int]) -> Words:
    return np.array([values] if isinstance(values, int) else values, dtype=np.uint64)


def _mix64(words: Words) -> Words:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
