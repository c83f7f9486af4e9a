"""Nodes are cut from candidates on the device as on the host."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from foresay.drafters.cut import Candidates, cut
from foresay.spec.price import Price
from foresay.spec.tree import DraftTree


def by_hand(
    root: int, tokens: list[int], parents: list[int], scores: list[float], most: int, price: Price | None
) -> tuple[DraftTree, list[int]]:
    """As the host cuts a tree."""
    ranked = sorted((n for n, score in enumerate(scores) if score > -math.inf), key=lambda n: -scores[n])[:most]
    if price is not None:
        ranked = ranked[: price.keeps(np.exp([scores[n] for n in ranked]))]
    kept = [0, *sorted(1 + n for n in ranked)]
    number = {node: index for index, node in enumerate(kept)} | {-1: -1}
    above = [-1, *parents]
    return DraftTree.build([[root, *tokens][node] for node in kept], [number[above[node]] for node in kept]), kept


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
        price = Price(0.0, steps) if priced else None
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
            tree, kept = by_hand(index + 7, tokens[index], parents, scores[index], nodes - 1, price)
            size = len(tree)
            assert made.tree.counts[index] == size
            assert made.tree.tokens[index, :size].tolist() == tree.tokens.clamp(min=0).tolist()
            for ours, theirs in (("parents", "parents"), ("depths", "depths"), ("ancestors", "ancestors")):
                assert getattr(made.tree, ours)[index, :size].tolist() == getattr(tree, theirs).tolist()
            assert made.places[index].tolist() == [node - 1 for node in kept[1:]] + [count] * (nodes - size)
            assert made.rows[index, :size].tolist() == [0, *(rows[node - 1] for node in kept[1:])]


def of_tree(rng: random.Random, parents: list[int]) -> list[float]:
    """Scores of candidates that hang so."""
    scores = [0.0]
    for parent in parents:
        scores.append(scores[parent] + rng.choice((0.0, -0.5, -2.0 * rng.random(), -3.0 * rng.random(), -math.inf)))
    return scores[1:]
