"""What drafts bring is measured beside plain steps, and a drafter that loses is paused, whatever was expected of it."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from foresay.spec.budget.guard import WINDOW, Average, Guard
from foresay.spec.names import NONE
from tests.spec.machine import Machine
from tests.spec.test_bad_start import CHEAP, DEAR, STAIRS, prices

#: Rows that cost little, so that much is drafted.
ROWS = prices(lambda rows: 0.0036 + 0.0003 * rows, 0.0002, 0.0006, 0.00003, 0.0001)


def run(guard: Guard, steps: int, tokens: float, took: float, noise: float = 0.05, name: str = "head") -> list[str]:
    """Steps of a drafter that brings so many tokens in the time of so many plain steps; who drafted in each, and what
    the guard had to say."""
    dice, drafters = random.Random(3), []
    for _ in range(steps):
        drafter = NONE if guard.due() or guard.paused(name) else name
        plain = drafter == NONE
        emitted = 1 if plain else int(tokens) + (dice.random() < tokens % 1)
        seconds = (1.0 if plain else took) * dice.lognormvariate(0, noise)
        guard.saw(drafter, 1, emitted, {"forward": seconds, "plan": 0.0}, tried=False)
        drafters.append(guard.news or drafter)
    return drafters


def test_what_no_estimate_holds_is_measured_and_ends_drafting() -> None:
    """On a small model host work around a head may cost more than the head."""
    machine = Machine(ROWS, 0.5, hidden=0.0035)
    machine.run(1500)
    plain = 1.0 / ROWS.curve().seconds(1)
    assert fmean(rate for rate, choice in zip(machine.rates, machine.choices, strict=True) if choice != NONE) < plain
    assert machine.rate(100) > 0.98 * plain
    (first, *_) = machine.news
    assert any("model is paused for" in news and "as measured, it brings" in news for news in machine.news), first


@pytest.mark.parametrize(("true", "right"), [(CHEAP, 0.8), (STAIRS, 0.8), (DEAR, 0.9)], ids=["cheap", "stairs", "dear"])
def test_windows_of_plain_steps_lose_about_one_percent_where_drafts_pay(true, right) -> None:
    machine = Machine(true, right)
    machine.run(3000)
    assert not any("paused" in news for news in machine.news)
    drafted = fmean(rate for rate, choice in zip(machine.rates, machine.choices, strict=True) if choice != NONE)
    assert machine.rate(500) > 0.98 * drafted
    guard = machine.budget.guard
    assert guard.plain_seconds(1) == pytest.approx(true.curve().seconds(1), rel=0.1)
    assert 0.0 < guard.spread < 0.2


@pytest.mark.parametrize(("tokens", "took"), [(2.1, 1.4), (1.5, 1.2), (7.0, 2.0)])
def test_the_speed_up_is_what_it_was(tokens: float, took: float) -> None:
    """The interval holds it, in 9 of 10 runs."""
    right = 0
    for seed in range(20):
        guard = Guard()
        run(guard, 300 + seed, tokens, took)
        right += abs(guard.speed_up * took / tokens - 1.0) <= guard.spread
    assert right >= 18


def test_turns_grow_and_end_once_it_pays() -> None:
    guard = Guard()
    said = run(guard, 20_000, 1.6, 2.2)
    pauses = [int(news.split(" is paused for ")[1].split()[0]) for news in said if "paused" in news]
    assert len(pauses) >= 3
    assert pauses[1] > 1.5 * pauses[0]
    assert said.count("head") < 0.02 * len(said)
    run(guard, 8 * pauses[0], 2.4, 1.2)
    assert not guard.paused("head")
    assert run(guard, 200, 2.4, 1.2).count("head") > 180


def test_one_that_returns_nothing_is_paused() -> None:
    assert any("paused" in news for news in run(Guard(), 100, 1.0, 1.3))


def test_plain_steps_that_come_anyway_need_no_windows() -> None:
    guard = Guard()
    for number in range(400):
        assert not guard.due()
        guard.saw("head" if number % 8 == 7 else NONE, 1, 1.0, {"forward": 1.0}, tried=True)
    assert guard.plain_seconds(1) == pytest.approx(1.0)


def test_a_window_is_of_whole_steps_in_a_row() -> None:
    guard, alone = Guard(), []
    for _ in range(200):
        alone.append(guard.due())
        guard.saw(NONE if alone[-1] else "head", 2, 2.0, {"forward": 1.0}, tried=False)
    begins = [at for at, one in enumerate(alone) if one and not alone[at - 1]]
    assert begins
    assert all(alone[at : at + WINDOW] == [True] * WINDOW and not alone[at + WINDOW] for at in begins[:-1])


def test_an_outlier_hardly_counts() -> None:
    average = Average()
    for _ in range(50):
        average.add(1.0)
    average.add(1000.0)
    assert average.mean < 1.05
