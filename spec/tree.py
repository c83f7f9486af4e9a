"""Draft trees: parents, depths and one 64-bit ancestor word per node.

Node 0 is the root: the last committed token, whose KV is not stored yet. The others are drafted tokens, numbered so
that a parent comes before its children. Bit *i* of a node's ancestor word says that node *i* is on its path (the node
itself included)::

    tokens   7 ─┬─ 3 ─── 5        parents    -1  0  0  1
                └─ 9              depths      0  1  1  2
    node     0     1  2  3        ancestors   0b1  0b11  0b101  0b1011

A chain is a tree of width one; plain decoding is a tree with only the root.

Several trees with the same root are merged into one, which keeps the likeliest nodes::

    suffix    7 ── 3 ── 5          merged    7 ─┬─ 3 ─┬─ 5        3 was proposed twice and belongs to the first
    model     7 ── 3 ── 8                       │     └─ 8
    ngram     7 ── 9                            └─ 9              siblings are distinct
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foresay.spec.names import together
from foresay.spec.shape import MAX_NODES as MAX_NODES
from foresay.spec.shape import ROOT_ONLY as ROOT_ONLY
from foresay.spec.shape import TreeShape as TreeShape

#: The ancestor words of a chain.
_CHAIN = [(2 << node) - 1 for node in range(MAX_NODES)]


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """One sequence's proposed tokens on the host: lists with an entry for each node, at most 64.

    tokens[0] is the root. drafter: which proposed the others, "" if there are none. chances: each node's chance to be
    accepted, as the drafter estimates it, 1 for the root; empty if it does not. sources: which drafter proposed each
    node, where several did, "" for the root. parts: what each of them proposed. grown: the number of levels drafted, if
    not all were worth their rows. passes: those that drafted a chain of which a part was looked up and checked; 0 for
    others. forced: how many nodes a grammar added for free.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    ancestors: list[int]
    drafter: str = ""
    chances: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()
    parts: tuple[DraftTree, ...] = ()
    grown: int = 0
    passes: int = 0
    forced: int = 0

    @property
    def is_chain(self) -> bool:
        """Whether each node is the child of the one before: the depth of the last is then the number of nodes before
        it."""
        return self.depths[-1] == len(self.tokens) - 1

    @property
    def levels(self) -> int:
        """How many levels were drafted for it."""
        return self.grown or self.passes or max(self.depths)

    @property
    def shape(self) -> TreeShape:
        """Its shape."""
        if self.is_chain:
            return TreeShape.chain(len(self) - 1)
        counts = Counter(self.depths)
        return TreeShape(tuple(counts[depth] for depth in range(1, max(counts) + 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    def within(self, vocab_size: int) -> DraftTree:
        """The tree for a target with this vocabulary size: a drafter may propose ids that the target has no embedding
        for.

        Such ids are clamped to valid ones, which are accepted only where they are sampled, as any other.
        """
        if min(self.tokens) >= 0 and max(self.tokens) < vocab_size:
            return self
        return replace(self, tokens=[min(max(token, 0), vocab_size - 1) for token in self.tokens])

    def path_of(self, emitted: Sequence[int]) -> list[int]:
        """The nodes at which these tokens were sampled, one for each, from the root on; -1 from the first that was
        sampled at no node of this tree."""
        below = {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True)) if node}
        path = [0][: len(emitted)]
        for token in emitted[:-1]:
            path.append(below.get((path[-1], token), -1))
        return path

    def accepted(self, coming: Sequence[int]) -> int:
        """How many drafted nodes are accepted if these tokens follow: the length of their path from the root."""
        return sum(node > 0 for node in self.path_of([*coming, 0]))

    @classmethod
    def build(
        cls, tokens: Sequence[int], parents: Sequence[int], drafter: str = "", chances: tuple[float, ...] = ()
    ) -> DraftTree:
        """A tree: ``parents[0]`` is -1 and every other parent comes before its child."""
        assert len(tokens) == len(parents) <= MAX_NODES, "a tree holds at most 64 nodes"
        depths, words = [0], [1]
        for node, parent in enumerate(parents[1:], start=1):
            assert 0 <= parent < node, "a parent comes before its children"
            depths.append(depths[parent] + 1)
            words.append(words[parent] | 1 << node)
        return cls(list(tokens), list(parents), depths, words, _author(drafter, tokens), chances)

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        drafter: str = "",
        chances: tuple[float, ...] = (),
        sources: tuple[str, ...] = (),
    ) -> DraftTree:
        """A chain: the root, then each token the child of the one before."""
        nodes = len(tokens)
        columns = list(range(-1, nodes - 1)), list(range(nodes)), _CHAIN[:nodes]
        return cls(list(tokens), *columns, _author(drafter, tokens), chances, sources)

    def beginning(self, nodes: int, chances: tuple[float, ...], sources: tuple[str, ...] = ()) -> DraftTree:
        """The first nodes of a chain, with these chances."""
        return DraftTree.chain(self.tokens[:nodes], self.drafter, chances, sources)


def _author(drafter: str, tokens: Sequence[int]) -> str:
    """Which drafter proposed a tree; "" for only a root."""
    return drafter if len(tokens) > 1 else ""


#: The chance of a node, given its parent, whose drafter gives none.
_UNKNOWN = 0.5


def merge(trees: Sequence[DraftTree], most: int = MAX_NODES) -> DraftTree:
    """One tree of at most ``most`` nodes, the likeliest; a node that several proposed has the largest of their
    chances."""
    if len(trees) == 1:
        if len(trees[0]) <= most:
            return trees[0]
        if trees[0].is_chain:
            return _shortened(trees[0], most)
    nodes, all_chances, children = [(trees[0].tokens[0], -1, "")], [1.0], dict[tuple[int, int], int]()
    for tree in trees:
        chances = tree.chances if len(tree.chances) == len(tree) else [_UNKNOWN**depth for depth in tree.depths]
        sources, numbers = tree.sources or [tree.drafter] * len(tree), {0: 0}
        for node in range(1, len(tree)):
            below = numbers[tree.parents[node]], tree.tokens[node]
            number = numbers[node] = children.setdefault(below, len(nodes))
            if number == len(nodes):
                nodes.append((tree.tokens[node], below[0], sources[node]))
                all_chances.append(0.0)
            all_chances[number] = max(all_chances[number], chances[node])
    order = {node: number for number, node in enumerate(_likeliest(all_chances, min(most, MAX_NODES)))}
    merged = DraftTree.build(
        [nodes[node][0] for node in order],
        [-1, *(order[nodes[node][1]] for node in list(order)[1:])],
        together(tree.drafter for tree in trees if len(tree) > 1),
        tuple(all_chances[node] for node in order),
    )
    parts = tuple(part for tree in trees for part in tree.parts or (tree,))
    return replace(merged, sources=tuple(nodes[node][2] for node in order), parts=parts)


def _shortened(chain: DraftTree, most: int) -> DraftTree:
    """The first nodes of a chain."""
    shorter = chain.beginning(most, chain.chances[:most], chain.sources[:most])
    return replace(shorter, parts=chain.parts or (chain,))


def _likeliest(chances: Sequence[float], count: int) -> list[int]:
    """The nodes with the largest chances, in their order; of equal ones the earlier, so that parents are kept."""
    nodes = range(len(chances))
    return (
        list(nodes) if len(nodes) <= count else sorted(sorted(nodes, key=lambda node: (-chances[node], node))[:count])
    )
