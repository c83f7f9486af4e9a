"""Medusa heads propose: each guesses a token further on from the hidden state of the last committed row.

One small product per depth for all sequences, no cache, no state but one hidden row per sequence. Heads do not see
what the others chose, so below every node of a depth the candidates are the same. A sequence whose last row nobody
has shown yet (the first step after a prefix hit that left nothing to compute) drafts nothing in that step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from drafters.calibration import Calibration
from drafters.growth import Growing, lengthened
from spec.features import Features
from spec.names import MEDUSA
from spec.protocols import FeatureRequest
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape
from verifier.heads.medusa import MedusaHeads
from verifier.ops import nodes


@dataclass(frozen=True, slots=True)
class _Last:
    """hidden: [H], the state of the row at position ``length - 1``."""

    length: int
    hidden: Tensor


class MedusaDrafter:
    """Implements :class:`spec.protocols.Drafter`. dynamic: see :mod:`drafters.growth`.

    shared_noise: whether drafts are sampled with the target's own noise; False is for comparison. elsewhere: who is
    asked for the last row of a sequence if it was not shown here, since captured steps keep it.
    """

    shared_noise: bool = True
    needs: FeatureRequest | None = FeatureRequest(final=True)

    def __init__(self, heads: MedusaHeads, dynamic: bool = True, name: str = MEDUSA) -> None:
        self.name, self.dynamic = name, dynamic
        self.heads, self.calibration = heads, Calibration()
        self.elsewhere: list[Callable[[Sequence], Tensor | None]] = []
        self._grown: dict[str, Growing] = {}
        self._last: dict[str, _Last] = {}

    @cached_property
    def _token_ids(self) -> Tensor | None:
        """The heads', on the host; brought there when first needed, since an outline of heads has none to bring."""
        return None if self.heads.token_map is None else self.heads.token_map.cpu()

    def observe(self, sequence: Sequence, features: Features) -> None:
        """Keep the last committed row: the root was drawn from it."""
        self._last[sequence.id] = _Last(sequence.table.length, features["final"][-1].clone())

    def propose(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[DraftTree]:
        """One tree per sequence, as deep as there are heads."""
        shapes = [shape.limited(len(self.heads)) for shape in shapes]
        growing = [
            Growing.below(s, shape, self.dynamic, self.calibration, free=True)
            for s, shape in zip(sequences, shapes, strict=True)
        ]
        self._grow(growing)
        self._grown.update((g.sequence.id, g) for g in growing if g.depth)
        return [g.tree(self.name) for g in growing]

    def _grow(self, growing: list[Growing]) -> None:
        """Each depth's head is run once for all sequences whose last row is known."""
        found = {g.sequence.id: self.hidden(g.sequence) for g in growing}
        hidden = {name: row for name, row in found.items() if row is not None}
        while growing := [g for g in growing if g.sequence.id in hidden and not g.done]:
            logits = self.heads(torch.stack([hidden[g.sequence.id] for g in growing]), growing[0].depth)
            lengthened(growing, logits.cpu().split(1), nodes, self.shared_noise, self._token_ids)

    def hidden(self, sequence: Sequence) -> Tensor | None:
        """[H]: the row that the sequence's root was drawn from, if anybody has it."""
        length, last = sequence.table.length, self._last.get(sequence.id)
        if length != len(sequence.tokens) - 1:
            return None
        if last is not None and last.length == length:
            return last.hidden
        found = (find(sequence) for find in self.elsewhere)
        return next((hidden for hidden in found if hidden is not None), None)

    def extend(self, sequence: Sequence) -> None:
        """Nothing is cached."""

    def committed(self, sequence: Sequence, path: list[int]) -> None:
        """Nothing is cached; the calibration learns."""
        if grown := self._grown.pop(sequence.id, None):
            grown.learn(path)

    def finished(self, sequence: Sequence) -> None:
        """Forget the hidden row."""
        self._grown.pop(sequence.id, None)
        self._last.pop(sequence.id, None)
