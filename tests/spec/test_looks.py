"""How often whoever looks things up is asked."""

from __future__ import annotations

import pytest

from spec.budget.looks import Looks


def run(looks: Looks, steps: int, plan: float, right: bool = False) -> list[int]:
    """So many steps of 1 ms, of which looking takes ``plan`` where it is done; the steps in which it was."""
    looked = []
    for step in range(steps):
        if looks.due():
            looked.append(step)
        looks.saw({"plan": plan if looks.now else 0.0, "forward": 0.001}, right and looks.now)
    return looked


def test_what_costs_next_to_nothing_is_asked_at_every_step() -> None:
    assert run(Looks(), 100, plan=0.00001) == list(range(100))


def test_in_vain_it_takes_a_small_share_of_the_time() -> None:
    looks = Looks()
    run(looks, 200, plan=0.0003)
    spent = 0.0003 * len(run(looks, 1000, plan=0.0003))
    assert spent / (1.0 + spent) < 0.025


@pytest.mark.parametrize("anew", ["right", "begin"])
def test_something_right_and_another_text_begin_anew(anew: str) -> None:
    looks = Looks()
    run(looks, 200, plan=0.0003)
    if anew == "right":
        while not looks.due():
            looks.saw({"plan": 0.0, "forward": 0.001}, right=False)
        looks.saw({"plan": 0.0003, "forward": 0.001}, right=True)
    else:
        looks.begin()
    assert run(looks, 4, plan=0.0003) == [0, 1, 2, 3]


def test_what_is_right_is_asked_at_every_step() -> None:
    assert run(Looks(), 100, plan=0.0005, right=True) == list(range(100))
