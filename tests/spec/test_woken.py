"""Experts that a step wakes: what is learned of it, and what it does to a choice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foresay.spec.budget.cost import CostModel
from foresay.spec.budget.experts import Experts, kinds
from foresay.spec.budget.weigh import Estimate, ExpectedTree, weigh
from foresay.spec.tree import DraftTree
from tests.spec.test_weigh import costs, draft

TREE = DraftTree.build(list(range(6)), [-1, 0, 0, 0, 1, 1], "x")


def test_rows_of_independent_choices_wake_as_many_as_expected() -> None:
    """And what rows have in common is learned, each kind by itself, however many are woken at once."""
    rng, experts = random.Random(0), Experts(64, 8, 0.001)
    assert kinds(2, [TREE, DraftTree.chain([1, 2])]).tolist() == [3, 3, 1]
    true = np.array((0.3, 0.7, 0.9))
    for _ in range(400):
        rows = np.array([rng.randrange(4) for _ in range(3)], dtype=np.float64)
        woken = 64 * (1 - (1 - 8 / 64) ** (1 + rows @ true))
        experts.saw(rows, woken * rng.uniform(0.97, 1.03))
    assert experts.shares == pytest.approx(true, abs=0.05)
    assert experts.chain(16, 1)[[0, 1, 2]] == pytest.approx([8, 8, 64 * (1 - (7 / 8) ** 1.3)], rel=0.01)
    assert float(experts.woken(np.array((0.0, 1.0, 0.0)))) > experts.chain(2, 1)[2]


def seen(cost: CostModel, rows: int, woken: float, of_each: float, times: int = 60) -> None:
    for _ in range(times):
        phases = {"forward": 0.01 + 0.0001 * rows + of_each * woken}
        cost.saw(rows, 1, 0, rows - 1, phases, woken, np.array((rows - 1.0, 0.0, 0.0)))


def test_a_curve_of_a_mixture_follows_what_experts_take_and_how_many_are_woken() -> None:
    def made() -> CostModel:
        return CostModel([1, 4, 16], [0.018, 0.030, 0.060], experts=Experts(64, 8, 0.001))

    cost = made()
    assert [rows for rows, _ in cost.points] == [1, 4, 16]
    assert [seconds for _, seconds in cost.points] == pytest.approx([0.018, 0.030, 0.060])
    alike, different = made(), made()
    for rows in (1, 4, 16):
        seen(alike, rows, 8.0, 0.001)
        seen(different, rows, 64 * (1 - (7 / 8) ** rows), 0.001)
    assert different.table(1, 0, 16)[16] > 1.5 * alike.table(1, 0, 16)[16]
    assert different.table(1, 0, 16)[16] == pytest.approx(0.0116 + 0.064 * (1 - (7 / 8) ** 16), rel=0.15)
    assert max(alike.siblings) > 0 > -1e-4 > min(different.siblings)


def test_a_wide_tree_is_dearer_than_a_chain_where_siblings_wake_experts_of_their_own() -> None:
    tree = Estimate(trees={"m": ExpectedTree(1.6, 8.0, 2.0)}, chains={"m": [0.6, 0.4, 0.2]})
    by = costs([1.0 + 0.05 * rows for rows in range(40)], 1.0, m=draft(0.0, 0.02))
    assert not weigh([tree], by)[0].chain
    assert weigh([tree], by._replace(siblings=[0.05] * 40))[0].chain
    way = by.tree("m", [tree], [()])
    prices = [by._replace(siblings=each).price(way, 0, 1.0, 8).rows[-1] for each in ((), [0.05] * 40)]
    assert prices[1] == pytest.approx(prices[0] + 7 * 0.75 * 0.05)
