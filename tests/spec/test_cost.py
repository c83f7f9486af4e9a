"""What a step takes, corrected by the steps."""

from __future__ import annotations

import random

import pytest

from spec.budget import StepCost

ROWS, SECONDS, BRANCHING = [1, 3, 6, 12, 24], [0.060, 0.067, 0.080, 0.100, 0.140], 0.005


def true(rows: int, trees: int) -> float:
    """What a step takes in truth."""
    return StepCost(ROWS, SECONDS).seconds(rows) + trees * BRANCHING


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("measured", [0.0, 0.020])
def test_what_branching_takes_is_learnt_from_steps(measured: float, sequences: int) -> None:
    """Chains of some rows and trees of more, on a machine whose steps differ by a twentieth."""
    found = []
    for seed in range(5):
        cost, rng = StepCost(ROWS, SECONDS, branching=measured), random.Random(seed)
        for _ in range(600 * sequences):
            branched = [rng.random() < 0.5 for _ in range(sequences)]
            rows = sum(rng.randint(4, 8) if tree else rng.randint(2, 6) for tree in branched)
            seconds = true(rows, sum(branched)) * rng.gauss(1.0, 0.05)
            cost.saw(rows, rows / sequences, 0, seconds, trees=sum(branched))
        found.append(cost.branching)
        assert cost.expected(6)[6] + cost.branching == pytest.approx(true(6, 1), rel=0.05)
    assert sum(found) / len(found) == pytest.approx(BRANCHING, abs=0.0015)


@pytest.mark.parametrize("trees", [0, 1])
def test_a_slower_machine_is_not_taken_for_dear_branching(trees: int) -> None:
    """Steps of one kind alone cannot tell, from the first one on."""
    cost = StepCost(ROWS, SECONDS, branching=BRANCHING)
    for _ in range(200):
        cost.saw(6, 6, 0, 1.3 * true(6, trees), trees=trees)
    assert cost.branching / cost.slower == pytest.approx(BRANCHING, rel=0.01)
