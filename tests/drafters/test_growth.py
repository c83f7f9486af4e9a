"""Trees grow where they are likeliest to be hit; each is the best there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from foresay.drafters.calibration import Calibration
from foresay.drafters.tree_builder import TreeBuilder
from foresay.spec.price import Price
from foresay.spec.tree import TreeShape
from tests.drafters.growing import grown, sequence, uncalibrated


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def independent(levels: list[Tensor], shape: TreeShape, calibration: Calibration | None = None) -> TreeBuilder:
    """A tree whose candidates are the same below every node of a depth. levels: fp32[V] of chances."""
    s = sequence([3], temperature=0.0, vocab=len(levels[0]))
    return grown(s, shape, lambda g: levels[g.depth].log()[None], True, calibration)


def level(**chances: float) -> torch.Tensor:
    row = torch.full((10,), 1e-9)
    for token, chance in chances.items():
        row[int(token[1:])] = chance
    return row


LEVELS = [level(t5=0.7, t7=0.25, t9=0.05), level(t1=0.85, t2=0.15), level(t8=1.0)]


@pytest.mark.parametrize("nodes", [2, 5, 10, 21, 64])
def test_of_all_paths_the_tree_holds_the_best(nodes) -> None:
    generator = torch.Generator().manual_seed(nodes)
    levels = [(2 * torch.randn(8, generator=generator)).softmax(-1) for _ in range(3)]
    logs = [row.log().double().tolist() for row in levels]
    scored = {
        path: sum(logs[depth][token] for depth, token in enumerate(path))
        for length in range(1, 4)
        for path in itertools.product(range(8), repeat=length)
    }
    best = sorted(scored, key=scored.__getitem__, reverse=True)[: nodes - 1]
    tree = independent(levels, TreeShape((nodes - 1, *(0, 0)))).tree("x")
    assert paths_of(tree.tokens, tree.parents) == set(best)


def conditional(path: tuple[int, ...], vocab: int) -> torch.Tensor:
    """Made-up logits of the token after a path."""
    return torch.randn(vocab, generator=torch.Generator().manual_seed(hash(path) & 0xFFFF)) * 2


def path_of(g: TreeBuilder, node: int) -> tuple[int, ...]:
    return () if node == 0 else (*path_of(g, g.parents[node]), g.tokens[node])


def made_up(shape: TreeShape, vocab: int = 40) -> tuple[TreeBuilder, dict[tuple[int, ...], float]]:
    """A tree over the made-up model, and the score of every path it looked at."""

    def logits(g: TreeBuilder) -> Tensor:
        assert len(g.front) <= shape.nodes
        return torch.stack([conditional(path_of(g, node), vocab) for node in g.front])

    g = grown(sequence([1, 2], temperature=0.0), shape, logits)
    return g, {path_of(g, node): g.scores[node] for node in range(1, len(g.tokens))}


@pytest.mark.parametrize("shape", [TreeShape((3, 2, 1)), TreeShape((6, 14, 18, 14)), TreeShape((5,))])
def test_scores_are_log_chances_along_the_path(shape) -> None:
    _, scores = made_up(shape)
    for path, score in scores.items():
        steps = (conditional(path[:d], 40).log_softmax(-1)[token] for d, token in enumerate(path))
        assert score == pytest.approx(float(sum(steps)), abs=1e-4)


@pytest.mark.parametrize("shape", [TreeShape((3, 2, 1)), TreeShape((6, 14, 18, 14)), TreeShape((5,))])
def test_a_tree_keeps_the_best_of_what_it_looked_at(shape) -> None:
    g, scores = made_up(shape)
    tree = g.tree("x")
    assert len(tree) == shape.nodes
    best = sorted(scores, key=scores.__getitem__, reverse=True)[: shape.nodes - 1]
    assert paths_of(tree.tokens, tree.parents) == set(best)


@pytest.mark.parametrize("shape", [TreeShape((6, 14, 18, 14, 8, 3)), TreeShape((3, 2, 1)), TreeShape((1, 1, 1))])
def test_expanded_nodes_fit_into_the_rows_of_the_shape(shape) -> None:
    g, _ = made_up(shape)
    tree = g.tree("x")
    rows = [row for node in range(len(tree)) for row in g.rows_of([node])]
    assert rows[0] == 0 and max(rows) < shape.nodes
    assert len(set(rows)) == len(rows)
    inner = {parent: g.rows_of([parent])[0] for parent in tree.parents[1:]}
    assert all(node == 0 or inner[tree.parents[node]] < row for node, row in inner.items()), "all that have children"


@pytest.mark.parametrize("step", [0.0, 0.03, 0.08])
def test_a_tree_that_pays_for_rows_has_fewer_levels(step) -> None:
    shape = (4, 4, 3, 3, 2)
    free, _ = made_up(TreeShape(shape, price=Price(0.0, np.zeros(17).tolist())))
    paid, _ = made_up(TreeShape(shape, price=Price(0.01, step * np.arange(17.0))))
    assert free.depth == len(shape)
    assert 1 <= paid.depth <= free.depth
    assert paid.depth < free.depth or not step


def test_a_tree_says_what_it_expects() -> None:
    """The chances along the path, whose sum is how many drafts should be accepted."""
    tree = independent(LEVELS, TreeShape((2, 2, 1))).tree("x")
    assert tree.chances == pytest.approx((1.0, 0.7, 0.25, 0.595, 0.2125, 0.595), abs=0.01)
    assert sum(independent(LEVELS, TreeShape.chain(2)).tree("x").chances[1:]) == pytest.approx(0.55 + 0.55**2)
    assert TreeShape().is_chain


def test_what_was_accepted_is_learnt() -> None:
    """Below each accepted node that was expanded: which candidate came, whether or not it was in the tree."""
    calibration, seen = uncalibrated(), list[tuple[int, list[bool]]]()
    calibration.saw = lambda kind, depth, chances, hit, chain=True: seen.append((depth, hit.tolist()[:2]))  # type: ignore[method-assign]
    g = independent(LEVELS, TreeShape((2, 2, 1)), calibration)
    s = g.sequence
    tree = g.tree("x")
    (second,) = [node for node in range(6) if tree.tokens[node] == 7]
    s.tokens += [7, 2]  # the sample below 7 is its second candidate, which is not in the tree
    g.learn([0, second])
    assert seen == [(0, [False, True]), (1, [False, True])]
    s.tokens += [9, 9]
    g.learn([0, -1])
    assert seen[2:] == [(0, [False, False])]


def test_what_is_not_allowed_is_not_drafted() -> None:
    """Three tokens are left of ten; the tree stays smaller than its shape."""
    row = torch.full((10,), -torch.inf)
    row[[1, 4, 8]] = torch.tensor([0.0, 1.0, 2.0])
    nothing = torch.full((10,), -torch.inf)
    g = independent([row.exp(), nothing.exp()], TreeShape((6, 2)))
    assert g.tree("x").tokens == [3, 8, 4, 1]


@pytest.mark.parametrize("shape", [TreeShape((3, 2)), TreeShape.chain(3)])
def test_nothing_follows_broken_logits(shape) -> None:
    s = sequence([3], temperature=0.0, vocab=10)
    g = grown(s, shape, lambda g: torch.full((len(g.front), 10), torch.nan))
    assert g.over
    assert g.tree("x").tokens == [3]
