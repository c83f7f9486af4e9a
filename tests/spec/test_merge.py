"""Several trees become one."""

from __future__ import annotations

import random

from foresay.spec.tree import DraftTree, merge


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node."""
    found: list[tuple[int, ...]] = [()]
    tokens, parents = tree.tokens, tree.parents
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


def test_a_node_that_two_proposed_belongs_to_the_first() -> None:
    suffix = DraftTree.chain([7, 3, 5], "suffix", (1.0, 0.6, 0.5))
    model = DraftTree.chain([7, 3, 8, 9], "draft_model", (1.0, 0.8, 0.4, 0.1))
    ngram = DraftTree.chain([7, 2], "ngram", (1.0, 0.2))
    merged = merge([suffix, model, ngram])
    assert merged.tree.tokens == [7, 3, 5, 8, 9, 2]
    assert merged.tree.parents == [-1, 0, 1, 1, 3, 0]
    assert merged.tree.sources == ("", "suffix", "suffix", "draft_model", "draft_model", "ngram")
    assert merged.tree.chances == (1.0, 0.8, 0.5, 0.4, 0.1, 0.2)
    assert merged.tree.drafter == "suffix+ngram+draft_model", "in one order, whoever comes first"
    assert merged.numbers == [[0, 1, 2], [0, 1, 3, 4], [0, 5]]


def test_the_least_likely_nodes_go() -> None:
    suffix = DraftTree.chain([7, 3, 5], "suffix", (1.0, 0.6, 0.5))
    model = DraftTree.chain([7, 4, 8], "model", (1.0, 0.55, 0.1))
    merged = merge([suffix, model], most=4)
    assert paths(merged.tree) == [(), (3,), (3, 5), (4,)]
    assert merged.numbers == [[0, 1, 2], [0, 3, -1]]
    cut = merge([merged.tree], most=3).tree
    assert paths(cut) == [(), (3,), (4,)] or paths(cut) == [(), (3,), (3, 5)]
    assert len(cut.sources) == 3


def test_of_each_tree_only_so_many_nodes_take_part_and_all_of_it_is_remembered() -> None:
    suffix = DraftTree.chain([7, 3, 5], "suffix", (1.0, 0.5, 0.1))
    model = DraftTree.build([7, 4, 8, 9], [-1, 0, 1, 1], "model", (1.0, 0.6, 0.2, 0.3))
    both = merge([suffix, model], kept=[2, 3])
    assert paths(both.tree) == [(), (3,), (4,), (4, 9)]
    assert both.numbers == [[0, 1, -1], [0, 2, -1, 3]]
    assert both.tree.parts == (suffix, model)
    alone = merge([model], kept=[3])
    assert (alone.tree.is_chain, alone.tree.tokens, alone.tree.drafter) == (True, [7, 4, 9], "model")
    assert (alone.numbers, alone.tree.parts) == ([[0, 1, -1, 2]], (model,))
    begun = merge([DraftTree.chain([7, 3, 5], "x")], most=2)
    assert (begun.tree.tokens, begun.tree.chances, begun.numbers) == ([7, 3], (), [[0, 1, -1]])


def test_random_trees() -> None:
    """The union of the paths, siblings distinct, at most 64 nodes, and each tree finds its own nodes again."""
    rng = random.Random(1)
    for _ in range(200):
        trees, most = [random_tree(rng, name) for name in "abc"[: rng.randint(1, 3)]], rng.choice((64, 40, 9))
        merged = merge(trees, most)
        kept = paths(merged.tree)
        assert len(kept) == len(set(kept)) <= most
        union = {path for tree in trees for path in paths(tree)}
        assert set(kept) <= union
        assert len(kept) == min(most, len(union))
        for tree, numbers in zip(trees, merged.numbers, strict=True):
            for path, place in zip(paths(tree), numbers, strict=True):
                assert (path in kept) == (place >= 0)
                assert place < 0 or kept[place] == path


def random_tree(rng: random.Random, name: str) -> DraftTree:
    tokens, parents, chances = [0], [-1], [1.0]
    children: set[tuple[int, int]] = set()
    for _ in range(rng.randint(0, 30)):
        parent, token = rng.randrange(len(tokens)), rng.randrange(4)
        if (parent, token) not in children:
            children.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            chances.append(chances[parent] * rng.random())
    return DraftTree.build(tokens, parents, name, tuple(chances))
