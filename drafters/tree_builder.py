"""One sequence's tree on the host: while it grows, and until its accepted path is known.

The request's changes apply to its logits as they will to the target's: penalties, bias, bans, a grammar. So forbidden
tokens are not drafted. A drafter with its own vocabulary gives the target's token of each of its columns
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

from foresay.drafters.calibration import ALWAYS, NEVER, Calibration, Floats
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
    """Whether the request changes them differently from node to node."""
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

    paths: of each node, the tokens below the root. allowed: int32[ceil(V / 32)] each, the tokens a grammar allows after
    it.
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


#: The log probability of a chain's only candidate.
_UNKNOWN = np.array([np.nan])
_NONE = -math.inf


@dataclass(slots=True, eq=False)
class TreeBuilder:
    """fixed: the layouts of the levels that are grown, of which the tree may use fewer. over: whether no level follows,
    or none is worth it.

    tokens, parents, scores: of the candidates (:mod:`foresay.drafters.growth`), the root first. front: those that are
    expanded next. rows: the row of each expanded one. looked: for each level of a tree the expanded ones, and the
    tokens and uncalibrated log probabilities below them, [F, k] or [1, k] each. kept: the candidates that are nodes of
    the tree. depth: how many levels it has.
    """

    sequence: SequenceState
    shape: TreeShape
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
    depth: int = 0
    over: bool = False

    @property
    def kind(self) -> int:
        """The way of sampling, as the calibration distinguishes it."""
        return self.sequence.sampling.kind

    def add(self, tokens: list[int], level: Level, index: int) -> None:
        """Add the next level, on the host. index: the sequence's index in it; tokens: the sequence's tokens there."""
        if self.over:
            return
        if level.parents is None or level.scores is None:
            self.lengthen(tokens[0])
            return
        assert level.children is not None and level.chances is not None, "a tree's level has them"
        # Copies, since the next tree grows in the same memory.
        found = level.children[index].numpy().copy(), level.chances[index].numpy().astype(np.float64)
        self.looked.append((self.front, *found))
        self._extend(tokens, level.parents[index].tolist(), level.scores[index].tolist())
        assert level.front is not None, "and scores of those that are expanded next"
        if all(score == _NONE for score in level.front[index].tolist()):
            self.over = True

    def lengthen(self, token: int) -> None:
        """Add a chain's next token, unless the chain has ended."""
        if token == BROKEN:
            self.over = True
        elif not self.over:
            self._extend([token], self.front, [0.0])

    def _extend(self, tokens: list[int], parents: list[int], scores: list[float]) -> None:
        first, expanded = len(self.tokens), self.fixed[self.depth].expanded
        for node in self.front:  # they were expanded, since there is a level below them
            self.rows.setdefault(node, len(self.rows))
        self.depth += 1
        self.tokens += tokens
        self.parents += parents
        self.scores += scores
        self.front = list(range(first, first + expanded))
        self.over = self.depth >= self.shape.levels

    def adjusted(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        """The logits below the front with the request's changes, fp32[F, V'], or [1, V'] for all; on the host."""
        nodes = self.front
        if not by_path(self.sequence):
            nodes = nodes[: len(logits)]
        allowed = [self._allowed(node) for node in nodes]
        paths = [self._path(node) for node in nodes]
        return adjusted(logits, self.sequence, self.depth, paths, allowed, token_ids)

    def _allowed(self, node: int) -> Tensor | None:
        """int32[ceil(V / 32)]: the tokens the grammar allows after a node; None if unknown."""
        if self.grammar is None or self.scores[node] == _NONE:  # not a node
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
        # The likeliest, in the order found; of equal ones the earlier, so that parents are kept.
        scores, most = np.array(self.scores[1:]), self.shape.nodes - 1
        if self.shape.price is not None:
            most = min(most, self.shape.price.keeps(np.exp(scores).tolist()))
        ranked = np.argsort(-scores, kind="stable")[:most]
        self.kept = [0, *sorted((1 + ranked[scores[ranked] > _NONE]).tolist())]
        return self.built(drafter)

    def built(self, drafter: str) -> DraftTree:
        """The tree of the candidates that are kept."""
        number = {node: index for index, node in enumerate(self.kept)} | {-1: -1}
        parents = [number[self.parents[node]] for node in self.kept]
        chances = tuple(math.exp(self.scores[node]) for node in self.kept)
        tree = DraftTree.build([self.tokens[node] for node in self.kept], parents, drafter, chances)
        return replace(tree, grown=self.depth)

    def learn(self, path: list[int]) -> None:
        """Show the calibration which of the candidates below each accepted node was emitted.

        path: nodes of the tree that were committed, their samples already in the sequence's tokens; -1 for tokens that
        were no node, at the end.
        """
        if self.shape.is_chain:
            learn_chain(self.calibration, self.sequence, self.tokens[1:], path)
            return
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


def bars_of(shape: TreeShape, levels: int, calibration: Calibration, kind: int) -> list[Bar]:
    """The thresholds that the nodes of a tree must reach for each further one of so many levels."""
    known = range(1, min(shape.levels, levels))
    price, after = shape.price, [NEVER] * (levels - 1 - len(known))
    return [ALWAYS if price is None else price.bar(calibration.first(kind, depth)) for depth in known] + after


def learn_chain(calibration: Calibration, sequence: SequenceState, drafted: Sequence[int], path: list[int]) -> None:
    """The same for a chain of these tokens below the root."""
    emitted, kind = sequence.tokens[len(sequence.tokens) - len(path) :], sequence.sampling.kind
    for depth, (node, token, draft) in enumerate(zip(path, emitted, drafted, strict=False)):
        if node < 0:
            break
        calibration.saw(kind, depth, _UNKNOWN, np.array([draft == token]))
    calibration.step()
