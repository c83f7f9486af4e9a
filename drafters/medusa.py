"""Medusa heads propose: each guesses a token further on from the hidden state of the last committed row.

One small product per depth for all sequences, no cache, no state but one hidden row per sequence. Heads do not see
what the others chose, so below every node of a depth the candidates are the same. A sequence whose last row nobody
has shown yet (the first step after a prefix hit that left nothing to compute) drafts nothing in that step.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.growth import Level, best_children, grow_independent, with_noise
from spec.features import Features
from spec.protocols import FeatureRequest
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape
from verifier.heads.medusa import MedusaHeads


@dataclass(frozen=True, slots=True)
class _Last:
    """hidden: [H], the state of the row at position ``length - 1``."""

    length: int
    hidden: Tensor


class MedusaDrafter:
    """Implements :class:`spec.protocols.Drafter`. dynamic: see :mod:`drafters.growth`.

    shared_noise: whether drafts are sampled with the target's own noise; False is for comparison.
    """

    shared_noise: bool = True
    needs: FeatureRequest | None = FeatureRequest(final=True)

    def __init__(self, heads: MedusaHeads, dynamic: bool = True, name: str = "medusa") -> None:
        self.name, self.dynamic = name, dynamic
        self.heads = heads
        self._last: dict[str, _Last] = {}

    def observe(self, sequence: Sequence, features: Features) -> None:
        """Keep the last committed row: the root was drawn from it."""
        self._last[sequence.id] = _Last(sequence.table.length, features["final"][-1].clone())

    def propose(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[DraftTree]:
        """One tree per sequence, as deep as there are heads."""
        shapes = [shape.limited(len(self.heads)) for shape in shapes]
        ready = [index for index, sequence in enumerate(sequences) if self._knows(sequence) and shapes[index].levels]
        levels = self._levels([sequences[index] for index in ready], [shapes[index] for index in ready])
        trees = [DraftTree.chain([sequence.tokens[-1]]) for sequence in sequences]
        for index, found in zip(ready, levels, strict=True):
            trees[index] = self._tree(sequences[index], found, shapes[index])
        return trees

    def _knows(self, sequence: Sequence) -> bool:
        last = self._last.get(sequence.id)
        return last is not None and last.length == sequence.table.length == len(sequence.tokens) - 1

    def _levels(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[list[Level]]:
        """The candidates of each depth, for each sequence."""
        found: list[list[Level]] = [[] for _ in sequences]
        if not sequences:
            return found
        hidden = torch.stack([self._last[sequence.id].hidden for sequence in sequences])
        for depth in range(max(shape.levels for shape in shapes)):
            logits = self.heads(hidden, depth)
            for index, (sequence, shape) in enumerate(zip(sequences, shapes, strict=True)):
                if depth < shape.levels:
                    found[index].append(self._level(sequence, shape, depth, logits[index : index + 1]))
        return found

    def _level(self, sequence: Sequence, shape: TreeShape, depth: int, logits: Tensor) -> Level:
        """The candidates of one depth; a chain needs only the first."""
        noisy = with_noise(logits, sequence, depth, self.heads.token_map, self.shared_noise)
        count = shape.nodes - 1 if self.dynamic else shape.widths[depth]
        tokens, chances = best_children(noisy, count, self.heads.token_map)
        return tokens[0].tolist(), chances[0].tolist()

    def _tree(self, sequence: Sequence, levels: list[Level], shape: TreeShape) -> DraftTree:
        if shape.nodes == shape.levels + 1:
            return DraftTree.chain([sequence.tokens[-1], *(tokens[0] for tokens, _ in levels)], self.name)
        tokens, parents = grow_independent(sequence.tokens[-1], levels, shape, self.dynamic)
        return DraftTree.build(tokens, parents, self.name)

    def extend(self, sequence: Sequence) -> None:
        """Nothing is cached."""

    def committed(self, sequence: Sequence, path: list[int], moves: tuple[Tensor, Tensor] | None) -> None:
        """Nothing is cached."""

    def finished(self, sequence: Sequence) -> None:
        """Forget the hidden row."""
        self._last.pop(sequence.id, None)
