"""Random trees, and the plain walk that the accept rule is measured against."""

from __future__ import annotations

import random
from collections.abc import Sequence

from foresay.spec.tree import DraftTree


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    """Parents of a random tree in a random topological order: bushy, lanky or in between."""
    reach = rng.choice([1, 2, 4, nodes])
    return [-1] + [rng.randrange(max(0, node - reach), node) for node in range(1, nodes)]


def random_tree(rng: random.Random, nodes: int, vocab_size: int, root: int | None = None) -> DraftTree:
    """A random tree whose siblings carry different tokens; smaller than ``nodes`` where a sibling was sampled twice."""
    tokens, parents = [rng.randrange(vocab_size) if root is None else root], [-1]
    reach, used = rng.choice([1, 2, 4, nodes]), set()
    for _ in range(nodes - 1):
        child = (rng.randrange(max(0, len(tokens) - reach), len(tokens)), rng.randrange(vocab_size))
        if child not in used:
            used.add(child)
            parents.append(child[0])
            tokens.append(child[1])
    return DraftTree.build(tokens, parents)


def walk(tokens: Sequence[int], parents: Sequence[int], samples: Sequence[int]) -> tuple[list[int], list[int]]:
    """From the root: while the sampled token is a child, step into it. Returns the path and the samples along it."""
    path = [0]
    while True:
        children = [n for n in range(len(tokens)) if parents[n] == path[-1] and tokens[n] == samples[path[-1]]]
        if not children:
            return path, [samples[node] for node in path]
        path.append(children[0])


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The path from the root to a node, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found
