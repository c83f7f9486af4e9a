"""How a tree grows: candidates with their chance to be hit, level by level, and which of them are kept.

::

    chance of a candidate   softmax of the draft's logits with the position's own noise, the noise the target draws with
    chance of a node        the product along its path

A *static* tree keeps the best ``widths[d]`` candidates of each level. A *dynamic* one takes the shape's depth and size
alone: every level goes on from its best few candidates, and of all candidates the best are kept in the end. A child is
never likelier than its parent, so the best ones form a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spec.sequence import Sequence
from spec.tree import DraftTree, TreeShape

#: (tokens, log chances) of one depth, best first.
Level = tuple[list[int], list[float]]


def with_noise(
    logits: Tensor, sequence: Sequence, depth: int, token_ids: Tensor | None = None, shared: bool = True
) -> Tensor:
    """fp32[R, V']: logits at the request's temperature, plus the noise of the token drawn below depth ``depth``.

    token_ids: int64[V'], the target's id of each column; None where they are the same (columns past the target's
    vocabulary are cut off). shared: False leaves the noise out, for comparison.
    """
    if token_ids is None:
        logits = logits[:, : sequence.noise.vocab_size]
    if sequence.sampling.greedy:
        return logits
    scaled = logits / sequence.sampling.temperature
    if not shared:
        return scaled
    noise = sequence.noise.row(len(sequence.tokens) + depth)
    return scaled + (noise[: scaled.shape[1]] if token_ids is None else noise[token_ids])


def best_children(noisy: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row: int64[R, k] ids of the target, fp32[R, k] log chances, best first."""
    best = noisy.topk(min(count, noisy.shape[-1]), dim=-1)
    chances = best.values - noisy.logsumexp(dim=-1, keepdim=True)
    return (best.indices if token_ids is None else token_ids[best.indices]), chances


def grow_independent(root: int, levels: Many[Level], shape: TreeShape, dynamic: bool) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree whose candidates at a depth are the same below every node (Medusa heads).

    levels: at most as many as the shape has.
    """
    return _best_first(root, levels, shape.nodes) if dynamic else _by_widths(root, levels, shape.widths)


def _best_first(root: int, levels: Many[Level], nodes: int) -> tuple[list[int], list[int]]:
    """The ``nodes - 1`` likeliest paths: the best node not yet in brings its next sibling and its first child."""
    tokens, parents = [root], [-1]
    heap = list(_entry(levels, 0, 0, 0, 0.0))
    while heap and len(tokens) < nodes:
        cost, parent, depth, rank, above = heapq.heappop(heap)
        tokens.append(levels[depth][0][rank])
        parents.append(parent)
        for entry in (
            *_entry(levels, parent, depth, rank + 1, above),
            *_entry(levels, len(tokens) - 1, depth + 1, 0, cost),
        ):
            heapq.heappush(heap, entry)
    return tokens, parents


def _entry(
    levels: Many[Level], parent: int, depth: int, rank: int, above: float
) -> Iterator[tuple[float, int, int, int, float]]:
    """(cost, parent, depth, rank, parent's cost) of a candidate, if there is such a one."""
    if depth < len(levels) and rank < len(levels[depth][0]):
        yield above - levels[depth][1][rank], parent, depth, rank, above


def _by_widths(root: int, levels: Many[Level], widths: Many[int]) -> tuple[list[int], list[int]]:
    """Level by level the likeliest candidates below the level before."""
    tokens, parents, frontier = [root], [-1], [(0.0, 0)]
    for (candidates, chances), width in zip(levels, widths, strict=False):
        offered = (
            (above - chance, node, token)
            for above, node in frontier
            for token, chance in zip(candidates[:width], chances, strict=False)
        )
        frontier = []
        for cost, parent, token in heapq.nsmallest(width, offered):
            frontier.append((cost, len(tokens)))
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


@dataclass(slots=True, eq=False)
class Growing:
    """A tree whose candidates depend on their path, while it grows.

    Candidates are numbered as they are found, the root is number 0; those that were expanded have a row of their own
    past the committed text: its number is in ``rows``, the ancestors' rows are in ``words``.
    """

    sequence: Sequence
    shape: TreeShape
    dynamic: bool
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    rows: dict[int, int] = field(default_factory=lambda: {0: 0})
    words: dict[int, int] = field(default_factory=lambda: {0: 1})
    frontier: list[int] = field(default_factory=lambda: [0])
    depth: int = 0

    @classmethod
    def below(cls, sequence: Sequence, shape: TreeShape, dynamic: bool) -> Growing:
        """A tree that is only a root. A chain has nothing to choose."""
        return cls(sequence, shape, dynamic and shape.nodes > shape.levels + 1, [sequence.tokens[-1]])

    @property
    def is_chain(self) -> bool:
        """Whether each level has one node."""
        return self.shape.nodes == self.shape.levels + 1

    @property
    def width(self) -> int:
        """How many children are looked at below each node of the frontier."""
        return self._breadth if self.dynamic else self.shape.widths[self.depth]

    @property
    def _breadth(self) -> int:
        """How many nodes a dynamic level goes on from: all expanded ones fit into the rows of the shape."""
        return max(1, (self.shape.nodes - 1) // max(1, self.shape.levels - 1))

    def add_level(self, tokens: Tensor, chances: Tensor) -> list[int]:
        """Add the children found below the frontier, [F, k] each; returns the frontier's rows they go on from."""
        scores = chances + torch.tensor([self.scores[node] for node in self.frontier])[:, None]
        kept = self.shape.nodes - 1 if self.dynamic else self.width
        best = scores.flatten().topk(min(kept, scores.numel()))
        froms = (best.indices // scores.shape[1]).tolist()
        first = len(self.tokens)
        self.tokens += tokens.flatten()[best.indices].tolist()
        self.scores += best.values.tolist()
        self.parents += [self.frontier[index] for index in froms]
        self.depth += 1
        going = min(len(froms), self._breadth if self.dynamic else len(froms))
        self.frontier = list(range(first, first + going))
        if self.depth < self.shape.levels:
            self._give_rows()
        return froms[:going]

    def _give_rows(self) -> None:
        for node in self.frontier:
            row = self.rows[node] = len(self.rows)
            self.words[node] = self.words[self.parents[node]] | 1 << row

    def tree(self, drafter: str) -> DraftTree:
        """The finished tree."""
        if self.is_chain:
            return DraftTree.chain(self.tokens, drafter)
        kept = self._kept()
        number = {node: index for index, node in enumerate(kept)} | {-1: -1}
        parents = [number[self.parents[node]] for node in kept]
        return DraftTree.build([self.tokens[node] for node in kept], parents, drafter)

    def _kept(self) -> list[int]:
        """The likeliest candidates, in the order found; of equal ones the earlier, so that a parent stays in."""
        ranked = sorted(range(1, len(self.tokens)), key=lambda node: (-self.scores[node], node))
        return [0, *sorted(ranked[: self.shape.nodes - 1])]
