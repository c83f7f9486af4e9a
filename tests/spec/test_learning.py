"""From which steps a budget learns, and what it makes of texts that end, tries and pauses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foresay.spec.budget.guard import Guard
from foresay.spec.budget.members import Member
from foresay.spec.budget.plan import NO_PLAN
from foresay.spec.names import NONE
from foresay.spec.tree import DraftTree, TreeShape
from tests.drafters.test_combined import MODEL, Parrot, sequence
from tests.spec.test_planning import NUMBERS, budget_of, came, model


def test_what_is_pinned_is_not_paused_even_if_it_loses() -> None:
    """Plain steps in between, in which the model could not draft, show that it does."""
    budget, one = budget_of(model(), timed=True, pinned=TreeShape.chain(2)), sequence()
    one.limit = 10_000
    for _ in range(60):
        (plan,) = budget.plan([one])
        assert plan.shape.widths == (1, 1)
        budget.stepped(*came(one, plan, MODEL, [9], 0, propose=9.0, forward=1.0))
        for _ in range(2):
            budget.plan([one])
            budget.stepped(*came(one, NO_PLAN, DraftTree.chain([one.tokens[-1]]), [9], 0, forward=1.0))
    assert budget.guard.speed_up == 0.0, "only what is measured is shown as measured"


@pytest.mark.parametrize("room", [64, 1000], ids=["limit", "stop"])
def test_a_new_text_is_looked_at_soon_wherever_the_one_before_it_ended(room: int) -> None:
    """Its last step may be one in which it could draft no more."""
    budget, firsts = budget_of(Member.looking(Parrot("looked", DraftTree.chain([7]))), timed=True), list[int]()
    for text in range(12):
        one, looked = replace(sequence(), id=f"{text}", tokens=[1, 7], limit=2 + room), []
        for step in range(64):
            (plan,) = budget.plan([one])
            looked += [step] * budget.looks
            budget.stepped(*came(one, plan, DraftTree.chain([7]), [9], 0, plan=0.05 * budget.looks, forward=1.0))
        budget.ended(one)
        firsts.append(looked[0])
    assert max(firsts) < 4


def test_what_a_late_try_takes_is_learnt_whichever_step_it_is_in() -> None:
    for _ in range(4):
        budget, one = budget_of(model(seconds=50.0), timed=True), sequence()
        one.limit, budget.members["model"].tries, budget.members["model"].saved = 10_000, 100, 1e9
        (plan,) = budget.plan([one])
        assert plan.shares and budget.why is not None and budget.why.probe
        budget.stepped(*came(one, plan, MODEL, [9], 0, propose=0.5, forward=1.0))
        assert budget.members["model"].costs.now().start < 10.0
        next(NUMBERS)


def test_one_of_four_plain_steps_is_learnt_from_and_stands_for_all() -> None:
    budget, one = budget_of(model(seconds=50.0), timed=True), sequence()
    one.limit, budget.members["model"].tries, seen = 10_000, 100, list[int]()

    class Seen(Guard):
        def saw(self, *args: Any) -> None:
            seen.append(args[-1])
            super().saw(*args)

    budget.guard = Seen()
    for _ in range(200):
        (plan,) = budget.plan([one])
        budget.stepped(*came(one, plan, DraftTree.chain([7]), [9], 0, plan=0.3 * budget.looks, forward=1.0))
    assert sum(seen) == pytest.approx(200, abs=24) and len(seen) < 80


def test_a_pause_lasts_for_steps_that_decode() -> None:
    """A step that only reads a prompt is none."""
    budget = budget_of(model(), timed=True)
    budget.plan([sequence()])
    for number in range(400):
        if not budget.guard.paused("model"):
            drafter = "model" if number % 4 > 1 else NONE
            budget.guard.saw(drafter, 1, 1.0, {"forward": 9.0 if drafter == "model" else 1.0}, tried=False)
    assert budget.guard.paused("model")
    for _ in range(1000):
        budget.plan([])
    assert budget.guard.paused("model") and not budget.guard.now
