"""Draft trees: parents, depths and one 64-bit ancestor word per node.

Node 0 is the root: the last committed token, whose KV is not stored yet. The others are drafted tokens, numbered so
that a parent comes before its children. Bit *i* of a node's ancestor word says that node *i* is on its path (the node
itself included)::

    tokens   7 ─┬─ 3 ─── 5        parents    -1  0  0  1
                └─ 9              depths      0  1  1  2
    node     0     1  2  3        ancestors   0b1  0b11  0b101  0b1011

A chain is a tree of width one, and plain decoding is the tree that is only a root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from foresay.spec.shape import MAX_NODES as MAX_NODES
from foresay.spec.shape import ROOT_ONLY as ROOT_ONLY
from foresay.spec.shape import TreeShape as TreeShape


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """One sequence's proposed tokens. All tensors int64[N] on one device, N at most 64.

    tokens[0] is the root. drafter: who proposed the others, "" if there are none. chances: each node's chance to be
    accepted, as the drafter sees it, the root's 1; empty if it does not say. sources: who proposed each node, where
    several did, the root's "". parts: what each of them proposed. grown: levels that were drafted, if not all of them
    were worth their rows.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    drafter: str = ""
    is_chain: bool = field(default=False)
    chances: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()
    parts: tuple[DraftTree, ...] = ()
    grown: int = 0

    @property
    def expected(self) -> float:
        """How many drafted tokens the drafter expects to be accepted."""
        return sum(self.chances[1:])

    @property
    def levels(self) -> int:
        """How many levels were drafted for it."""
        return self.grown or (len(self) - 1 if self.is_chain else max(self.depths.tolist()))

    @property
    def shape(self) -> TreeShape:
        """The shape that it has."""
        if self.is_chain:
            return TreeShape.chain(len(self) - 1)
        counts = Counter(self.depths.tolist())
        return TreeShape(tuple(counts[depth] for depth in range(1, max(counts) + 1)))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def within(self, vocab_size: int) -> DraftTree:
        """The tree for a target with so many tokens: a drafter may propose anything, but not all can be looked up.

        What is none of them becomes another one, which is accepted only where it is sampled, as any other.
        """
        tokens = self.tokens.tolist()
        if min(tokens) >= 0 and max(tokens) < vocab_size:
            return self
        return replace(self, tokens=self.tokens.clamp(0, vocab_size - 1))

    def accepted(self, coming: Sequence[int]) -> int:
        """How many drafted nodes are accepted if these tokens come: so many of them are a path from the root."""
        tokens = self.tokens.tolist()
        parents = range(-1, len(tokens) - 1) if self.is_chain else self.parents.tolist()
        below = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
        node = 0
        for depth, token in enumerate(coming):
            if (node, token) not in below:
                return depth
            node = below[node, token]
        return len(coming)

    @classmethod
    def build(
        cls, tokens: Sequence[int], parents: Sequence[int], drafter: str = "", chances: tuple[float, ...] = ()
    ) -> DraftTree:
        """A tree from host lists; ``parents[0]`` is -1 and every other parent comes before its child."""
        assert len(tokens) == len(parents) <= MAX_NODES, "a tree holds at most 64 nodes"
        depths, words = [0], [1]
        for node, parent in enumerate(parents[1:], start=1):
            assert 0 <= parent < node, "a parent comes before its children"
            depths.append(depths[parent] + 1)
            words.append(words[parent] | 1 << node)
        chain = all(parent == node - 1 for node, parent in enumerate(parents))
        signed = [w - (1 << 64) if w >> 63 else w for w in words]
        columns = [torch.tensor(list(column)) for column in (tokens, parents, depths, signed)]
        return cls(columns[0], columns[1], columns[2], columns[3], _author(drafter, tokens), chain, chances)

    @classmethod
    def chain(cls, tokens: Sequence[int], drafter: str = "", chances: tuple[float, ...] = ()) -> DraftTree:
        """A chain: the root, then each token the child of the one before."""
        parents, depths, ancestors = _chain_columns(len(tokens))
        author = _author(drafter, tokens)
        return cls(torch.tensor(list(tokens)), parents, depths, ancestors, author, is_chain=True, chances=chances)

    def beginning(self, nodes: int, chances: tuple[float, ...], sources: tuple[str, ...] = ()) -> DraftTree:
        """The first nodes of a chain, with these chances."""
        parents, depths, ancestors = _chain_columns(nodes)
        author = self.drafter if nodes > 1 else ""
        return DraftTree(self.tokens[:nodes], parents, depths, ancestors, author, True, chances, sources)


def _author(drafter: str, tokens: Sequence[int]) -> str:
    """Who proposed a tree: nobody, if it is a root alone."""
    return drafter if len(tokens) > 1 else ""


@lru_cache(maxsize=MAX_NODES)
def _chain_columns(nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and ancestor words of a chain; never written to, so shared."""
    depths = torch.arange(nodes)
    ancestors = torch.tensor([-1 if n == 63 else (2 << n) - 1 for n in range(nodes)])
    return depths - 1, depths, ancestors
