"""What steps and drafts take, corrected by the steps, and what a step would take without drafts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foresay.spec.budget.cost import CostModel, DraftCost, DraftCosts, Pace


def saw(cost: CostModel, rows: int, seconds: float, times: int = 1, context: int = 0) -> None:
    for _ in range(times):
        cost.saw(rows, 1, context, {"forward": seconds})


def test_a_slower_machine_is_slower_at_all_rows_and_soon() -> None:
    cost = CostModel([1, 8, 64], [1.0, 1.5, 4.0])
    for _ in range(20):  # not the first steps any more
        saw(cost, 1, 1.0)
        saw(cost, 8, 1.5)
    for _ in range(10):
        saw(cost, 1, 2.0)
        saw(cost, 8, 3.0)
    assert cost.now(1) == pytest.approx(2.0, rel=0.05)
    assert cost.now(8) == pytest.approx(3.0, rel=0.1)
    assert cost.now(64) > 6.0


def test_one_step_that_was_held_up_hardly_counts() -> None:
    cost = CostModel([1, 8], [1.0, 2.0])
    draft = DraftCosts(DraftCost(0.1, 0.1), cost.pace)
    for _ in range(30):
        saw(cost, 1, 1.0)
        draft.saw(4, 0, False, 0.5)
    saw(cost, 1, 1000.0)
    assert cost.now(1) < 1.15
    draft.saw(4, 0, False, 1000.0)
    assert draft.now().seconds(4, grown=False) < 0.7


def test_what_is_unsure_is_hoped_to_be_low_until_it_was_seen_and_again_after_long() -> None:
    cost = CostModel([1, 8], [1.0, 3.0])
    assert cost.table(0, 8, hope=True)[8] < 1.3
    saw(cost, 8, 3.0, 5)
    hoped = cost.table(0, 8, hope=True)
    assert hoped[8] == pytest.approx(3.0, rel=0.25)
    assert hoped[1] < 0.5, "which was not seen"
    for _ in range(40):
        saw(cost, 1, 1.0)
    assert cost.table(0, 8, hope=True)[8] == pytest.approx(3.0, rel=0.25)
    saw(cost, 1, 1.0, 9000)
    assert cost.table(0, 8, hope=True)[8] < 2.2


@pytest.mark.parametrize("points", [1, 2, 5])
def test_a_table_is_what_each_of_its_rows_costs(points: int) -> None:
    """Between the points, below and beyond them; more rows never less."""
    rng = random.Random(points)
    rows = sorted(rng.sample(range(1, 40), points))
    cost = CostModel(rows, sorted(rng.uniform(0.01, 0.05) for _ in rows))
    for row, seconds in enumerate(cost.table(0, 64)):
        near = np.interp(row, rows, [seconds for _, seconds in cost.points]) * max(1.0, row / rows[-1])
        assert seconds == pytest.approx(near) == pytest.approx(cost.now(row))
    for _ in range(50):
        saw(cost, rng.randrange(1, 60), rng.uniform(0.01, 0.06))
    table = cost.table(0, 64)
    assert table == pytest.approx(sorted(table)) and table[0] > 0.0


def test_passes_at_long_contexts_are_learnt_apart_and_begin_as_the_nearest() -> None:
    """Short texts are not taken to be slower for them."""
    cost = CostModel([1, 8], [0.01, 0.02])
    saw(cost, 1, 0.01, 100, context=200)
    saw(cost, 8, 0.02, 20, context=200)
    assert cost.now(8, 60_000) == pytest.approx(0.02, rel=0.05)
    for _ in range(60):
        saw(cost, 1, 0.02, context=60_000)
        saw(cost, 8, 0.08, context=60_000)
        saw(cost, 1, 0.01, context=200)
        saw(cost, 8, 0.02, context=200)
    assert [cost.now(1, 60_000), cost.now(8, 60_000)] == pytest.approx([0.02, 0.08], rel=0.1)
    assert [cost.now(1, 200), cost.now(8, 200)] == pytest.approx([0.01, 0.02], rel=0.1)
    assert cost.now(8, 40_000) == pytest.approx(0.08, rel=0.1), "as the nearest that is known"


def test_a_delayed_size_makes_none_dear_that_was_seen_to_take_less() -> None:
    cost = CostModel([1, 2, 3, 8], [0.002, 0.0022, 0.0024, 0.004])
    saw(cost, 1, 0.002, 20)
    saw(cost, 2, 0.02)
    saw(cost, 3, 0.0024, 4)
    table = cost.table(0, 8)
    assert table[2:4] == pytest.approx([0.0024] * 2, rel=0.2) and table[8] > 0.003


def test_what_a_plain_step_takes_is_not_read_off_larger_ones() -> None:
    """Costs may climb in stairs: two rows take as much as four."""
    cost = CostModel([1, 4], [0.01, 0.016])
    saw(cost, 1, 0.01, 5)
    saw(cost, 2, 0.016, 20)
    assert cost.now(1) == pytest.approx(0.01, rel=0.15)


def test_a_known_plain_step_is_no_cheaper_for_what_is_hoped_of_larger_ones() -> None:
    cost = CostModel([1, 8, 32], [0.01, 0.012, 0.02])
    for rows in (8, 32):
        saw(cost, rows, 0.012 if rows == 8 else 0.02, 20)
    saw(cost, 1, 0.01, 15_000)
    assert cost.table(0, 8, hope=True)[1] == pytest.approx(0.01, rel=0.05)


def test_a_model_that_rested_pays_for_what_was_written_meanwhile() -> None:
    cost = DraftCost(0.1, 0.2, 0.01)
    assert cost.seconds(3, more=50) == pytest.approx(0.1 + 0.6 + 0.5)
    assert DraftCosts(cost, Pace()).now().seconds(3, 50, grown=False) == pytest.approx(0.1 + 0.6 + 0.5)


@pytest.mark.parametrize("off", [0.1, 10.0])
def test_costs_that_are_ten_times_off_are_mended_within_60_steps(off: float) -> None:
    cost = CostModel([1, 4, 8], [0.004 * off, 0.005 / off, 0.006 * off])
    draft = DraftCosts(DraftCost(0.0002 / off, 0.0006 * off), cost.pace)
    for _ in range(20):
        saw(cost, 1, 0.004)
        saw(cost, 4, 0.005)
        draft.saw(2, 0, False, 0.0014)
    now = [cost.now(1), cost.now(4), draft.now().seconds(2, grown=False)]
    assert now == pytest.approx([0.004, 0.005, 0.0014], rel=0.05)


def test_a_machine_that_changed_is_followed_though_it_looks_like_a_delay() -> None:
    cost = CostModel([1], [0.01])
    saw(cost, 1, 0.01, 100)
    saw(cost, 1, 0.03, 20)
    assert cost.now(1) == pytest.approx(0.03, rel=0.05)


def test_what_a_whole_step_takes_beyond_its_pass_every_step_takes() -> None:
    cost = CostModel([1, 8], [0.010, 0.015])
    cost.begun(0.011)
    assert [cost.now(1), cost.now(8)] == pytest.approx([0.011, 0.016])
    cost.begun(0.0)
    assert cost.now(1) == pytest.approx(0.011), "nobody measured it"
    cost.saw(8, 1, 0, {"plan": 9.0, "propose": 9.0, "forward": 0.015, "deliver": 0.001})
    assert cost.now(8) == pytest.approx(0.016)


@pytest.mark.parametrize("pace", [1.0, 3.0, 0.35])
def test_what_a_step_takes_without_drafts_goes_with_the_machine(pace: float) -> None:
    """Though none is seen, and one in thirty is held up."""
    rows = {1: 0.0088, 2: 0.0090, 5: 0.0096, 9: 0.0110, 16: 0.0135}
    cost, dice = CostModel(list(rows), list(rows.values())), random.Random(3)
    for _ in range(2000):
        chosen = dice.choice((2, 5, 9, 16))
        held_up = dice.uniform(2, 10) if dice.random() < 0.03 else 1.0
        saw(cost, chosen, rows[chosen] * pace * held_up * dice.lognormvariate(0, 0.05))
    assert cost.now(1) == pytest.approx(0.0088 * pace, rel=0.3)


def test_an_estimate_is_unsure_once_the_pace_is_another_than_that_of_the_last_plain_step() -> None:
    cost = CostModel([1, 5], [0.01, 0.02])
    saw(cost, 5, 0.02)
    assert not cost.unsure, "no step without drafts was timed"
    cost.begun(0.011)
    unsure = []
    for rows, seconds, times in ((5, 0.02, 1), (5, 0.06, 50), (1, 0.03, 2)):
        saw(cost, rows, seconds, times)
        unsure.append(cost.unsure)
    assert unsure == [False, True, False]


def test_what_is_seldom_seen_is_learnt_from_as_well_as_what_is_always() -> None:
    """So one step of a size that was held up is soon forgotten."""
    cost = CostModel([1, 2, 4], [0.002, 0.0022, 0.003])
    saw(cost, 1, 0.002, 30)
    saw(cost, 3, 0.025, 3)
    saw(cost, 1, 0.002, 40)
    for _ in range(8):
        saw(cost, 1, 0.002, 30)
        saw(cost, 3, 0.0026)
    assert cost.now(3) == pytest.approx(0.0026, rel=0.25)


def test_what_was_held_up_is_not_learnt_from_more_often_than_it_happens() -> None:
    """One step in a hundred waits for others, which takes a third of all time."""
    cost, rng = CostModel([1], [0.0002]), random.Random(1)
    for _ in range(20_000):
        saw(cost, 1, 0.01 if rng.random() < 0.01 else 0.0002)
    assert cost.now(1) < 0.00025
