"""Nodes are cut from candidates on the device as on the host."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from foresay.drafters.calibration import Calibration
from foresay.drafters.cut import Candidates, Cut, cut, joined
from foresay.drafters.tree_builder import TreeBuilder
from foresay.spec.price import Price
from foresay.spec.tree import DraftTree, TreeShape, merge
from foresay.verifier.forward_batch import signed
from foresay.verifier.graphs.proposer import DeviceTree
from tests.drafters.growing import sequence
from tests.spec.trees import paths, random_tree


def on_host(
    root: int, tokens: list[int], parents: list[int], scores: list[float], nodes: int, price: Price | None
) -> tuple[DraftTree, list[int]]:
    """As the host cuts a tree, and the candidates that are its nodes."""
    shape, columns = replace(TreeShape((nodes - 1,)), price=price), ([root, *tokens], [-1, *parents], [0.0, *scores])
    built = TreeBuilder(sequence([root]), shape, Calibration(), None, *columns)
    return built.tree(""), built.kept


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize(("count", "nodes"), [(5, 9), (40, 12), (90, 64)])
def test_trees_are_those_of_the_host(count: int, nodes: int, priced: bool) -> None:
    rng, sequences = random.Random(count), 3
    for _ in range(8):
        # Levels and rows are alike in all trees, so their candidates hang alike.
        parents = [rng.randrange(number) for number in range(1, count + 1)]
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        scores = [of_tree(rng, parents) for _ in range(sequences)]
        tokens = [[rng.randrange(-1, 90) for _ in range(count)] for _ in range(sequences)]
        rows = [rng.choice((-1, number)) for number in range(count)]
        steps = np.cumsum([0.0, *(rng.choice((0.0, 0.2)) * rng.random() for _ in range(nodes - 1))])
        price = Price(0.0, steps.tolist()) if priced else None
        found = Candidates(
            torch.arange(sequences) + 7,
            torch.tensor(tokens),
            torch.tensor([parents] * sequences),
            torch.tensor(scores),
            torch.tensor(depths[1:]),
            torch.tensor(rows),
        )
        prices = torch.tensor(steps, dtype=torch.float32).expand(sequences, -1) if priced else None
        made = cut(found, nodes, prices)
        for index in range(sequences):
            tree, kept = on_host(index + 7, tokens[index], parents, scores[index], nodes, price)
            size = len(tree)
            assert made.tree.counts[index] == size
            assert made.tree.tokens[index, :size].tolist() == [max(token, 0) for token in tree.tokens]
            assert made.tree.parents[index, :size].tolist() == tree.parents
            assert made.tree.depths[index, :size].tolist() == tree.depths
            assert made.tree.ancestors[index, :size].tolist() == signed(tree.ancestors).tolist()
            assert made.candidates[index].tolist() == [node - 1 for node in kept[1:]] + [count] * (nodes - size)
            assert made.rows[index, :size].tolist() == [0, *(rows[node - 1] for node in kept[1:])]


def of_tree(rng: random.Random, parents: list[int]) -> list[float]:
    """Scores of candidates that hang so."""
    scores = [0.0]
    for parent in parents:
        scores.append(scores[parent] + rng.choice((0.0, -0.5, -2.0 * rng.random(), -3.0 * rng.random(), -math.inf)))
    return scores[1:]


def test_found_nodes_and_those_of_a_tree_are_joined_as_the_host_merges_them() -> None:
    rng, shared = random.Random(3), 0
    for _ in range(20):
        pairs = [tuple(random_tree(rng, rng.randint(1, most), 3, root=1) for most in (9, 12)) for _ in range(3)]
        found, tree = (padded([pair[which] for pair in pairs], width) for which, width in ((0, 9), (1, 12)))
        rows = torch.arange(12).expand(3, -1)
        made, rows_of = joined(found, Cut(tree, rows, rows[:, 1:]), 11)
        for index, (theirs, ours) in enumerate(pairs):
            size, both = int(made.counts[index]), merge([theirs, ours])
            assert made.tokens[index, :size].tolist() == both.tokens
            assert made.parents[index, :size].tolist() == both.parents
            assert made.ancestors[index, :size].tolist() == signed(both.ancestors).tolist()
            assert made.depths[index, :size].tolist() == both.depths
            second = paths(ours)
            own = [second.index(each) if each in second else -1 for each in paths(both)]
            assert rows_of[index, :size].tolist() == own
            shared += len(theirs) + len(ours) - 1 - size
    assert shared > 10


def padded(trees: list[DraftTree], width: int) -> DeviceTree:
    """What is behind a tree is anything."""
    columns = {name: torch.randint(0, 3, (len(trees), width)) for name in ("tokens", "parents", "ancestors", "depths")}
    for row, tree in enumerate(trees):
        for name, column in columns.items():
            column[row, : len(tree)] = torch.as_tensor(getattr(tree, name))
    counts = torch.tensor([len(tree) for tree in trees])
    return DeviceTree(
        columns["tokens"], columns["parents"], columns["ancestors"], columns["depths"].int(), counts, False
    )
