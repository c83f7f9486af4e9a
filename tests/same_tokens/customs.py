"""Drafters of a user's own, as ``--draft tests.same_tokens.customs:NAME`` names them: one good, the others faulty."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from foresay.spec.protocols import FeatureRequest
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape


class Quiet:
    """Drafts nothing."""

    name = "quiet"
    needs: FeatureRequest | None = None

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> Any:
        return [self.tree(*parts) for parts in zip(sequences, shapes, strict=True)]

    def tree(self, sequence: SequenceState, shape: TreeShape) -> Any:
        return DraftTree.chain(sequence.tokens[-1:], self.name)

    def extend(self, sequence: SequenceState) -> None: ...

    def committed(self, sequence: SequenceState, path: list[int]) -> None: ...

    def finished(self, sequence: SequenceState) -> None: ...


class Good(Quiet):
    """Whatever followed a token the last time, in any text."""

    name = "good"

    def __init__(self) -> None:
        self.followers: dict[int, int] = {}

    def tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree:
        tokens = sequence.tokens
        self.followers.update(pairwise(tokens))
        chain = tokens[-1:]
        while len(chain) <= shape.levels and chain[-1] in self.followers:
            chain.append(self.followers[chain[-1]])
        return DraftTree.chain(chain, self.name)


class Random(Quiet):
    """Any tree of any tokens, sure of it or not."""

    name = "random"

    def __init__(self, vocab_size: int) -> None:
        self.rng, self.vocab_size = random.Random(7), vocab_size

    def tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree:
        tokens, parents, depths, chances = [sequence.tokens[-1]], [-1], [0], [1.0]
        for token in self.rng.sample(range(self.vocab_size), min(self.rng.randrange(shape.nodes), 63)):
            parent = self.rng.choice([node for node, depth in enumerate(depths) if depth < shape.levels])
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            chances.append(chances[parent] * self.rng.random())
        return DraftTree.build(tokens, parents, self.name, tuple(chances) if self.rng.random() < 0.5 else ())


class Raising(Good):
    """Fails every other time, wherever it is called."""

    name = "raising"

    def __init__(self, max_model_len: int = 0, *, target: str) -> None:
        super().__init__()
        self.calls = 0
        assert max_model_len
        assert target

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> Any:
        self._fail()
        return super().propose(sequences, shapes)

    def extend(self, sequence: SequenceState) -> None:
        self._fail()

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        self._fail()

    def finished(self, sequence: SequenceState) -> None:
        self._fail()

    def _fail(self) -> None:
        self.calls += 1
        if self.calls % 4 == 1:
            raise KeyError("nothing is where it was")
        if self.calls % 4 == 3:
            raise SystemExit(3)


def rubbish(sequence: SequenceState, shape: TreeShape) -> list[Any]:
    """What is no valid tree below the sequence's root."""
    root, of = sequence.tokens[-1], DraftTree.chain
    good = of([root, 1])
    parents, depths, words = good.parents, good.depths, good.ancestors
    return [
        None,
        [root, 1],
        of([root + 1, 1]),
        of([root, -1]),
        of([root, 1 << 40]),
        of([root, *range(shape.levels + 1)]),
        DraftTree.build([root, 1, 1], [-1, 0, 0]),
        DraftTree([root, 1.0], parents, depths, words),  # type: ignore[list-item]
        DraftTree([[root, 1]], parents, depths, words),  # type: ignore[list-item]
        DraftTree([], [], [], []),
        DraftTree([root, 1], [-1, 1], depths, words),
        DraftTree([root, 1], [-1, -5], depths, words),
        DraftTree([root, 1], [0, 0], depths, words),
        DraftTree([root, 1], parents[:1], depths, words),
        of([root, 1], chances=(1.0, math.nan)),
        of([root, 1], chances=(1.0, 2.0)),
        of([root, 1], chances=(0.5, 0.9)),
        of([root, 1], chances=(1.0,)),
        of([root, 1], chances=(1.0, "sure")),  # type: ignore[arg-type]
        DraftTree(5, parents, depths, words),  # type: ignore[arg-type]
    ]


class Rubbish(Quiet):
    """One piece of rubbish after the other, and now and then more trees than were requested."""

    name = "rubbish"

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> Any:
        self.calls += 1
        if self.calls % 5 == 0:
            return (None, [], iter(()), 7)[self.calls // 5 % 4]
        return super().propose(sequences, shapes)

    def tree(self, sequence: SequenceState, shape: TreeShape) -> Any:
        pieces = rubbish(sequence, shape)
        return pieces[self.calls % len(pieces)]


class Lying(Good):
    """A tree of true tokens and parents whose other columns are wrong: depths, ancestors, whose it is."""

    name = "lying"

    def tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree:
        inner = super().tree(sequence, shape)
        return DraftTree(
            inner.tokens, inner.parents, [depth + 40 for depth in inner.depths], [], "somebody", parts=(inner,)
        )


class Meddling(Good):
    """Writes to whatever it is shown."""

    name = "meddling"

    def tree(self, sequence: SequenceState, shape: TreeShape) -> DraftTree:
        tree = super().tree(sequence, shape)
        sequence.tokens[-1] += 1
        sequence.tokens.append(7)
        return tree

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        path.clear()
        sequence.tokens.clear()
        sequence.limit = 3


class Reading(Quiet):
    """Is shown the target's states, and fails on some of them."""

    name = "reading"
    needs = FeatureRequest(final=True, layers=(0, 1))

    def __init__(self) -> None:
        self.rows = 0

    def observe(self, sequence: SequenceState, features: dict[str, Any]) -> None:
        assert set(features) == {"final", "layer.0", "layer.1"}
        self.rows += len(features["final"])
        if self.rows % 3 == 0:
            raise ValueError("enough")
