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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from spec.errors import ConfigurationError
from spec.price import Price
from spec.template import Template

#: One ancestor word holds this many nodes, the root among them.
MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What the host fixes before a tree is drafted: how many nodes each level keeps.

    ``widths[d]`` nodes are kept at depth ``d + 1``. Which parents they hang on is the drafter's choice, unless a
    template says it. price: what levels and rows are worth to a draft that grows by its chances; None for one that does
    not. It takes no part in comparing shapes.
    """

    widths: tuple[int, ...] = ()
    template: Template | None = None
    price: Price | None = field(default=None, compare=False)

    @property
    def likely_levels(self) -> int:
        """Levels that are expected to be drafted."""
        return self.levels if self.price is None else min(self.levels, self.price.levels)

    @property
    def levels(self) -> int:
        """The greatest depth: at most this many drafted tokens can be accepted in a step."""
        return len(self.widths)

    @property
    def nodes(self) -> int:
        """All nodes, the root among them."""
        return 1 + sum(self.widths)

    @property
    def is_chain(self) -> bool:
        """Whether each level has one node, the likeliest."""
        return self.template is None and self.nodes == self.levels + 1

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """A chain of ``length`` drafted tokens; 0 is plain decoding."""
        return cls((1,) * length)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Read ``"3,2,1"``: three nodes at depth 1, two at depth 2, one at depth 3; or the template in ``"FILE.json"``.

        Raises :class:`ConfigurationError` for anything else, or for more than 63 drafted nodes.
        """
        if text.endswith(".json"):
            return cls.of(Template.read(text))
        try:
            widths = tuple(int(part) for part in text.split(","))
        except ValueError:
            widths = (0,)
        if min(widths) < 1:
            raise ConfigurationError(f'draft_tree must be numbers of nodes per level, such as "3,2,1", got "{text}"')
        if sum(widths) >= MAX_NODES:
            raise ConfigurationError(f"draft_tree may hold at most {MAX_NODES - 1} drafted nodes, got {sum(widths)}")
        return cls(widths)

    @classmethod
    def of(cls, template: Template) -> TreeShape:
        """The shape that a template has; one of first choices alone is a chain."""
        chain = len(template.ranks) == template.levels + 1 and not any(template.ranks)
        return cls(template.widths, None if chain else template)

    def limited(self, levels: int) -> TreeShape:
        """The shape cut to at most ``levels`` levels."""
        if levels >= self.levels:
            return self
        if self.template is None or levels <= 0:
            return TreeShape(self.widths[: max(levels, 0)], price=self.price)
        return _cut(self.template, levels)

    def deepened(self, levels: int) -> TreeShape:
        """Room for this shape and for a chain of ``levels``: as many levels and nodes as the larger of them has."""
        if levels <= self.levels:
            return self
        return TreeShape((1 + max(self.nodes - 1 - levels, 0),) + (1,) * (levels - 1))


@lru_cache(maxsize=MAX_NODES)
def _cut(template: Template, levels: int) -> TreeShape:
    return TreeShape.of(template.limited(levels))


ROOT_ONLY = TreeShape()


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """One sequence's proposed tokens. All tensors int64[N] on one device, N at most 64.

    tokens[0] is the root. drafter: who proposed the others, "" if there are none. chances: each node's chance to be
    accepted, as the drafter sees it, the root's 1; empty if it does not say. sources: who proposed each node, where
    several did, the root's "". parts: what each of them proposed.
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

    @property
    def expected(self) -> float:
        """How many drafted tokens the drafter expects to be accepted."""
        return sum(self.chances[1:])

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def within(self, vocab_size: int) -> DraftTree:
        """The tree for a target with so many tokens: a drafter may propose anything, but not all can be looked up.

        What is none of them becomes another one, which is accepted only where it is drawn, as any other.
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


def _author(drafter: str, tokens: Sequence[int]) -> str:
    """Who proposed a tree: nobody, if it is a root alone."""
    return drafter if len(tokens) > 1 else ""


@lru_cache(maxsize=MAX_NODES)
def _chain_columns(nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and ancestor words of a chain; never written to, so shared."""
    depths = torch.arange(nodes)
    ancestors = torch.tensor([-1 if n == 63 else (2 << n) - 1 for n in range(nodes)])
    return depths - 1, depths, ancestors
