"""How a tree grows, for every drafter that has logits: level by level, the candidates of each and which are kept.

::

    chance of a candidate   softmax of the draft's logits with the position's noise, calibrated (drafters.calibration)
    chance of a node        the product along its path

A *static* tree keeps the best ``widths[d]`` candidates of each level. A *dynamic* one takes the shape's depth and size
alone: every level goes on from its best few candidates, and of all candidates the best are kept in the end. A child is
never likelier than its parent, so the best ones form a tree. A *template* says which ranks are kept below which node.

Candidates are numbered as they are found; the root is number 0. Those that are expanded get a row each, in order::

    candidates  0  1  2  3  4  5  6 ..      all that were looked at and might be kept
    rows        0  1     2                  slots past the committed text, where a drafter with KV of its own runs them
    nodes       0  1  2     3               the finished tree
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.calibration import Calibration, Floats, kind_of
from drafters.candidates import adjusted, adjusts, by_path, undrawn
from spec.constrain import Ahead
from spec.draw import BROKEN, Undrawn
from spec.price import Price
from spec.protocols import Rows
from spec.sequence import Sequence
from spec.template import Template
from spec.tree import DraftTree, TreeShape

Tokens = NDArray[np.int64]
#: A dynamic tree looks at no fewer children of a node, if it has as many nodes. Looking costs little.
_LEAST_LOOKED = 8
#: The log chance of a chain's only candidate.
_UNKNOWN = np.array([[np.nan]])


class Ranks(Protocol):
    """What follows rows of logits: :mod:`verifier.ops.nodes`, or a :class:`~verifier.paged_model.PagedModel`."""

    def draw(self, rows: Many[Undrawn], token_ids: Tensor | None = None) -> list[Tensor]:
        """int64[N] of each sequence: what would be drawn; ``BROKEN`` where nothing can be."""
        ...

    def children(self, rows: Many[Undrawn], count: int, token_ids: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """[N, count] of each sequence: the likeliest tokens, and their log chances."""
        ...


@dataclass(slots=True, eq=False)
class Growing:
    """One sequence's tree while it grows, and until it is known what of it was accepted.

    breadth: how many nodes a dynamic level goes on from. scores: log chance of each candidate, along its path. rows,
    words: the row of each expanded candidate, and its ancestors' rows as bits. frontier: what is expanded next. looked:
    for each level what was expanded, and the tokens and uncalibrated log chances found below, [F, k] or [1, k] each.
    kept: the candidates that are nodes of the tree. places: the candidates that stand for a template's nodes.
    """

    sequence: Sequence
    shape: TreeShape
    dynamic: bool
    calibration: Calibration
    breadth: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    rows: dict[int, int] = field(default_factory=lambda: {0: 0})
    words: dict[int, int] = field(default_factory=lambda: {0: 1})
    frontier: list[int] = field(default_factory=lambda: [0])
    looked: list[tuple[list[int], Tokens, Floats]] = field(default_factory=list)
    kept: list[int] = field(default_factory=lambda: [0])
    places: dict[int, int] = field(default_factory=lambda: {0: 0})
    depth: int = 0
    grammar: Ahead | None = None

    @classmethod
    def below(
        cls, sequence: Sequence, shape: TreeShape, dynamic: bool, calibration: Calibration, free: bool = False
    ) -> Growing:
        """A tree that is only a root. A chain has nothing to choose.

        free: expanding a node costs nothing, so all are. Otherwise the expanded ones fit into the rows of the shape.
        """
        most = shape.nodes - 1
        breadth = most if free else max(1, most // max(1, shape.levels - 1))
        dynamic = dynamic and shape.template is None and not shape.is_chain
        grown = cls(sequence, shape, dynamic, calibration, breadth, [sequence.tokens[-1]])
        grown.grammar = None if sequence.constraint is None else Ahead(sequence.constraint)
        return grown

    @property
    def kind(self) -> int:
        """The way of drawing, as the calibration tells them apart."""
        return kind_of(self.sequence.sampling)

    @property
    def done(self) -> bool:
        """Whether no level is to come: all are there, or none is worth it."""
        return self.depth >= self.shape.levels or not self.frontier

    @property
    def width(self) -> int:
        """How many children are looked at below each node of the frontier."""
        if self.shape.template is not None:
            return self.shape.template.reach(self.depth)
        if self.dynamic:
            return min(self.shape.nodes - 1, max(self.breadth, _LEAST_LOOKED))
        return self.shape.widths[self.depth]

    def frontier_rows(self) -> Rows:
        """The rows of a forward pass that expands the frontier."""
        table = self.sequence.table
        tokens = torch.tensor([self.tokens[node] for node in self.frontier])
        if self.shape.is_chain:
            return Rows(table, tokens, table.length + self.depth)
        rows, words = ([of[node] for node in self.frontier] for of in (self.rows, self.words))
        return Rows(table, tokens, table.length, rows, words)

    def asked(self, logits: Tensor, shared_noise: bool = True, token_ids: Tensor | None = None) -> Undrawn:
        """Whose likeliest children the next level is made of.

        logits: fp32[F, V'], a row for each node of the frontier, or one for all. token_ids: see
        :mod:`drafters.candidates`.
        """
        if adjusts(self.sequence, self.depth):
            logits = self._adjusted(logits, token_ids)
        return undrawn(logits, self.sequence, self.depth, token_ids, shared_noise)

    def grow(self, tokens: Tensor, chances: Tensor) -> list[int]:
        """Hang the next level below the frontier; returns which of its rows are gone on from.

        tokens, chances: int64 and fp32 [F, k] or [1, k], as :func:`verifier.ops.children.best_children` finds them.
        """
        tokens, chances = tokens[:, : self.width], chances[:, : self.width]
        if self.shape.is_chain:
            return self.lengthen(int(tokens[0, 0]) if float(chances[0, 0]) > -math.inf else BROKEN)
        return self._add_level(tokens.numpy(), chances.double().numpy())

    def _adjusted(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        nodes = self.frontier
        if not by_path(self.sequence):
            nodes = nodes[: len(logits)]
        banned = [self._banned(node) for node in nodes]
        paths = [self._path(node) for node in nodes]
        return adjusted(logits.expand(len(nodes), -1), self.sequence, self.depth, paths, banned, token_ids)

    def _banned(self, node: int) -> Tensor | None:
        """bool[V]: what the grammar rules out after a node; None if it says nothing."""
        return None if self.grammar is None else self.grammar.banned(node, self.parents[node], self.tokens[node])

    def _path(self, node: int) -> list[int]:
        """The tokens from below the root down to a node."""
        path = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def lengthen(self, token: int) -> list[int]:
        """One more token of a chain, if there is one."""
        if token == BROKEN:
            self.frontier = []
            return []
        self.looked.append((self.frontier, np.array([[token]]), _UNKNOWN))
        self._add([token], [0.0], self.frontier, [0])
        return [0]

    def _add_level(self, tokens: Tokens, chances: Floats) -> list[int]:
        """Add the best of the children found, [F, k] or [1, k] each."""
        self.looked.append((self.frontier, tokens, chances))
        chances = self.calibration.calibrated(self.kind, self.depth, chances)
        scores = chances + np.array([[self.scores[node]] for node in self.frontier])
        best, going = (
            self._best(scores) if self.shape.template is None else self._by_template(self.shape.template, scores)
        )
        found = tokens.take(best if tokens.shape == scores.shape else best % scores.shape[1])
        froms: list[int] = (best // scores.shape[1]).tolist()
        parents, first = [self.frontier[index] for index in froms], len(self.tokens)
        self._add(found.tolist(), scores.take(best).tolist(), parents, going)
        return [froms[node - first] for node in self.frontier]

    def _best(self, scores: Floats) -> tuple[Tokens, Many[int]]:
        """The likeliest of the candidates, [F, k], as flat indices; and which of them are gone on from."""
        count = self.shape.nodes - 1 if self.dynamic else self.width
        best = np.argsort(-scores, axis=None, kind="stable")[:count]
        best = best[scores.take(best) > -np.inf]
        return best, range(min(len(best), self._room) if self.dynamic else len(best))

    @property
    def _room(self) -> int:
        """From how many nodes a dynamic level may go on. One that grows by its chances rather does without the last."""
        return self.breadth if self.shape.price is None else self.shape.nodes - len(self.rows)

    def _by_template(self, template: Template, scores: Floats) -> tuple[Tokens, Many[int]]:
        """The candidates that stand for the template's next level, as far as there are such."""
        width, first = scores.shape[1], len(self.tokens)
        best: list[int] = []
        going: list[int] = []
        for node in template.level(self.depth + 1):
            parent, rank = self.places.get(template.parents[node]), template.ranks[node]
            flat = -1 if parent is None or rank >= width else self.frontier.index(parent) * width + rank
            if flat >= 0 and scores.flat[flat] > -np.inf:
                self.places[node] = first + len(best)
                going += [len(best)] if node in template.inner else []
                best.append(flat)
        return np.array(best, dtype=np.int64), going

    def _add(self, tokens: list[int], scores: list[float], parents: list[int], going: Many[int]) -> None:
        """Number new candidates; of them ``going`` are the next frontier."""
        first = len(self.tokens)
        self.tokens += tokens
        self.scores += scores
        self.parents += parents
        self.depth += 1
        self.frontier = [first + index for index in going]
        if self.depth < self.shape.levels:
            if self.shape.price is not None:
                self._narrow(self.shape.price)
            for node in self.frontier:
                row = self.rows[node] = len(self.rows)
                self.words[node] = self.words[self.parents[node]] | 1 << row

    def _narrow(self, price: Price) -> None:
        """Leave of the frontier the nodes below which drafting is worth its price."""
        usual = self.calibration.usual(self.kind, self.depth, self.width)
        chances = np.exp(self.scores[1:])
        front = chances[[node - 1 for node in self.frontier]]
        self.frontier = [self.frontier[index] for index in price.going_on(chances, np.outer(front, usual))]

    def tree(self, drafter: str) -> DraftTree:
        """The finished tree."""
        if self.shape.is_chain:
            self.kept = list(range(len(self.tokens)))
            counted = (1.0, *self.calibration.chain(self.kind, len(self.tokens) - 1))
            return DraftTree.chain(self.tokens, drafter, counted)
        # The likeliest, in the order found; of equal ones the earlier, so that a parent stays in.
        ranked = sorted(range(1, len(self.tokens)), key=lambda node: (-self.scores[node], node))
        self.kept = [0, *sorted(ranked[: self.shape.nodes - 1])]
        number = {node: index for index, node in enumerate(self.kept)} | {-1: -1}
        parents = [number[self.parents[node]] for node in self.kept]
        chances = tuple(math.exp(self.scores[node]) for node in self.kept)
        return DraftTree.build([self.tokens[node] for node in self.kept], parents, drafter, chances)

    def learn(self, path: list[int]) -> None:
        """What came below each accepted node, of what was looked at there, is shown to the calibration.

        path: nodes of the tree that were committed, their draws already in the sequence's tokens; -1 for tokens that
        were no node, at the end.
        """
        first = len(self.sequence.tokens) - len(path)
        for depth, (node, (expanded, tokens, chances)) in enumerate(zip(path, self.looked, strict=False)):
            if node < 0 or self.kept[node] not in expanded:
                break
            row = expanded.index(self.kept[node]) % len(tokens)
            self.calibration.saw(self.kind, depth, chances[row], tokens[row] == self.sequence.tokens[first + depth])
        self.calibration.step()

    def rows_of(self, path: list[int]) -> list[int]:
        """The rows of a path's nodes, as far as they were expanded; -1 (no node of this tree) ends it."""
        rows = []
        for node in path:
            if node < 0 or self.kept[node] not in self.rows:
                break
            rows.append(self.rows[self.kept[node]])
        return rows


def lengthened(
    growing: Many[Growing],
    logits: Many[Tensor],
    ranks: Ranks,
    shared_noise: bool = True,
    token_ids: Tensor | None = None,
) -> list[list[int]]:
    """One more level of several trees; returns of each which rows of its frontier are gone on from."""
    asked = [g.asked(rows, shared_noise, token_ids) for g, rows in zip(growing, logits, strict=True)]
    if all(g.shape.is_chain for g in growing):  # nobody asks for chances
        drawn = ranks.draw(asked, token_ids)
        return [g.lengthen(int(token[0])) for g, token in zip(growing, drawn, strict=True)]
    found = ranks.children(asked, max(g.width for g in growing), token_ids)
    return [g.grow(*pair) for g, pair in zip(growing, found, strict=True)]
