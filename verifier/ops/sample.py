"""The sample at every row of a pass, each row with sampling parameters, seed and position of its own.

What :func:`foresay.spec.sample.sample` does for the nodes of one request, for the nodes of several requests at once and
without a number on the host: so that it can be part of a captured graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.spec.noise import gumbel_row
from foresay.spec.sample import BROKEN, sample
from foresay.spec.sampling import SamplingParams
from foresay.verifier.ops.eager import compiled
from foresay.verifier.ops.records import RowSampling


def sample_rows(
    logits: Tensor, sampling: RowSampling, token_ids: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """Sample one token per row, under the contract of :func:`foresay.spec.sample.sample`.

    logits: fp32[N, V]. token_ids: int64[V], which token of the target each column is, for a drafter that has a
    vocabulary of its own; None where they are the same. The noise is that of the target's tokens, and ties go to the
    first column. count: int64[1], how many rows are sampled, read when it runs (of compiled kernels; None: all).
    Returns int64[N], tokens of the target, ``BROKEN`` for a row that holds NaN, plus infinity or nothing finite.
    """
    if logits.is_cuda:
        from foresay.verifier.ops.kernels import sample as kernels

        return kernels.sample_rows(logits, sampling, token_ids)
    if compiled(logits):
        return _compiled(logits, sampling, token_ids, count)
    sampled = [_sample_row(row, sampling, n, token_ids) for n, row in enumerate(logits.split(1))]
    return torch.cat(sampled) if sampled else torch.empty(0, dtype=torch.int64)


def _compiled(logits: Tensor, sampling: RowSampling, token_ids: Tensor | None, count: Tensor | None) -> Tensor:
    from foresay.verifier.ops.kernels.cpu import sample as kernels
    from foresay.verifier.ops.kernels.cpu.launch import counted, room

    sampled = room((len(logits),), torch.int64)
    kernels.sample_rows(logits.contiguous(), sampling, token_ids, sampled, counted(count, len(logits)))
    return sampled


def _sample_row(row: Tensor, sampling: RowSampling, n: int, token_ids: Tensor | None) -> Tensor:
    asked = SamplingParams(
        temperature=float(sampling.temperature[n]),
        top_k=int(sampling.top_k[n]),
        top_p=float(sampling.top_p[n]),
        min_p=float(sampling.min_p[n]),
    )
    noise = None if asked.greedy else noise_of(sampling, n, row.shape[1], token_ids)[None]
    sampled = sample(row, asked, noise)
    return sampled if token_ids is None else token_ids[sampled].where(sampled != BROKEN, BROKEN)


def noise_of(sampling: RowSampling, n: int, columns: int, token_ids: Tensor | None = None) -> Tensor:
    """fp32[V]: the noise of row n at each column; a token's noise does not depend on the size of the vocabulary."""
    vocab_size = columns if token_ids is None else int(token_ids.max()) + 1
    noise = gumbel_row(int(sampling.seeds[n]), int(sampling.positions[n]), vocab_size)
    return noise if token_ids is None else noise[token_ids]
