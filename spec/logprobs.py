"""How likely tokens were: log-probabilities of the model's own distribution, from raw logits.

Each row is treated alone and its sum has a fixed order (:func:`row_sum`), so an entry has the same
bits whatever tree, batch or chunk its row was computed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from foresay.spec.request import TokenLogprobs
from foresay.spec.sample import weights_of
from foresay.spec.sequence import SequenceState

#: Stands for minus infinity, which JSON cannot say.
IMPOSSIBLE = -9999.0
#: Rows are summed in pieces of this many: a row's sum then never depends on how many rows or threads there are.
_SUM_CHUNK = 4096


def logprobs_of(rows: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """One entry per token.

    rows: fp32[N, V], the raw logits that each token was sampled from. count: how many of the likeliest are listed.
    """
    return [_entry(row, token, count) for row, token in zip(rows, tokens, strict=True)]


def _entry(row: Tensor, token: int, count: int) -> TokenLogprobs:
    largest = row.max()
    total = float(largest) + math.log(float(row_sum(weights_of(row, largest)[None])))
    top = _likeliest(row, count)
    values = row[[token, *top]].tolist()
    chosen, *listed = (max(value - total, IMPOSSIBLE) for value in values)
    return TokenLogprobs(token, chosen, list(zip(top, listed, strict=True)))


def _likeliest(row: Tensor, count: int) -> list[int]:
    """The ids of the largest logits, largest first; of equal ones the lower id."""
    if not count:
        return []
    least = row.topk(min(count, len(row))).values[-1]
    ids = (row >= least).nonzero().flatten()
    # A stable sort keeps equal values in the order of their ids.
    order = row[ids].sort(descending=True, stable=True).indices
    top: list[int] = ids[order][:count].tolist()
    return top


def row_sum(values: Tensor) -> Tensor:
    """fp32[N]: the sum of each row, in an order fixed by the row's length alone."""
    short = -values.shape[-1] % _SUM_CHUNK
    if short:
        values = functional.pad(values, (0, short))
    chunks = values.view(*values.shape[:-1], -1, _SUM_CHUNK)
    return chunks.sum(dim=-1).sum(dim=-1)


def score_prompt(sequence: SequenceState, logits: Tensor) -> None:
    """Entries for the prompt tokens that follow the rows of a chunk which is not committed yet."""
    entries, base, count = sequence.prompt_logprobs, sequence.table.length, sequence.sampling.prompt_logprobs
    assert entries is not None and count is not None
    # Computed again after preemption, a chunk may lie before the next token to score.
    tokens = sequence.tokens[len(entries) : min(base + len(logits) + 1, sequence.prompt_length)]
    first = len(entries) - 1 - base
    entries += logprobs_of(logits[first : first + len(tokens)].cpu(), tokens, count)


def logprobs_of_run(
    sequence: SequenceState, logits: Tensor, path: list[int], emitted: list[int]
) -> list[TokenLogprobs]:
    """One entry per emitted token, from the raw row of the node it was sampled at."""
    count = sequence.sampling.logprobs
    assert count is not None
    return logprobs_of(logits[torch.tensor(path, dtype=torch.int64)].cpu(), emitted, count)
