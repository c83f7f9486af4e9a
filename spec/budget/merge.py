"""Several trees with one root become one, cut to a size by what its nodes are worth.

::

    suffix    7 ── 3 ── 5          merged    7 ─┬─ 3 ─┬─ 5        3 was proposed twice and belongs to the first
    model     7 ── 3 ── 8                       │     └─ 8
    ngram     7 ── 9                            └─ 9              siblings are distinct
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from spec.names import together
from spec.tree import MAX_NODES, DraftTree

#: The chance of a node whose drafter says none, given its parent.
_UNTOLD = 0.5


@dataclass(frozen=True, slots=True)
class Merged:
    """numbers: for each tree that went in, the node each of its nodes became; -1 for one that was left out."""

    tree: DraftTree
    numbers: list[list[int]]


def merge(trees: Many[DraftTree], most: int = MAX_NODES) -> Merged:
    """One tree of at most ``most`` nodes, the likeliest; of a node that several proposed the larger chance counts."""
    if len(trees) == 1 and len(trees[0]) <= most:
        return Merged(trees[0], [list(range(len(trees[0])))])
    if len(trees) == 1 and trees[0].is_chain:
        return straightened(trees[0], range(1, most))
    union = _Union(int(trees[0].tokens[0]))
    numbers = [union.add(tree) for tree in trees]
    places = union.best(min(most, MAX_NODES))
    tree = DraftTree.build(
        [union.tokens[node] for node in places],
        [-1, *(places[union.parents[node]] for node in list(places)[1:])],
        together(tree.drafter for tree in trees if len(tree) > 1),
        tuple(union.chances[node] for node in places),
    )
    sources = tuple(union.sources[node] for node in places)
    parts = tuple(part for tree in trees for part in tree.parts or (tree,))
    return Merged(
        replace(tree, sources=sources, parts=parts),
        [[places.get(node, -1) for node in of_tree] for of_tree in numbers],
    )


def likeliest(tree: DraftTree) -> list[int]:
    """The nodes of the path that has the likeliest node at each depth of those below the one before."""
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        below.setdefault(parent, []).append(node)
    path, at = [], 0
    while children := below.get(at):
        at = max(children, key=tree.chances.__getitem__)
        path.append(at)
    return path


def straightened(tree: DraftTree, path: Many[int]) -> Merged:
    """The nodes of a path alone, as a chain."""
    nodes = [0, *path]
    tokens = tree.tokens.tolist()
    chances = tuple(tree.chances[node] for node in nodes) if tree.chances else ()
    sources = tuple(tree.sources[node] for node in nodes) if tree.sources else ()
    chain = DraftTree.chain([tokens[node] for node in nodes], tree.drafter, chances)
    places = {node: place for place, node in enumerate(nodes)}
    return Merged(replace(chain, sources=sources), [[places.get(node, -1) for node in range(len(tokens))]])


class _Union:
    """All nodes of all trees, in the order they came."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.chances, self.sources = [root], [-1], [1.0], [""]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, tree: DraftTree) -> list[int]:
        """Hang a tree in; returns what number each of its nodes has here."""
        tokens, parents, places = tree.tokens.tolist(), tree.parents.tolist(), [0]
        chances = tree.chances if len(tree.chances) == len(tokens) else _untold(parents)
        sources = tree.sources or [tree.drafter] * len(tokens)
        for token, parent, chance, source in zip(tokens[1:], parents[1:], chances[1:], sources[1:], strict=True):
            below = (places[parent], token)
            place = self._children.get(below)
            if place is None:
                place = self._children[below] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(below[0])
                self.chances.append(chance)
                self.sources.append(source)
            else:
                self.chances[place] = max(self.chances[place], chance)
            places.append(place)
        return places

    def best(self, most: int) -> dict[int, int]:
        """The likeliest nodes in their order, each with its place among them."""
        kept = list(range(len(self.tokens)))
        if len(kept) > most:
            # Of equal ones the earlier, so that a parent stays in.
            kept = sorted(sorted(kept, key=lambda node: (-self.chances[node], node))[:most])
        return {node: place for place, node in enumerate(kept)}


def _untold(parents: Many[int]) -> list[float]:
    chances = [1.0]
    for parent in parents[1:]:
        chances.append(chances[parent] * _UNTOLD)
    return chances
