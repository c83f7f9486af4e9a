"""What takes time and may bring nothing is done as often as that pays, and else for a small share of the time."""

from __future__ import annotations

import pytest

from foresay.spec.budget.pauses import DRAFTING, NOTHING_DRAFTED, Intervals


def run(intervals: Intervals, steps: int, seconds: float, brought: float = 0.0, share: float = DRAFTING) -> list[int]:
    """So many steps of 1 ms; the ones in which it was done, which takes so many seconds."""
    done = []
    for step in range(steps):
        if intervals.due():
            done.append(step)
            intervals.took(seconds, 0.001, brought, share)
    return done


def test_what_costs_next_to_nothing_is_done_at_every_step() -> None:
    assert run(Intervals(), 100, 0.000002) == list(range(100))


@pytest.mark.parametrize("brought", [0.0, -0.1])
@pytest.mark.parametrize("share", [DRAFTING, NOTHING_DRAFTED])
def test_in_vain_it_takes_its_share_of_the_time(share: float, brought: float) -> None:
    intervals = Intervals()
    run(intervals, 300, 0.0003, brought, share)
    assert 0.0003 * len(run(intervals, 3000, 0.0003, brought, share)) == pytest.approx(3.0 * share, rel=0.2)


@pytest.mark.parametrize(("again", "done"), [("brings", [0, 1, 2]), ("begin", [0, 2])])
def test_something_right_and_another_text_begin_again(again: str, done: list[int]) -> None:
    intervals = Intervals()
    run(intervals, 3000, 0.0003)
    if again == "brings":
        while not intervals.due():
            pass
        intervals.took(0.0003, 0.001, 8.0, DRAFTING)
    else:
        intervals.begin()
    assert run(intervals, 3, 0.0003) == done


def test_short_texts_one_after_the_other_do_not_take_much_more() -> None:
    intervals, done = Intervals(), 0
    for _ in range(200):
        intervals.begin()
        done += len(run(intervals, 50, 0.0001))
    assert 0.0001 * done / (200 * 50 * 0.001) < 0.015


def test_a_first_time_that_was_slow_is_forgotten() -> None:
    """Code and weights are cold in it."""
    intervals = Intervals()
    assert intervals.due()
    intervals.took(0.02, 0.001, 0.0, DRAFTING)
    assert len(run(intervals, 20_000, 0.0002)) > 400


def test_what_brings_more_than_it_takes_is_done_at_every_step() -> None:
    assert run(Intervals(), 100, 0.0005, brought=1.0) == list(range(100))


@pytest.mark.parametrize(("brought", "pays"), [(4.0, True), (0.25, False)])
def test_what_brings_something_every_fourth_time_is_done_as_often_as_that_pays(brought: float, pays: bool) -> None:
    """Four tokens in four times are worth a quarter of a step each, and a quarter of one is not."""
    intervals, count = Intervals(), 0
    for _ in range(1000):
        if intervals.due():
            count += 1
            intervals.took(0.00025, 0.001, 0.0 if count % 4 else brought, DRAFTING)
    assert count > 950 if pays else count < 200
