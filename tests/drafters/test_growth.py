"""Trees grow where they are likeliest to be hit; a dynamic one is the best there is."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from drafters.growth import Growing, best_children, grow_independent, with_noise
from kvpaging import PagePool, PageTable
from spec.noise import Noise
from spec.sampling import SamplingParams
from spec.sequence import Sequence
from spec.tree import TreeShape

TOKENS, CHANCES = [[5, 7, 9], [1, 2], [8]], [[-0.3, -1.5, -4.0], [-0.2, -2.0], [-0.1]]
LEVELS = list(zip(TOKENS, CHANCES, strict=True))


def sequence(tokens: list[int], temperature: float = 1.0, vocab: int = 40) -> Sequence:
    table = PageTable(PagePool(4, 16))
    return Sequence("s", tokens, 1, SamplingParams(temperature=temperature), table, Noise(3, vocab), 99, frozenset())


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def test_a_static_tree_keeps_so_many_of_each_level() -> None:
    tokens, parents = grow_independent(3, LEVELS, TreeShape((2, 3, 1)), dynamic=False)
    # Level 1: 5, 7. Level 2: 5-1 (-.5), 7-1 (-1.7), 5-2 (-2.3). Level 3: below 5-1.
    assert tokens == [3, 5, 7, 1, 1, 2, 8]
    assert parents == [-1, 0, 0, 1, 2, 1, 3]


def test_a_dynamic_tree_takes_the_likeliest_paths() -> None:
    tokens, parents = grow_independent(3, LEVELS, TreeShape((2, 2, 1)), dynamic=True)
    assert paths_of(tokens, parents) == {(5,), (5, 1), (5, 1, 8), (7,), (7, 1)}


@pytest.mark.parametrize("nodes", [1, 4, 9, 20])
def test_of_all_paths_the_dynamic_tree_holds_the_best(nodes) -> None:
    rng = random.Random(nodes)
    levels = []
    for _ in range(3):
        chances = sorted((-rng.expovariate(1) for _ in range(5)), reverse=True)
        levels.append((rng.sample(range(50), 5), chances))
    scored = {}
    for depth in range(1, 4):
        for ranks in itertools.product(range(5), repeat=depth):
            path = tuple(levels[d][0][rank] for d, rank in enumerate(ranks))
            scored[path] = sum(levels[d][1][rank] for d, rank in enumerate(ranks))
    best = sorted(scored, key=scored.__getitem__, reverse=True)[:nodes]
    shape = TreeShape((nodes, *(0, 0)))
    tokens, parents = grow_independent(0, levels, shape, dynamic=True)
    assert paths_of(tokens, parents) == set(best)


def conditional(path: tuple[int, ...], vocab: int) -> torch.Tensor:
    """Made-up logits of the token after a path."""
    return torch.randn(vocab, generator=torch.Generator().manual_seed(hash(path) & 0xFFFF)) * 2


def grown(shape: TreeShape, dynamic: bool, vocab: int = 40) -> tuple[Growing, dict[tuple[int, ...], float]]:
    """A tree over the made-up model, and the score of every path it looked at."""
    g = Growing.below(sequence([1, 2], temperature=0.0), shape, dynamic)
    path_of: dict[int, tuple[int, ...]] = {0: ()}
    while g.depth < shape.levels:
        logits = torch.stack([conditional(path_of[node], vocab) for node in g.frontier])
        assert len(g.frontier) <= shape.nodes
        before = len(g.tokens)
        rows = g.frontier
        going = g.add_level(*best_children(logits, g.width))
        for node in range(before, len(g.tokens)):
            path_of[node] = (*path_of[g.parents[node]], g.tokens[node])
        assert [g.parents[node] for node in g.frontier] == [rows[index] for index in going]
    return g, {path_of[node]: g.scores[node] for node in range(1, len(g.tokens))}


@pytest.mark.parametrize("shape", [TreeShape((3, 2, 1)), TreeShape((6, 14, 18, 14)), TreeShape((5,))])
def test_scores_are_log_chances_along_the_path(shape) -> None:
    for dynamic in (False, True):
        _, scores = grown(shape, dynamic)
        for path, score in scores.items():
            steps = (conditional(path[:d], 40).log_softmax(-1)[token] for d, token in enumerate(path))
            assert score == pytest.approx(float(sum(steps)), abs=1e-4)


@pytest.mark.parametrize("shape", [TreeShape((3, 2, 1)), TreeShape((6, 14, 18, 14)), TreeShape((5,))])
def test_a_dynamic_tree_keeps_the_best_of_what_it_looked_at(shape) -> None:
    g, scores = grown(shape, dynamic=True)
    tree = g.tree("x")
    assert len(tree) == shape.nodes
    best = sorted(scores, key=scores.__getitem__, reverse=True)[: shape.nodes - 1]
    assert paths_of(tree.tokens.tolist(), tree.parents.tolist()) == set(best)


def test_a_static_tree_keeps_its_widths() -> None:
    g, _ = grown(TreeShape((3, 4, 2)), dynamic=False)
    assert g.tree("x").depths.bincount().tolist() == [1, 3, 4, 2]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [TreeShape((6, 14, 18, 14, 8, 3)), TreeShape((3, 2, 1)), TreeShape((1, 1, 1))])
def test_expanded_nodes_fit_into_the_rows_of_the_shape(shape, dynamic) -> None:
    g, _ = grown(shape, dynamic)
    assert max(g.rows.values()) < shape.nodes
    assert sorted(g.rows.values()) == list(range(len(g.rows)))
    for node, row in g.rows.items():
        above = g.words[g.parents[node]] if node else 0
        assert g.words[node] == above | 1 << row


def test_equal_scores_keep_the_parent() -> None:
    g = Growing.below(sequence([1]), TreeShape((1, 2)), dynamic=True)
    g.dynamic = True
    g.add_level(torch.tensor([[4, 5, 6]]), torch.tensor([[0.0, -1.0, -1.0]]))
    g.add_level(torch.tensor([[7, 8, 9]] * len(g.frontier)), torch.zeros(len(g.frontier), 3))
    tree = g.tree("x")
    assert tree.parents.tolist()[:2] == [-1, 0]
    assert int(tree.tokens[1]) == 4


def test_noise_is_that_of_the_position_and_of_the_targets_ids() -> None:
    s, logits = sequence([1, 2, 3], temperature=0.5), torch.randn(2, 40)
    noise = s.noise.row(3 + 1)
    assert torch.equal(with_noise(logits, s, 1), logits / 0.5 + noise)
    ids = torch.tensor([4, 9, 33])
    assert torch.equal(with_noise(logits[:, :3], s, 1, ids), logits[:, :3] / 0.5 + noise[ids])
    assert torch.equal(with_noise(torch.cat((logits, logits), 1), s, 1), logits / 0.5 + noise)
    assert torch.equal(with_noise(logits, sequence([1], temperature=0.0), 1), logits)
    assert torch.equal(with_noise(logits, s, 1, shared=False), logits / 0.5)
