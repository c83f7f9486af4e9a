"""What is believed of a draft's chance, from nothing seen to much."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from spec.budget.cost import DraftCost, StepCost
from spec.budget.rates import OwnRates, Rates


def test_before_anything_was_seen_the_guess_holds() -> None:
    rates = OwnRates(Rates([0.3, 0.9]))
    assert [rates.chance(0), rates.chance(1)] == [0.3, 0.9]


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.95])
def test_what_is_seen_often_is_believed(truth: float) -> None:
    rng, all_of_them = random.Random(4), Rates([0.5])
    believed = []
    for _ in range(40):
        own = OwnRates(all_of_them)
        for _ in range(50):
            own.saw(0, rng.random() < truth)
        believed.append(own.chance(0))
    assert sum(believed) / len(believed) == pytest.approx(truth, abs=0.06)
    assert all_of_them.chances[0] == pytest.approx(truth, abs=0.08)


def test_a_sequence_is_taken_as_it_is_and_a_new_one_like_the_others() -> None:
    shared = Rates([0.5])
    for _ in range(30):
        OwnRates(shared).saw(0, True)
    odd = OwnRates(shared)
    for _ in range(20):
        odd.saw(0, False)
    assert odd.chance(0) < 0.35
    assert OwnRates(shared).chance(0) > 0.55


def test_a_change_is_seen_within_some_trials() -> None:
    own = OwnRates(Rates([0.5]))
    for _ in range(100):
        own.saw(0, True)
    assert own.chance(0) > 0.9
    for _ in range(25):
        own.saw(0, False)
    assert own.chance(0) < 0.5


def test_what_one_depth_shows_is_the_guess_of_the_next() -> None:
    rates = Rates([0.6, 0.6, 0.6], chained=True)
    for _ in range(30):
        rates.saw(0, False)
    assert rates.chances[0] < 0.1
    assert rates.chances[1] < 0.12
    assert rates.chances[2] < 0.14
    apart = Rates([0.6, 0.6, 0.6])
    apart.saw(0, False)
    assert apart.chances[1:] == [0.6, 0.6]


def test_what_is_hardly_known_is_read_hopefully() -> None:
    rates, sober = Rates([0.6], hope=1.0), Rates([0.6])
    hoped = []
    for _ in range(200):
        hoped.append(OwnRates(rates).chance(0) - OwnRates(sober).chance(0))
        rates.saw(0, False)
        sober.saw(0, False)
    assert hoped[0] == pytest.approx(0.245, abs=0.01), "the spread of four trials"
    assert all(later < sooner for sooner, later in pairwise(hoped))
    assert hoped[-1] < 0.02
    assert rates.held(0, 1.0) > sober.held(0, 1.0)


def test_steps_correct_the_curve_most_of_all_near_their_rows() -> None:
    cost = StepCost([1, 8, 64], [1.0, 1.0, 4.0])
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
    cost = StepCost([1, 8, 64], [1.0, 1.5, 4.0])
    for _ in range(30):
        cost.saw(1, 1, 0, 2.0)
        cost.saw(8, 8, 0, 3.0)
    after = cost.expected(64)
    assert after[1] == pytest.approx(2.0, rel=0.05)
    assert after[8] == pytest.approx(3.0, rel=0.05)
    assert after[64] > 5.75


def test_what_the_start_up_measured_is_soon_corrected_and_then_slowly() -> None:
    """How far the point of eight rows moves apart from the whole curve, in the first steps and a thousand later."""
    cost, draft = StepCost([1, 8, 64], [1.0, 2.0, 8.0]), DraftCost(0.1, 0.2)

    def moved() -> tuple[float, float]:
        step, drafting = cost.expected(8)[8], draft.seconds(2)
        cost.saw(8, 8, 0, 1.5 * step)
        draft.saw(2, 1.5 * drafting)
        return cost.expected(8)[8] / step, draft.seconds(2) / drafting

    first = moved()
    for _ in range(100):
        cost.saw(8, 8, 0, cost.expected(8)[8])
        draft.saw(2, draft.seconds(2))
    later = moved()
    assert first == pytest.approx((1.046, 1.046), abs=0.002)
    assert later == pytest.approx((1.030, 1.030), abs=0.002)


def test_chains_and_trees_cost_what_they_were_seen_to() -> None:
    cost = DraftCost(0.1, 0.2, 0.01, tree_level=0.3)
    assert cost.seconds(2, more=3) == pytest.approx(0.1 + 0.6 + 0.03)
    for _ in range(200):
        cost.saw(2, 1.0, more=3)
        cost.saw(2, 0.5)
    assert cost.seconds(2, more=3) == pytest.approx(1.0, rel=0.05)
    assert cost.seconds(2) == pytest.approx(0.5, rel=0.05)


def test_on_a_machine_that_is_faster_by_now_drafts_are_cheaper_too() -> None:
    cost = DraftCost(0.1, 0.2, 0.01, slower=0.5)
    assert cost.seconds(2, rested=10) == pytest.approx(0.3)
    assert cost.of_a_level() == pytest.approx(0.1)
    assert cost.of_a_token == pytest.approx(0.005)
    for _ in range(200):
        cost.saw(2, 0.4)
    assert cost.seconds(2) == pytest.approx(0.4, rel=0.02)


def test_one_step_that_was_held_up_hardly_counts() -> None:
    cost, draft = StepCost([1], [1.0]), DraftCost(0.1, 0.1)
    cost.saw(1, 1, 0, 1000.0)
    draft.saw(4, 1000.0)
    assert cost.expected(1)[1] < 1.05
    assert draft.seconds(4) < 0.53


def test_context_adds_to_a_step_and_more_to_more_rows() -> None:
    cost = StepCost([1, 2], [1.0, 1.0], context=[(1, 0.0011), (2, 0.0012)])
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
    cost = StepCost(rows, [rng.uniform(0.01, 0.05) for _ in rows], behind)
    for _ in range(50):
        own = rng.randrange(1, 20)
        cost.saw(own * sequences, own, 500, rng.uniform(0.01, 0.06))
    expected, most = cost.expected(64), 0.0
    for row, seconds in enumerate(cost.table(sequences, 700, 64)):
        most = max(most, expected[row] + cost.behind(row / sequences, 700))
        assert seconds == pytest.approx(most)
        assert type(seconds) is float


def test_what_context_adds_is_corrected_by_the_steps_behind_long_texts() -> None:
    """Four rows were read as four times as dear behind a context as they are."""
    cost = StepCost([1, 4], [0.01, 0.01], context=[(1, 1e-5), (4, 4e-5)])
    for turn in range(400):
        cost.saw(4 if turn % 2 else 1, 4 if turn % 2 else 1, 1000, 0.02)
        cost.saw(4 if turn % 2 else 1, 4 if turn % 2 else 1, 0, 0.01)
    assert cost.behind(1, 1000) == pytest.approx(0.01, rel=0.2)
    assert 0.008 < cost.behind(4, 1000) < 0.016
    assert cost.expected(4)[4] == pytest.approx(0.01, rel=0.2)


def test_who_rested_pays_for_what_was_written_meanwhile() -> None:
    cost = DraftCost(0.1, 0.2, 0.01)
    assert cost.seconds(3, rested=50) == pytest.approx(0.1 + 0.6 + 0.5)
