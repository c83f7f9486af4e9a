"""What takes time and may bring nothing is done as often as that pays, and else for a small share of the time."""

from __future__ import annotations

import pytest

from foresay.spec.budget.turns import Turns


def run(turns: Turns, steps: int, seconds: float, brought: float = 0.0) -> list[int]:
    """So many steps of 1 ms; the ones in which it was done, which takes so many seconds."""
    done = []
    for step in range(steps):
        if turns.due():
            done.append(step)
            turns.took(seconds, 0.001, brought)
    return done


def test_what_costs_next_to_nothing_is_done_at_every_step() -> None:
    assert run(Turns(0.005), 100, 0.000002) == list(range(100))


@pytest.mark.parametrize("brought", [0.0, -0.1])
@pytest.mark.parametrize("share", [0.005, 0.002])
def test_in_vain_it_takes_its_share_of_the_time(share: float, brought: float) -> None:
    turns = Turns(share)
    run(turns, 300, 0.0003, brought)
    assert 0.0003 * len(run(turns, 3000, 0.0003, brought)) == pytest.approx(3.0 * share, rel=0.2)


def test_something_right_brings_it_back_at_once() -> None:
    turns = Turns(0.002)
    run(turns, 3000, 0.0003)
    while not turns.due():
        pass
    turns.took(0.0003, 0.001, 8.0)
    assert run(turns, 3, 0.0003) == [0, 1, 2]


@pytest.mark.parametrize(("seconds", "done"), [(0.00001, [0, 2, 6, 14]), (0.0003, [15, 46, 108, 232])])
def test_with_another_text_it_begins_again_the_sooner_the_less_it_takes(seconds: float, done: list[int]) -> None:
    turns = Turns(0.002)
    run(turns, 3000, seconds)
    turns.begin()
    assert run(turns, 240, 0.0003)[:4] == done


def test_short_texts_one_after_the_other_do_not_take_much_more() -> None:
    turns, done = Turns(0.005), 0
    for _ in range(200):
        turns.begin()
        done += len(run(turns, 50, 0.0001))
    assert 0.0001 * done / (200 * 50 * 0.001) < 0.015


def test_a_first_time_that_was_slow_is_forgotten() -> None:
    """Code and weights are cold in it."""
    turns = Turns(0.005)
    assert turns.due()
    turns.took(0.02, 0.001)
    assert len(run(turns, 20_000, 0.0002)) > 400


def test_what_brings_more_than_it_takes_is_done_at_every_step() -> None:
    turns = Turns(0.002)
    turns.took(0.0005, 0.001, 16.0)
    assert run(turns, 100, 0.0005, brought=1.0) == list(range(100))


@pytest.mark.parametrize(("brought", "pays"), [(8.0, True), (0.25, False)])
def test_what_brings_something_every_fourth_time_is_done_as_often_as_that_pays(brought: float, pays: bool) -> None:
    """Eight tokens in four times are worth more than a quarter of a step each, and a quarter of one is not."""
    turns, count = Turns(0.005), 0
    for _ in range(2000):
        if turns.due():
            count += 1
            turns.took(0.00025, 0.001, 0.0 if count % 4 else brought)
    assert count > 1900 if pays else count < 200
