"""A drafter's logits as the request wants them: penalties, bias, bans, a grammar, as the target's will be.

What may not be said is not drafted.

A drafter that has a vocabulary of its own says which token of the target each of its columns is (``token_ids``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.spec.sequence import SequenceState


def adjusts(sequence: SequenceState, depth: int) -> bool:
    """Whether the request changes the logits of the tokens sampled below this depth."""
    return sequence.adjustment is not None or sequence.constraint is not None or _early(sequence, depth)


def by_path(sequence: SequenceState) -> bool:
    """Whether it changes them from node to node."""
    adjustment = sequence.adjustment
    return sequence.constraint is not None or (adjustment is not None and adjustment.by_path)


def _early(sequence: SequenceState, depth: int) -> bool:
    """Whether no stop token can be sampled below this depth yet."""
    return bool(sequence.stop_ids) and sequence.output_length + depth < sequence.sampling.min_tokens


def adjusted(
    logits: Tensor,
    sequence: SequenceState,
    depth: int,
    paths: Sequence[Sequence[int]],
    banned: Sequence[Tensor | None],
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
