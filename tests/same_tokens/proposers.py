"""A drafter for tests: random trees of random tokens, in which it may hide the truth."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from foresay.spec.protocols import FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape


class RandomTrees:
    """Implements :class:`foresay.spec.protocols.Drafter`. Siblings may be equal, trees may be empty, most tokens are
    wrong.

    known: the whole text of some sequences, by id. Of those one random path tells the truth, for some levels.
    """

    name = "random"
    needs: FeatureRequest | None = None

    def __init__(self, vocab_size: int, seed: int = 0, known: Mapping[str, list[int]] | None = None) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._known = known or {}

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        return [self._tree(sequence, shape) for sequence, shape in zip(sequences, shapes, strict=True)]

    def _tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree:
        parents = self._parents(shape)
        tokens = [sequence.tokens[-1], *(self._rng.randrange(self._vocab_size) for _ in parents[1:])]
        coming = self._known.get(sequence.id, [])[len(sequence.tokens) :]
        path = _path(parents, self._rng.randrange(len(parents)))
        for node, token in zip(path[1:], coming, strict=False):
            tokens[node] = token
        return DraftTree.build(tokens, parents, self.name)

    def _parents(self, shape: TreeShape) -> list[int]:
        """A random tree within the shape's levels and nodes, from almost a chain to a bush."""
        parents, depths = [-1], [0]
        reach = self._rng.choice((1, 1, 2, 4, 64))
        for node in range(1, self._rng.randint(1, shape.nodes)):
            inner = [n for n in range(max(0, node - reach), node) if depths[n] < shape.levels] or [0]
            parents.append(self._rng.choice(inner))
            depths.append(depths[parents[-1]] + 1)
        return parents

    def extend(self, sequence: SequenceState) -> None: ...

    def committed(self, sequence: SequenceState, path: list[int]) -> None: ...

    def finished(self, sequence: SequenceState) -> None: ...


def _path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path[::-1]
