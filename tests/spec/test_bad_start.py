"""A start that met a busy machine is forgotten within 30 steps, and what choosing takes is part of the choice."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean

import pytest

from foresay.spec.budget.cost import DraftCost
from tests.spec.machine import Machine, Prices

#: Steps after which no measurement of the start may rule any more.
SOON = 30


def prices(by_rows: Callable[[int], float], *draft: float) -> Prices:
    return Prices([(rows, by_rows(rows)) for rows in (1, 2, 3, 5, 6, 8, 9, 12, 16, 32, 64)], DraftCost(*draft))


#: A small model whose rows cost little; one whose drafts are dear; steps of a fifth of a millisecond; rows in groups.
CHEAP = prices(lambda rows: 0.008 + 0.0003 * rows + 0.0004 * max(0, rows - 8), 0.00015, 0.0003, 0.00003, 0.0001)
DEAR = prices(lambda rows: 0.008 + 0.0015 * rows, 0.0002, 0.003, 0.0001, 0.0002)
SHORT = prices(lambda rows: 0.0002 + 0.00002 * rows, 0.00003, 0.00008, 0.000005, 0.00003)
STAIRS = prices(lambda rows: 0.03 * (1 if rows <= 5 else 1.3 if rows <= 8 else 1.8), 0.0005, 0.002, 0.0001, 0.0004)


@pytest.mark.parametrize("right", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("true", [CHEAP, DEAR, SHORT, STAIRS], ids=["cheap", "dear", "short", "stairs"])
def test_a_start_on_a_busy_machine_is_corrected_within_30_steps(true: Prices, right: float) -> None:
    """From then on plans bring as much in their time as after a quiet start: each cost was up to three times off."""
    quiet = Machine(true, right)
    quiet.run(SOON + 70)
    for seed in range(3):
        busy = Machine(true, right, true.wrong(random.Random(f"{seed}")))
        busy.run(SOON + 70)
        assert busy.rate(SOON) > 0.95 * quiet.rate(SOON), seed


@pytest.mark.parametrize("right", [0.2, 0.5])
@pytest.mark.parametrize("true", [DEAR, SHORT], ids=["dear", "short"])
def test_where_a_model_does_not_pay_hardly_anything_is_lost_whatever_the_start_was(true: Prices, right: float) -> None:
    for seed in range(3):
        busy = Machine(true, right, true.wrong(random.Random(f"{seed}")))
        busy.run(SOON + 150)
        assert busy.rate(SOON) > 0.99 / true.curve().seconds(1)


def test_one_measurement_that_is_a_hundred_times_off_does_not_rule_for_long() -> None:
    """A model measured at 30 ms a draft at the start would never draft."""
    off = Prices(CHEAP.steps, DraftCost(0.03, 0.0003, 0.00003, 0.0001))
    machine, quiet = Machine(CHEAP, 0.8, off), Machine(CHEAP, 0.8)
    for each in (machine, quiet):
        each.run(SOON + 70)
    assert machine.rate(SOON) > 0.9 * quiet.rate(SOON)


@pytest.mark.parametrize("known", [True, False], ids=["first level", "nothing"])
@pytest.mark.parametrize(("true", "right"), [(DEAR, 0.8), (SHORT, 0.8), (STAIRS, 0.5)], ids=["dear", "short", "stairs"])
def test_a_part_that_was_measured_as_0_is_learnt(true: Prices, right: float, known: bool) -> None:
    """A deeper draft took no longer at the start than one level did, or none was timed."""
    draft = DraftCost(true.draft.start + true.draft.level) if known else DraftCost()
    machine, quiet = Machine(true, right, Prices(true.steps, draft)), Machine(true, right)
    for each in (machine, quiet):
        each.run(SOON + 120)
    assert machine.rate(SOON) > 0.93 * quiet.rate(SOON)


@pytest.mark.parametrize("right", [0.2, 0.8])
def test_on_short_steps_choosing_is_nearly_free(right: float) -> None:
    """A choice takes a fifth of a millisecond, as a step does: it is kept for some steps."""
    shares, rates = [], []
    for seed in range(6):
        machine = Machine(SHORT, right, choosing=0.0002)
        machine.dice.seed(seed)
        machine.run(400)
        chosen, spent = machine.chosen, machine.spent
        machine.run(1000)
        shares.append((machine.chosen - chosen) / (machine.spent - spent))
        rates.append(machine.rate(400))
    assert fmean(shares) < 0.02
    assert fmean(rates) > 0.9 * max(best_rate(SHORT, right), 1 / SHORT.curve().seconds(1))


def best_rate(true: Prices, right: float) -> float:
    """With choosing for nothing."""
    machine = Machine(true, right)
    machine.run(600)
    return machine.rate(200)


def test_on_long_steps_every_step_is_chosen() -> None:
    """But for those that are plain, to be measured."""
    machine = Machine(STAIRS, 0.5, choosing=0.00005)
    machine.run(200)
    assert machine.chosen == pytest.approx((200 - machine.alone) * 0.00005)
    assert 0 < machine.alone < 20
