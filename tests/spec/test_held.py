"""How long a choice holds, and what is remembered of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec.budget import StepCost
from spec.budget.budget import Budget
from spec.budget.cost import DraftCost
from spec.budget.members import Member
from spec.budget.weigh import weigh
from spec.tree import DraftTree
from tests.drafters.test_combined import LOOKED, MODEL, Parrot, record, sequence


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever ways are weighed."""
    calls: list[int] = []

    def counting(*args: object, **more: object) -> object:
        calls.append(1)
        return weigh(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("spec.budget.budget.weigh", counting)
    return calls


def model() -> Member:
    return Member.model(Parrot("model", MODEL), DraftCost(0.1, 0.1))


def test_where_nothing_is_found_a_choice_holds_for_four_steps_of_the_same_sequences(weighed: list[int]) -> None:
    budget, one = Budget([model()], StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    shapes = [budget.plan([one])[0] for _ in range(8)]
    assert len(weighed) == 2
    assert all(shape == shapes[0] for shape in shapes[:4])
    assert shapes[0].levels > 0
    budget.plan([replace(one, id="other")])
    assert len(weighed) == 3


def test_where_something_is_found_every_step_is_weighed(weighed: list[int]) -> None:
    members = [Member.looking(Parrot("looked", LOOKED)), model()]
    budget, one = Budget(members, StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    for _ in range(5):
        budget.plan([one])
    assert len(weighed) == 5


def test_a_choice_does_not_outlive_its_sequence(weighed: list[int]) -> None:
    budget, one = Budget([model()], StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    budget.plan([one])
    budget.ended(one)
    budget.plan([one])
    assert len(weighed) == 2


def test_what_is_expected_of_a_model_is_remembered_until_any_sequence_shows_more_of_it() -> None:
    member = model()
    own, other = record("a", member), record("b", member)
    before = own.expected(6)
    assert own.expected(6) is before
    assert len(own.expected(3).chain) == 3
    for _ in range(20):
        other.learn(DraftTree.chain([1, 2, 3], "model"), [9], 0)
    assert own.expected(6).chain[0] < before.chain[0]
