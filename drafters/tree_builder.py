"""One sequence's tree as the host sees it: while it grows, and until it is known what of it was accepted.

Its logits are as the request wants them: penalties, bias, bans, a grammar, as the target's will be. What may not be
said is not drafted. A drafter that has a vocabulary of its own says which token of the target each of its columns is
(``token_ids``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.drafters.calibration import Calibration, Floats, kind_of
from foresay.drafters.growth import Level, LevelLayout
from foresay.spec.constrain import Ahead
from foresay.spec.logits import edits_at, edits_logits
from foresay.spec.price import Bar
from foresay.spec.sample import BROKEN
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.ops.sample import edit_logits


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


#: The log chance of a chain's only candidate.
_UNKNOWN = np.array([[np.nan]])
_NONE = -math.inf


@dataclass(slots=True, eq=False)
class TreeBuilder:
    """fixed: of the levels that are grown, of which the tree may take fewer. over: whether no level is to come, or none
    is worth it.

    tokens, parents, scores: of the candidates (:mod:`foresay.drafters.growth`), the root first. front: those that are
    expanded next. rows: the row of each that was. looked: for each level what was expanded, and the tokens and
    uncalibrated log chances found below, [F, k] or [1, k] each. kept: the candidates that are nodes of the tree.
    """

    sequence: SequenceState
    shape: TreeShape
    dynamic: bool
    calibration: Calibration
    grammar: Ahead | None
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    front: list[int] = field(default_factory=lambda: [0])
    rows: dict[int, int] = field(default_factory=lambda: {0: 0})
    looked: list[tuple[list[int], NDArray[np.int64], Floats]] = field(default_factory=list)
    kept: list[int] = field(default_factory=lambda: [0])
    fixed: tuple[LevelLayout, ...] = ()
    over: bool = False

    @property
    def kind(self) -> int:
        """The way of drawing, as the calibration tells them apart."""
        return kind_of(self.sequence.sampling)

    @property
    def depth(self) -> int:
        """How many levels there are."""
        return len(self.looked)

    @property
    def bars(self) -> list[Bar]:
        """What its nodes must reach for each further level."""
        assert self.shape.price is not None, "only a tree that pays for its levels has bars"
        price, depths = self.shape.price, range(1, self.shape.levels)
        return [price.bar(self.calibration.first(self.kind, depth)) for depth in depths]

    def add(self, tokens: list[int], level: Level, place: int) -> None:
        """The next level, on the host; the sequence's is in this place, where it has these tokens."""
        if self.over:
            return
        if level.parents is None or level.scores is None:
            self.lengthen(tokens[0])
            return
        assert level.children is not None and level.chances is not None, "a tree's level has them"
        # Copies: the next tree grows in the same place.
        found = level.children[place].numpy().copy(), level.chances[place].numpy().astype(np.float64)
        self._extend(tokens, level.parents[place].tolist(), level.scores[place].tolist(), *found)
        assert level.front is not None, "and scores of those that are expanded next"
        if all(score == _NONE for score in level.front[place].tolist()):
            self.over = True

    def lengthen(self, token: int) -> None:
        """A chain's next token, unless it is over."""
        if token == BROKEN:
            self.over = True
        elif not self.over:
            self._extend([token], self.front, [0.0], np.array([[token]]), _UNKNOWN)

    def _extend(
        self, tokens: list[int], parents: list[int], scores: list[float], children: NDArray[np.int64], chances: Floats
    ) -> None:
        first, going = len(self.tokens), self.fixed[self.depth].going
        for node in self.front:  # they were expanded, or there would be no level below them
            self.rows[node] = len(self.rows) if self.dynamic and node else node
        self.looked.append((self.front, children, chances))
        self.tokens += tokens
        self.parents += parents
        self.scores += scores
        self.front = [first + place for place in going]
        self.over = self.depth >= self.shape.levels

    def adjusted(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """What the request makes of the logits below the front, fp32[F, V'], or [1, V'] below all; on the host."""
        nodes = self.front
        if not by_path(self.sequence):
            nodes = nodes[: len(logits)]
        allowed = [self._allowed(node) for node in nodes]
        paths = [self._path(node) for node in nodes]
        return adjusted(logits, self.sequence, self.depth, paths, allowed, token_ids)

    def _allowed(self, node: int) -> Tensor | None:
        """int32[ceil(V / 32)]: what the grammar lets follow a node; None if it says nothing."""
        if self.grammar is None or self.scores[node] == _NONE:  # what is no node follows nothing
            return None
        return self.grammar.allowed(node, self.parents[node], self.tokens[node])

    def _path(self, node: int) -> list[int]:
        """The tokens from below the root down to a node."""
        path = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def tree(self, drafter: str) -> DraftTree:
        """The finished tree."""
        if self.shape.is_chain:
            self.kept = list(range(len(self.tokens)))
            counted = (1.0, *self.calibration.chain(self.kind, len(self.tokens) - 1))
            return DraftTree.chain(self.tokens, drafter, counted)
        # The likeliest, in the order found; of equal ones the earlier, so that a parent stays in.
        scores, most = np.array(self.scores[1:]), self.shape.nodes - 1
        if self.shape.price is not None:
            most = min(most, self.shape.price.keeps(np.exp(scores).tolist()))
        ranked = np.argsort(-scores, kind="stable")[:most]
        self.kept = [0, *sorted((1 + ranked[scores[ranked] > _NONE]).tolist())]
        number = {node: index for index, node in enumerate(self.kept)} | {-1: -1}
        parents = [number[self.parents[node]] for node in self.kept]
        chances = tuple(math.exp(self.scores[node]) for node in self.kept)
        tree = DraftTree.build([self.tokens[node] for node in self.kept], parents, drafter, chances)
        return replace(tree, grown=self.depth)

    def learn(self, path: list[int]) -> None:
        """What came below each accepted node, of what was looked at there, is shown to the calibration.

        path: nodes of the tree that were committed, their samples already in the sequence's tokens; -1 for tokens that
        were no node, at the end.
        """
        first, chain = len(self.sequence.tokens) - len(path), True
        for depth, (node, (expanded, tokens, chances)) in enumerate(zip(path, self.looked, strict=False)):
            if node < 0 or self.kept[node] not in expanded:
                break
            row = expanded.index(self.kept[node]) % len(tokens)
            hit = tokens[row] == self.sequence.tokens[first + depth]
            self.calibration.saw(self.kind, depth, chances[row], hit, chain)
            chain = chain and bool(hit[0])
        self.calibration.step()

    def rows_of(self, path: list[int]) -> list[int]:
        """The rows of a path's nodes, as far as they were expanded; -1 (no node of this tree) ends it."""
        rows = []
        for node in path:
            if node < 0 or self.kept[node] not in self.rows:
                break
            rows.append(self.rows[self.kept[node]])
        return rows
