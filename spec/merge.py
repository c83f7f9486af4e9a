"""Several trees with one root become one, cut to a size by what its nodes are worth.

::

    suffix    7 ── 3 ── 5          merged    7 ─┬─ 3 ─┬─ 5        3 was proposed twice and belongs to the first
    model     7 ── 3 ── 8                       │     └─ 8
    ngram     7 ── 9                            └─ 9              siblings are distinct
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foresay.spec.names import together
from foresay.spec.tree import MAX_NODES, DraftTree

#: The chance of a node whose drafter says none, given its parent.
_UNTOLD = 0.5


@dataclass(frozen=True, slots=True)
class Merged:
    """numbers: for each tree that went in, the node each of its nodes became; -1 for one that was left out."""

    tree: DraftTree
    numbers: list[list[int]]


def merge(trees: Sequence[DraftTree], most: int = MAX_NODES, kept: Sequence[int] = ()) -> Merged:
    """One tree of at most ``most`` nodes, the likeliest; of a node that several proposed the larger chance counts.

    kept: of each tree, how many of its nodes take part, the likeliest; all if it is not given.
    """
    kept = kept or [len(tree) for tree in trees]
    if len(trees) == 1:
        most = min(most, kept[0])
        if len(trees[0]) <= most:
            return Merged(trees[0], [list(range(len(trees[0])))])
        if trees[0].is_chain:
            return _shortened(trees[0], most)
    union = _Union(trees[0].tokens[0])
    numbers = [union.add(tree, count) for tree, count in zip(trees, kept, strict=True)]
    places = union.best(min(most, MAX_NODES))
    tree = DraftTree.build(
        [union.nodes[node][0] for node in places],
        [-1, *(places[union.nodes[node][1]] for node in list(places)[1:])],
        together(tree.drafter for tree in trees if len(tree) > 1),
        tuple(union.chances[node] for node in places),
    )
    sources = tuple(union.nodes[node][2] for node in places)
    parts = tuple(part for tree in trees for part in tree.parts or (tree,))
    return Merged(
        replace(tree, sources=sources, parts=parts),
        [[places.get(node, -1) for node in of_tree] for of_tree in numbers],
    )


def _shortened(chain: DraftTree, most: int) -> Merged:
    """The first nodes of a chain."""
    shorter = chain.beginning(most, chain.chances[:most], chain.sources[:most])
    numbers = [node if node < most else -1 for node in range(len(chain))]
    return Merged(replace(shorter, parts=chain.parts or (chain,)), [numbers])


class _Union:
    """All nodes of all trees, in the order they came: of each its token, its parent and who proposed it."""

    def __init__(self, root: int) -> None:
        self.nodes: list[tuple[int, int, str]] = [(root, -1, "")]
        self.chances = [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, tree: DraftTree, count: int) -> list[int]:
        """Hang the likeliest nodes of a tree in; returns what number each of its nodes has here, -1 for none."""
        tokens, parents, places = tree.tokens, tree.parents, [0]
        chances = tree.chances if len(tree.chances) == len(tokens) else [_UNTOLD**depth for depth in tree.depths]
        sources, kept = tree.sources or [tree.drafter] * len(tokens), set(_likeliest(chances, count))
        for node in range(1, len(tokens)):
            if node not in kept:
                places.append(-1)
                continue
            below = places[parents[node]], tokens[node]
            place = self._children.setdefault(below, len(self.nodes))
            if place == len(self.nodes):
                self.nodes.append((tokens[node], below[0], sources[node]))
                self.chances.append(0.0)
            self.chances[place] = max(self.chances[place], chances[node])
            places.append(place)
        return places

    def best(self, most: int) -> dict[int, int]:
        """The likeliest nodes in their order, each with its place among them."""
        return {node: place for place, node in enumerate(_likeliest(self.chances, most))}


def _likeliest(chances: Sequence[float], count: int) -> list[int]:
    """The nodes of the largest chances, in their order; of equal ones the earlier, so that a parent stays in."""
    nodes = range(len(chances))
    return (
        list(nodes) if len(nodes) <= count else sorted(sorted(nodes, key=lambda node: (-chances[node], node))[:count])
    )
