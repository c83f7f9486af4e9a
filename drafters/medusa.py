"""Medusa heads propose: each guesses a token further on from the hidden state of the last committed row.

One small product per depth for all sequences, no cache, no state but one hidden row per sequence. Heads do not see
what the others chose, so below every node of a depth the candidates are the same. A sequence whose last row nobody
has shown yet (the first step after a prefix hit that left nothing to compute) drafts nothing in that step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.growth import Growth
from drafters.levels import TreeDrafter
from spec.features import Features
from spec.names import MEDUSA
from spec.protocols import FeatureRequest
from spec.sequence import Sequence
from spec.tree import TreeShape
from verifier.heads.medusa import MedusaHeads


@dataclass(frozen=True, slots=True)
class _Last:
    """hidden: [H], the state of the row at position ``length - 1``."""

    length: int
    hidden: Tensor


class MedusaDrafter(TreeDrafter):
    """Drafts with heads, as deep as there are heads.

    elsewhere: who is asked for the last row of a sequence if it was not shown here, since captured steps keep it.
    """

    free = True
    needs: FeatureRequest | None = FeatureRequest(final=True)

    def __init__(self, heads: MedusaHeads, dynamic: bool = True, name: str = MEDUSA) -> None:
        super().__init__(name, dynamic, heads.device)
        self.heads, self.token_ids = heads, heads.token_map
        self.elsewhere: list[Callable[[Sequence], Tensor | None]] = []
        self._last: dict[str, _Last] = {}

    def observe(self, sequence: Sequence, features: Features) -> None:
        """Keep the last committed row: the root was drawn from it."""
        self._last[sequence.id] = _Last(sequence.table.length, features["final"][-1].clone())

    def limited(self, shape: TreeShape) -> TreeShape:
        """Not deeper than there are heads."""
        return shape.limited(len(self.heads))

    def able(self, sequence: Sequence) -> bool:
        """Whether its last row is known."""
        return self.hidden(sequence) is not None

    def first(self, sequences: Many[Sequence]) -> tuple[Tensor, Tensor]:
        """The first head, run once for all sequences."""
        rows = [row for sequence in sequences if (row := self.hidden(sequence)) is not None]
        hidden = torch.stack(rows)
        return self.heads(hidden, 0), hidden

    def next(self, growth: Growth, states: Tensor | None, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next head: the same below every node."""
        assert states is not None, "the roots' hidden rows"
        depth = len(growth.levels)
        logits = self.heads(states, depth)
        if growth.plan.apart:
            logits = logits.repeat_interleave(growth.plan.levels[depth].front, dim=0)
        return logits, states

    def hidden(self, sequence: Sequence) -> Tensor | None:
        """[H]: the row that the sequence's root was drawn from, if anybody has it."""
        length, last = sequence.table.length, self._last.get(sequence.id)
        if length != len(sequence.tokens) - 1:
            return None
        if last is not None and last.length == length:
            return last.hidden
        found = (find(sequence) for find in self.elsewhere)
        return next((hidden for hidden in found if hidden is not None), None)

    def finished(self, sequence: Sequence) -> None:
        """Forget the hidden row too."""
        super().finished(sequence)
        self._last.pop(sequence.id, None)
