"""A drafter's logits as the request wants them: penalties, bias, bans, a grammar, as the target's will be.

What may not be said is not drafted.

A drafter that has a vocabulary of its own says which token of the target each of its columns is (``token_ids``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foresay.spec.decide import edits_at, edits_logits
from foresay.spec.sequence import SequenceState
from foresay.verifier.ops.edit import edit_logits


def adjusts(sequence: SequenceState, depth: int) -> bool:
    """Whether the request changes the logits of the tokens sampled below this depth."""
    return sequence.constraint is not None or edits_logits(sequence, depth)


def by_path(sequence: SequenceState) -> bool:
    """Whether it changes them from node to node."""
    adjustment = sequence.adjustment
    return sequence.constraint is not None or (adjustment is not None and adjustment.by_path)


def adjusted(
    logits: Tensor,
    sequence: SequenceState,
    depth: int,
    paths: Sequence[Sequence[int]],
    allowed: Sequence[Tensor | None],
    token_ids: Tensor | None = None,
) -> Tensor:
    """fp32[R, V']: a copy of the logits, changed as the target's will be at these nodes.

    paths: of each node, the tokens from below the root. allowed: int32[ceil(V / 32)], what a grammar lets follow each.
    """
    vocab_size = sequence.noise.vocab_size
    columns = torch.arange(min(logits.shape[1], vocab_size)) if token_ids is None else token_ids
    wide = torch.full((len(logits), vocab_size), -torch.inf)
    wide[:, columns] = logits[:, : len(columns)]
    masks = None
    if any(each is not None for each in allowed):
        unknown = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
        masks = torch.stack([unknown if each is None else each for each in allowed])
    edit_logits(wide, edits_at(sequence, [depth] * len(wide), paths, masks))
    return wide[:, columns]
