"""What a step takes, corrected by the steps."""

from __future__ import annotations

import random

import pytest

from spec.budget import StepCost


@pytest.mark.parametrize("measured", [0.0, 0.020])
def test_what_branching_takes_is_learnt_from_steps(measured: float) -> None:
    """Chains and trees in turns, the trees five milliseconds dearer, on a machine whose steps differ by a twentieth."""
    cost, rng = StepCost([1, 5, 8], [0.060, 0.075, 0.090], branching=measured), random.Random(1)
    for step in range(600):
        tree = step % 2
        cost.saw(5, 5, 0, (0.075 + 0.005 * tree) * rng.gauss(1.0, 0.05), trees=tree)
    assert cost.branching == pytest.approx(0.005, abs=0.002)
    assert cost.expected(5)[5] == pytest.approx(0.075, rel=0.04)


@pytest.mark.parametrize("tree", [0, 1])
def test_a_slower_machine_is_not_taken_for_dear_branching(tree: int) -> None:
    """Steps of one kind alone cannot tell."""
    cost = StepCost([1, 5, 8], [0.060, 0.075, 0.090], branching=0.005)
    for _ in range(300):
        cost.saw(5, 5, 0, 0.075 + 0.005 * tree, trees=tree)
    for _ in range(200):
        cost.saw(5, 5, 0, 1.3 * (0.075 + 0.005 * tree), trees=tree)
    assert cost.branching / cost.slower == pytest.approx(0.005, rel=0.1)
