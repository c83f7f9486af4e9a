"""What steps and drafts take, corrected by the steps."""

from __future__ import annotations

import random

import pytest

from foresay.spec.budget.cost import CostModel, DraftCost


def test_steps_correct_the_curve_most_of_all_near_their_rows() -> None:
    cost = CostModel([1, 8, 64], [1.0, 1.0, 4.0])
    for _ in range(200):
        cost.saw(8, 8, 0, 2.0)
    after = cost.expected(64)
    assert after[8] == pytest.approx(2.0, rel=0.02)
    assert after[1] < 1.5
    assert after[64] < 6.0
    for _ in range(200):
        cost.saw(1, 1, 0, 3.0)
    assert cost.expected(64)[8] >= cost.expected(64)[1] == pytest.approx(3.0, rel=0.02)
    assert cost.points == [(1, 1.0), (8, 1.0), (64, 4.0)]


def test_a_slower_machine_is_slower_at_all_rows_and_soon() -> None:
    cost = CostModel([1, 8, 64], [1.0, 1.5, 4.0])
    for _ in range(30):
        cost.saw(1, 1, 0, 2.0)
        cost.saw(8, 8, 0, 3.0)
    after = cost.expected(64)
    assert after[1] == pytest.approx(2.0, rel=0.05)
    assert after[8] == pytest.approx(3.0, rel=0.05)
    assert after[64] > 5.75


def test_on_a_machine_that_is_faster_by_now_drafts_are_cheaper_too() -> None:
    cost = DraftCost(0.1, 0.2, 0.01, slower=0.5)
    assert cost.seconds(2, more=10) == pytest.approx(0.3)
    for _ in range(200):
        cost.saw(2, 0.4)
    assert cost.seconds(2) == pytest.approx(0.4, rel=0.02)


def test_what_was_never_measured_is_what_the_first_draft_takes() -> None:
    cost = DraftCost()
    cost.saw(3, 0.4)
    assert cost.seconds(3) == pytest.approx(0.4)


def test_one_step_that_was_held_up_hardly_counts() -> None:
    cost, draft = CostModel([1], [1.0]), DraftCost(0.1, 0.1)
    cost.saw(1, 1, 0, 1000.0)
    draft.saw(4, 1000.0)
    assert cost.expected(1)[1] < 1.05
    assert draft.seconds(4) < 0.53


def test_context_adds_to_a_step_and_more_to_more_rows() -> None:
    cost = CostModel([1, 2], [1.0, 1.0], context=[(1, 0.0011), (2, 0.0012)])
    assert cost.behind(1, 1000) == pytest.approx(1.1)
    assert cost.behind(2, 1000) == pytest.approx(1.2)
    assert cost.behind(4, 1000) == pytest.approx(2.4)


@pytest.mark.parametrize("sequences", [1, 2, 3])
@pytest.mark.parametrize("points", [1, 2, 5])
def test_a_table_is_what_each_of_its_rows_costs(sequences: int, points: int) -> None:
    """With its share of the context, between the points, below and beyond them; more rows never less."""
    rng = random.Random(points)
    rows = sorted(rng.sample(range(1, 40), points))
    behind = [(row, rng.uniform(1e-5, 1e-4)) for row in sorted(rng.sample(range(1, 20), points))]
    cost = CostModel(rows, [rng.uniform(0.01, 0.05) for _ in rows], behind)
    for _ in range(50):
        own = rng.randrange(1, 20)
        cost.saw(own * sequences, own, 500, rng.uniform(0.01, 0.06))
    expected, most = cost.expected(64), 0.0
    for row, seconds in enumerate(cost.table(sequences, 700, 64)):
        most = max(most, expected[row] + cost.behind(row / sequences, 700))
        assert seconds == pytest.approx(most)
        assert type(seconds) is float


def test_who_rested_pays_for_what_was_written_meanwhile() -> None:
    cost = DraftCost(0.1, 0.2, 0.01)
    assert cost.seconds(3, more=50) == pytest.approx(0.1 + 0.6 + 0.5)


def test_a_table_is_read_again_when_the_batch_the_context_or_the_costs_have_changed() -> None:
    cost = CostModel([1, 8], [1.0, 2.0], context=[(1, 0.001)])
    first = cost.table(1, 100, 8)
    assert cost.table(1, 101, 8) is first
    assert cost.table(1, 1000, 8)[1] == pytest.approx(2.0)
    assert len(cost.table(2, 1000, 16)) == 17
    for _ in range(200):
        cost.saw(2, 1, 1000, 2 * (cost.points[0][1] + 1.0))
    for _ in range(16):
        last = cost.table(2, 1000, 16)
    assert last[1] == pytest.approx(4.0, rel=0.1)
