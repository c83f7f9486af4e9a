"""One sequence's tree on the host: while it grows, and until its accepted path is known.

The request's changes apply to its logits as they will to the target's: penalties, bias, bans, a grammar. So forbidden
tokens are not drafted. A drafter with its own vocabulary gives the target's token of each of its columns
(``token_ids``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foresay.drafters.calibration import Calibration, Floats
from foresay.drafters.growth import Level, LevelLayout
from foresay.spec.constrain import Ahead
from foresay.spec.logits import edits_at, edits_logits
from foresay.spec.sample import BROKEN
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from foresay.verifier.ops.sample import edit_logits
from foresay.verifier.ops.trees import ChosenTree


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
#: The bits of an ancestor word, and what the host reads of chosen trees.
_WORD, _CHOSEN = (1 << 64) - 1, len(ChosenTree._fields)


@dataclass(slots=True, eq=False)
class TreeBuilder:
    """fixed: the layouts of the levels that are grown, of which the tree may use fewer. over: whether no level follows,
    or none is worth it. depth: how many levels it has.

    tokens: a chain's, from the root on; of a tree whose logits the request changes, those of the candidates
    (:mod:`foresay.drafters.growth`), with parents and scores. front: those of them that are expanded next. rows: the
    row of each node, -1 for none. numbers: the candidate that each node of a tree was. looked: for each level of a tree
    the tokens and uncalibrated log probabilities below what was expanded, [F, k] or [1, k] each. made: the tree.
    """

    sequence: SequenceState
    shape: TreeShape
    calibration: Calibration
    grammar: Ahead | None
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    front: list[int] = field(default_factory=lambda: [0])
    rows: Sequence[int] = ()
    numbers: Sequence[int] = ()
    looked: list[tuple[NDArray[np.int64], Floats]] = field(default_factory=list)
    fixed: tuple[LevelLayout, ...] = ()
    depth: int = 0
    over: bool = False
    made: DraftTree | None = None

    @property
    def kind(self) -> int:
        """The way of sampling, as the calibration distinguishes it."""
        return self.sequence.sampling.kind

    def add(self, level: Level, index: int) -> None:
        """Look at the next level, on the host, before another one grows. index: the sequence's index in it."""
        if self.over:
            return
        if level.parents is None or level.scores is None or level.front is None:
            self.lengthen(int(level.tokens[index, 0]))
            return
        if adjusts(self.sequence, 0):
            first = len(self.tokens)
            self.tokens += level.tokens[index].tolist()
            self.parents += level.parents[index].tolist()
            self.scores += level.scores[index].tolist()
            self.front = list(range(first, first + level.front.shape[1]))
        self.depth += 1
        self.over = self.depth >= self.shape.levels or _ends(level.front, index)

    def lengthen(self, token: int) -> None:
        """Add a chain's next token, unless the chain has ended."""
        if token == BROKEN:
            self.over = True
        elif not self.over:
            self.tokens.append(token)
            self.parents.append(self.depth)
            self.scores.append(0.0)
            self.depth += 1
            self.front, self.over = [self.depth], self.depth >= self.shape.levels

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

    def finish(self, parts: Sequence[NDArray[Any]], index: int, drafter: str) -> DraftTree:
        """The grown tree. parts: what the host reads of it, as :meth:`foresay.drafters.growth.Growth.tree` has it, of
        the levels that were grown; index: the sequence's own."""
        looked, chosen = parts[:-_CHOSEN], ChosenTree(*parts[-_CHOSEN:])  # type: ignore[arg-type]
        for children, chances, front in zip(*(looked[part::3] for part in range(3)), strict=True):
            # Copies, since the next tree grows in the same memory.
            self.looked.append((children[index].copy(), chances[index].astype(np.float64)))
            if _ends(front, index):
                break
        self.depth, count = len(self.looked), int(chosen.counts[index])
        tokens, parents, words, depths, self.rows, self.numbers, scores = (
            each[index, :count].tolist() for each in chosen if each is not chosen.counts
        )
        self.made = DraftTree(
            tokens, parents, depths, [word & _WORD for word in words], drafter if count > 1 else "",
            tuple(map(math.exp, scores)), grown=self.depth,
        )  # fmt: skip
        return self.made

    def tree(self, drafter: str) -> DraftTree:
        """The finished tree."""
        if self.made is not None:
            return self.made
        counted = (1.0, *self.calibration.chain(self.kind, len(self.tokens) - 1))
        return DraftTree.chain(self.tokens, drafter, counted)

    def learn(self, path: list[int]) -> None:
        """Show the calibration which of the candidates below each accepted node was emitted.

        path: nodes of the tree that were committed, their samples already in the sequence's tokens; -1 for tokens that
        were no node, at the end.
        """
        if self.made is None:
            learn_chain(self.calibration, self.sequence, self.tokens[1:], path)
            return
        first, begin, above, chain = len(self.sequence.tokens) - len(path), 0, 1, True
        for depth, (node, (tokens, chances), level) in enumerate(zip(path, self.looked, self.fixed, strict=False)):
            expanded = self.numbers[node] - begin
            if node < 0 or not 0 <= expanded < level.front:
                break
            row = expanded % len(tokens)
            hit = tokens[row] == self.sequence.tokens[first + depth]
            self.calibration.saw(self.kind, depth, chances[row], hit, chain)
            chain = chain and bool(hit[0])
            begin, above = begin + above, level.kept
        self.calibration.step()

    def rows_of(self, path: list[int]) -> list[int]:
        """The rows of a path's nodes, as far as they were expanded; -1 (no node of this tree) ends it."""
        own = range(self.depth) if self.made is None else self.rows
        rows = [own[node] if 0 <= node < len(own) else -1 for node in path]
        return rows[: rows.index(-1)] if -1 in rows else rows


def _ends(front: Tensor | NDArray[Any], index: int) -> bool:
    """Whether no node of a level is expanded next: the best would be the first."""
    return not front.shape[1] or bool(front[index, 0] == _NONE)


def learn_chain(calibration: Calibration, sequence: SequenceState, drafted: Sequence[int], path: list[int]) -> None:
    """The same for a chain of these tokens below the root."""
    emitted, kind = sequence.tokens[len(sequence.tokens) - len(path) :], sequence.sampling.kind
    for depth, (node, token, draft) in enumerate(zip(path, emitted, drafted, strict=False)):
        if node < 0:
            break
        calibration.saw(kind, depth, _UNKNOWN, np.array([draft == token]))
    calibration.step()
