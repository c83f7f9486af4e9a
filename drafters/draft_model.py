"""A smaller model of the same vocabulary proposes, level by level, a chain or a tree.

It adds the *same* position-keyed noise to its logits as the target's draw will (at the request's temperature), so the
likeliest child of a node is the draft's own shared-noise draw, and the next ones are the runners-up of that draw:
the coupling of :mod:`spec.accept`. A node is scored by its chance to be drawn given the noise, the softmax of the noisy
logits along its path; each level keeps the best of all candidates, so the tree grows where it is likeliest to be hit.

Its KV lives in a store of its own, on the sequences' pages: committed text is caught up in one pass, tree nodes are
scratch rows past the committed length, and an accepted path is kept by the same moves as the target's.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.growth import with_noise
from spec.constrain import Ahead
from spec.protocols import FeatureRequest, Rows
from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape
from verifier.paged_model import PagedModel

#: Committed text is caught up in pieces of at most this many rows, to bound the pass's memory.
_CATCH_UP_ROWS = 256


@dataclass(slots=True)
class _Growing:
    """A tree while it grows. scores: log chance of each node to be hit, along its path."""

    sequence: Sequence
    shape: TreeShape
    tokens: list[int]
    base: int
    parents: list[int] = field(default_factory=lambda: [-1])
    words: list[int] = field(default_factory=lambda: [1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    frontier: range = range(1)
    grammar: Ahead | None = None

    @classmethod
    def start(cls, sequence: Sequence, shape: TreeShape) -> _Growing:
        """The root alone."""
        grammar = None if sequence.constraint is None else Ahead(sequence.constraint)
        return cls(sequence, shape, [sequence.tokens[-1]], sequence.table.length, grammar=grammar)

    def rows(self) -> Rows:
        """The frontier's rows: all nodes of the deepest level so far."""
        tokens = torch.tensor([self.tokens[node] for node in self.frontier])
        table = self.sequence.table
        if self._is_chain():
            return Rows(table, tokens, self.base + self.frontier[0])
        return Rows(table, tokens, self.base, self.frontier, [self.words[node] for node in self.frontier])

    def _is_chain(self) -> bool:
        return self.shape.nodes == self.shape.levels + 1

    def adjusted(self, logits: Tensor) -> Tensor:
        """The frontier's logits, changed as the target's will be: else drafts of what is not wanted are wasted."""
        adjustment, grammar = self.sequence.adjustment, self.grammar
        if adjustment is None and grammar is None:
            return logits
        logits = logits.clone()
        if adjustment is not None:
            adjustment.apply(logits, self.sequence.tokens, [self.path(node) for node in self.frontier])
        if grammar is not None:
            for row, node in enumerate(self.frontier):
                if node:
                    grammar.down(node, self.parents[node], self.tokens[node])
                banned = grammar.banned(node, self.tokens[node])
                if banned is not None:
                    logits[row].masked_fill_(banned[: logits.shape[-1]], -torch.inf)
        return logits

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to a node."""
        word = self.words[node]
        return [self.tokens[other] for other in range(1, word.bit_length()) if word >> other & 1]

    def add_level(self, children: list[tuple[int, int, float]]) -> None:
        """Hang (parent, token, score) below the frontier; they are the next frontier."""
        first = len(self.tokens)
        for parent, token, score in children:
            self.words.append(self.words[parent] | 1 << len(self.tokens))
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(score)
        self.frontier = range(first, len(self.tokens))

    def tree(self, drafter: str) -> DraftTree:
        """The finished tree."""
        if self._is_chain():
            return DraftTree.chain(self.tokens, drafter)
        return DraftTree.build(self.tokens, self.parents, drafter)


class DraftModelDrafter:
    """Implements :class:`spec.protocols.Drafter` with a :class:`~verifier.paged_model.PagedModel`.

    shared_noise: whether drafts are sampled with the target's own noise; False is for comparison.
    """

    shared_noise: bool = True
    needs: FeatureRequest | None = None

    def __init__(self, model: PagedModel, vocab_size: int, name: str = "draft_model") -> None:
        self.name = name
        self._model = model
        self._vocab = min(vocab_size, model.vocab_size)
        self._forwarded: dict[str, int] = {}

    def propose(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[DraftTree]:
        """One tree per sequence, all sequences' frontiers in one pass per level."""
        growing = [_Growing.start(sequence, shape) for sequence, shape in zip(sequences, shapes, strict=True)]
        for level in range(max(shape.levels for shape in shapes)):
            active = [g for g in growing if g.shape.levels > level]
            rows = [self._catch_up(g.sequence) if level == 0 else g.rows() for g in active]
            forward = self._model.run(rows)
            for index, g in enumerate(active):
                self._forwarded[g.sequence.id] = len(g.tokens)
                g.add_level(self._children(g, level, forward.of(index)[:, : self._vocab]))
        return [g.tree(self.name) for g in growing]

    def _catch_up(self, sequence: Sequence) -> Rows:
        """The rows from the first committed token without KV to the root; long stretches run beforehand."""
        while len(sequence.tokens) - self._filled(sequence) > _CATCH_UP_ROWS:
            self.extend(sequence)
        filled = self._filled(sequence)
        return Rows(sequence.table, self._known(sequence.tokens[filled:]), filled, wanted="last")

    def _known(self, tokens: list[int]) -> Tensor:
        """int64[R]: the tokens, those past this model's vocabulary (the target's padding) as its last one."""
        return torch.tensor(tokens).clamp_(max=self._model.vocab_size - 1)

    def _filled(self, sequence: Sequence) -> int:
        return sequence.table.length - self._model.missing(sequence.table)

    def _children(self, g: _Growing, level: int, logits: Tensor) -> list[tuple[int, int, float]]:
        """The level's nodes: (parent, token, score), the best ``widths[level]`` over the whole frontier."""
        width = g.shape.widths[level]
        noisy = with_noise(g.adjusted(logits), g.sequence, level, shared=self.shared_noise)
        if width == 1 and len(g.frontier) == 1:
            return [(g.frontier[0], int(noisy.argmax()), 0.0)]
        best = noisy.topk(min(width, self._vocab), dim=-1)
        scores = best.values - noisy.logsumexp(dim=-1, keepdim=True)
        scores += torch.tensor([g.scores[node] for node in g.frontier])[:, None]
        chosen = scores.flatten().topk(min(width, scores.numel()))
        tokens = best.indices.flatten()[chosen.indices].tolist()
        parents = (chosen.indices // best.indices.shape[-1] + g.frontier[0]).tolist()
        return list(zip(parents, tokens, chosen.values.tolist(), strict=True))

    def extend(self, sequence: Sequence) -> None:
        """Compute KV for committed tokens that have none, at most ``_CATCH_UP_ROWS`` of them."""
        table, filled = sequence.table, self._filled(sequence)
        stop = min(table.length, filled + _CATCH_UP_ROWS)
        if stop > filled:
            self._model.run([Rows(table, self._known(sequence.tokens[filled:stop]), filled, wanted="none")])
            self._model.store.mark(table, stop)

    def committed(self, sequence: Sequence, path: list[int], moves: tuple[Tensor, Tensor] | None) -> None:
        """Keep the rows of the accepted nodes that were run; the deepest level never was."""
        forwarded = self._forwarded.pop(sequence.id, 0)
        if not forwarded:
            return
        if moves is not None:
            self._model.store.move(*moves)
        kept = sum(1 for node in path if 0 <= node < forwarded)
        self._model.store.mark(sequence.table, sequence.table.length - len(path) + kept)

    def finished(self, sequence: Sequence) -> None:
        """Nothing outlives the sequence: its rows are in its pages."""
        self._forwarded.pop(sequence.id, None)
