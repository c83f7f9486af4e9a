"""The log-probabilities that a step owes: of the prompt's tokens as their rows are computed, of the emitted run."""

from __future__ import annotations

import torch
from torch import Tensor

from foresay.spec.logprobs import logprobs_of
from foresay.spec.request import TokenLogprobs
from foresay.spec.sequence import SequenceState


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
