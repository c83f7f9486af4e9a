"""Trees: the invariants on random ones, what a shape may be, and several as one."""

from __future__ import annotations

import random

import pytest

from foresay.spec.errors import ConfigurationError
from foresay.spec.tree import MAX_NODES, DraftTree, TreeShape, merge
from foresay.verifier.forward_batch import signed
from tests.spec.trees import ancestors, paths, random_parents, random_tree, walk


@pytest.mark.parametrize("nodes", [1, 2, 5, 63, 64])
def test_a_chain_is_the_tree_with_those_parents(nodes: int) -> None:
    tokens = list(range(100, 100 + nodes))
    chain, built = DraftTree.chain(tokens, "me"), DraftTree.build(tokens, range(-1, nodes - 1), "me")
    for column in ("tokens", "parents", "depths", "ancestors"):
        one, other = getattr(chain, column), getattr(built, column)
        assert one == other, column
    assert chain.is_chain
    assert built.is_chain
    assert len(chain) == nodes
    assert chain.depths == list(range(nodes))


def test_a_chain_of_64_uses_the_sign_bit() -> None:
    words = DraftTree.chain([0] * 64).ancestors
    assert words == [(1 << node + 1) - 1 for node in range(64)]
    assert words[-1] == (1 << 64) - 1
    assert signed(words).tolist() == [*words[:63], -1]


@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 64])
def test_invariants_of_random_trees(nodes: int) -> None:
    rng = random.Random(nodes)
    for _ in range(60):
        parents = random_parents(rng, nodes)
        tree = DraftTree.build([rng.randrange(50) for _ in parents], parents)
        words = tree.ancestors
        paths = [ancestors(parents, node) for node in range(nodes)]
        assert words == [sum(1 << step for step in path) for path in paths]
        assert tree.depths == [len(path) - 1 for path in paths]
        assert [word.bit_count() - 1 for word in words] == tree.depths
        assert tree.is_chain == (parents == list(range(-1, nodes - 1)))
        # The parents can be read from the words: the last ancestor but oneself.
        assert [(word & ~(1 << node)).bit_length() - 1 for node, word in enumerate(words)] == parents


@pytest.mark.parametrize("parents", [[-1, 1], [-1, 0, 2], [-1, -1], [-1, 0, 3, 0]])
def test_a_parent_comes_before_its_child(parents: list[int]) -> None:
    with pytest.raises(AssertionError, match="before its child"):
        DraftTree.build([1] * len(parents), parents)


def test_a_tree_holds_64_nodes() -> None:
    with pytest.raises(AssertionError, match="64"):
        DraftTree.build([1] * 65, range(-1, 64))


@pytest.mark.parametrize(
    ("text", "widths"),
    [("1", (1,)), ("3,2,1", (3, 2, 1)), (" 4, 2 ", (4, 2)), ("63", (63,)), ("1," * 62 + "1", (1,) * 63)],
)
def test_shapes_that_can_be_read(text: str, widths: tuple[int, ...]) -> None:
    shape = TreeShape.parse(text)
    assert shape == TreeShape(widths)
    assert (shape.levels, shape.nodes) == (len(widths), 1 + sum(widths))
    assert shape.nodes <= MAX_NODES


@pytest.mark.parametrize("text", ["", " ", "0", "3,0,1", "-1", "3,-2", "a", "3,2,", ",3", "3;2", "1.5", "3,,2", "0x3"])
def test_shapes_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigurationError, match="draft_tree must be numbers of nodes per level"):
        TreeShape.parse(text)


@pytest.mark.parametrize("text", ["64", "32,32", "1," * 63 + "1", "9" * 30])
def test_shapes_that_are_too_large(text: str) -> None:
    with pytest.raises(ConfigurationError, match="at most 63 drafted nodes"):
        TreeShape.parse(text)


@pytest.mark.parametrize(
    ("levels", "widths"), [(-1, ()), (0, ()), (1, (3,)), (2, (3, 2)), (3, (3, 2, 1)), (9, (3, 2, 1))]
)
def test_a_shape_cut_to_fewer_levels(levels: int, widths: tuple[int, ...]) -> None:
    assert TreeShape((3, 2, 1)).limited(levels) == TreeShape(widths)


@pytest.mark.parametrize("widths", [(), (1, 1), (3, 2, 1), (6, 14, 18, 14, 8, 3)])
@pytest.mark.parametrize("levels", [-1, 0, 1, 5, 32, 63])
def test_a_deepened_shape_has_room_for_itself_and_a_chain(widths, levels) -> None:
    shape = TreeShape(widths)
    deep = shape.deepened(levels)
    assert deep.levels == max(shape.levels, levels)
    assert deep.nodes == max(shape.nodes, levels + 1)
    assert min(deep.widths, default=1) >= 1


@pytest.mark.parametrize("nodes", [1, 2, 9, 64])
def test_what_is_accepted_is_the_path_that_a_walk_finds(nodes: int) -> None:
    rng = random.Random(nodes)
    lengths = set()
    for _ in range(200):
        tree = random_tree(rng, nodes, 3)
        coming = [rng.randrange(3) for _ in range(rng.randrange(8))]
        # A walk along these tokens, whose samples at each node are the token due at its depth.
        samples = [coming[depth] if depth < len(coming) else -1 for depth in tree.depths]
        path, emitted = walk(tree.tokens, tree.parents, samples)
        assert (tree.path_of(emitted), tree.path_of([])) == (path, [])
        assert tree.path_of([*emitted, 0, tree.tokens[0], 0]) == [*path, -1, -1, -1]
        assert tree.accepted(coming) == len(path) - 1
        lengths.add(tree.accepted(coming))
    assert nodes == 1 or len(lengths) > 1


def test_a_node_that_two_proposed_belongs_to_the_first() -> None:
    suffix = DraftTree.chain([7, 3, 5], "suffix", (1.0, 0.6, 0.5))
    model = DraftTree.chain([7, 3, 8, 9], "draft_model", (1.0, 0.8, 0.4, 0.1))
    ngram = DraftTree.chain([7, 2], "ngram", (1.0, 0.2))
    merged = merge([suffix, model, ngram])
    assert merged.tokens == [7, 3, 5, 8, 9, 2]
    assert merged.parents == [-1, 0, 1, 1, 3, 0]
    assert merged.sources == ("", "suffix", "suffix", "draft_model", "draft_model", "ngram")
    assert merged.chances == (1.0, 0.8, 0.5, 0.4, 0.1, 0.2)
    assert merged.drafter == "suffix+ngram+draft_model", "in one order, whoever comes first"


def test_the_likeliest_remain_and_all_that_was_proposed_is_remembered() -> None:
    suffix = DraftTree.chain([7, 3, 5], "suffix", (1.0, 0.5, 0.1))
    model = DraftTree.build([7, 4, 8, 9], [-1, 0, 1, 1], "model", (1.0, 0.6, 0.2, 0.3))
    both = merge([suffix, model], most=4)
    assert paths(both) == [(), (3,), (4,), (4, 9)]
    assert both.parts == (suffix, model)
    alone = merge([model], most=3)
    assert (alone.is_chain, alone.tokens, alone.drafter) == (True, [7, 4, 9], "model")
    assert alone.parts == (model,)
    begun = merge([DraftTree.chain([7, 3, 5], "x")], most=2)
    assert (begun.tokens, begun.chances) == ([7, 3], ())


def test_random_trees() -> None:
    """The union of the paths, siblings distinct, at most 64 nodes."""
    rng = random.Random(1)
    for _ in range(200):
        trees, most = [random_tree_of_merge(rng, name) for name in "abc"[: rng.randint(1, 3)]], rng.choice((64, 40, 9))
        merged = merge(trees, most)
        kept = paths(merged)
        assert len(kept) == len(set(kept)) <= most
        union = {path for tree in trees for path in paths(tree)}
        assert set(kept) <= union
        assert len(kept) == min(most, len(union))


def random_tree_of_merge(rng: random.Random, name: str) -> DraftTree:
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
