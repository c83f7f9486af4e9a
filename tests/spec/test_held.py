"""How long a choice holds, when models are left out of it, and what is remembered of one."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from spec.budget import StepCost
from spec.budget.budget import Budget
from spec.budget.cost import DraftCost
from spec.budget.held import Held
from spec.budget.members import Member
from spec.budget.mixed import Mixed
from spec.budget.ways import Offer, Taken
from spec.budget.weigh import weigh
from spec.sequence import Sequence
from spec.step import Verdict, Work
from spec.trace import StepTrace
from spec.tree import ROOT_ONLY, DraftTree, TreeShape
from tests.drafters.test_combined import LOOKED, MODEL, Parrot, record, sequence


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Whenever ways are weighed, the models that are."""
    calls: list[list[str]] = []

    def counting(offers: list[Offer], *args: Any, **more: Any) -> list[Taken]:
        calls.append([name for offer in offers for name in offer.models])
        return weigh(offers, *args, **more)

    monkeypatch.setattr("spec.budget.budget.weigh", counting)
    return calls


class Picky(Parrot):
    """Says its tree for one sequence alone."""

    def propose(self, sequences: Many[Sequence], shapes: Many[TreeShape]) -> list[DraftTree]:
        return [self.tree if one.id == "s" else DraftTree.chain([7], self.name) for one in sequences]


def model(seconds: float = 0.1) -> Member:
    return Member.model(Parrot("model", MODEL), DraftCost(seconds, 0.1))


def came(
    one: Sequence, shape: TreeShape, tree: DraftTree, tokens: list[int], accepted: int
) -> tuple[StepTrace, list[Verdict]]:
    """A step of this shape in which these tokens came."""
    one.tokens.extend(tokens)
    trace = StepTrace(
        number=0, rows=len(tree), sequences=1, prefill_rows=0, drafted=0, accepted=accepted, emitted=0, seconds={}
    )
    depths = tree.depths.tolist()[1:]
    return trace, [Verdict(Work(one, 0, shape), tree, emitted=tokens, accepted=accepted, depths=depths)]


def test_where_nothing_is_found_a_choice_holds_for_four_steps_of_the_same_sequences(weighed: list[list[str]]) -> None:
    budget, one = Budget([model()], StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    shapes = [budget.plan([one])[0] for _ in range(8)]
    assert len(weighed) == 2
    assert all(shape == shapes[0] for shape in shapes[:4])
    assert shapes[0].levels > 0
    budget.plan([replace(one, id="other")])
    assert len(weighed) == 3


def test_a_choice_does_not_outlive_a_draft_that_was_wrong(weighed: list[list[str]]) -> None:
    budget, one = Budget([model()], StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    (shape,) = budget.plan([one])
    budget.stepped(*came(one, shape, MODEL, [3, 5, 9], 2))
    (shape,) = budget.plan([one])
    assert len(weighed) == 1, "it was right"
    budget.stepped(*came(one, shape, MODEL, [9], 0))
    budget.plan([one])
    assert len(weighed) == 2


def test_of_several_sequences_one_that_was_right_is_enough(weighed: list[list[str]]) -> None:
    budget, one = Budget([model()], StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    other = replace(one, id="other", tokens=[1, 7])
    shapes = budget.plan([one, other])
    trace, right = came(one, shapes[0], MODEL, [3, 9], 1)
    _, wrong = came(other, shapes[1], MODEL, [9], 0)
    budget.stepped(trace, [*right, *wrong])
    budget.plan([one, other])
    assert len(weighed) == 1
    budget.plan([other, one])
    assert len(weighed) == 2, "these are others"


def test_while_nobody_drafts_a_step_is_not_planned_anew() -> None:
    budget, one = Budget([model(seconds=50.0)], StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    other, whys = replace(one, id="other", speculate=False), []
    for _ in range(40):
        mine, others = budget.plan([one, other])
        assert isinstance(mine, Mixed)
        assert (mine.levels, others) == (0, ROOT_ONLY)
        assert budget.why is mine.why
        assert budget.choice == "none"
        whys.append(mine.why)
        budget.stepped(*came(one, mine, DraftTree.chain([7]), [9], 0))
    reused = sum(why is before for before, why in pairwise(whys))
    assert 32 <= reused <= 36, "behind 4 steps, 7, 13, 13 .., it is, and where as much is saved as asking may lose"
    assert budget.members["model"].asked < 0.7, "it is counted who took part, repeated or not"


def test_models_that_are_not_worth_it_are_left_out_for_ever_more_steps(weighed: list[list[str]]) -> None:
    members = [Member.looking(Parrot("looked", LOOKED)), model(seconds=50.0)]
    budget, one = Budget(members, StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    shapes = [budget.plan([one])[0] for _ in range(90)]
    assert weighed.count(["model"]) == len(weighed)
    assert 8 <= len(weighed) <= 12, "behind 4 steps, 7, 13, 13 .., and where as much is saved as asking may lose"
    assert {shape.levels for shape in shapes} == {2}, "what is found is drafted all the same"
    assert isinstance(shapes[-1], Mixed)
    assert shapes[-1].why is not None
    assert "model" in {way.model for way in shapes[-1].why.ways}, "and it is told what they were weighed as"


def test_models_are_weighed_again_once_time_is_worth_less(weighed: list[list[str]]) -> None:
    """Copying is fast, so a model's draft is dear; when it ends, as much time is worth fewer tokens."""
    looked = Parrot("looked", LOOKED)
    members = [Member.looking(looked), Member.model(Parrot("model", MODEL), DraftCost(0.45, 0.1))]
    budget, one = Budget(members, StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    while one.output_length < 60:
        (shape,) = budget.plan([one])
        budget.stepped(*came(one, shape, LOOKED, [3, 5, 7], 2))
    looked.tree, steps = DraftTree.chain([7]), len(weighed)
    asked = []
    for _ in range(8):
        (shape,) = budget.plan([one])
        asked.append(shape.levels)
        budget.stepped(*came(one, shape, DraftTree.chain([7]), [9], 0))
    assert asked[:2] == [0, 0], "as long as copying is expected to go on it is not worth it"
    assert asked[-1] > 0
    assert len(weighed) <= steps + 4


def test_what_was_found_in_one_step_is_no_choice_of_the_next() -> None:
    """Nobody drafts; then something is found, beside which models are left out; then nothing is found again."""
    looked = Parrot("looked", DraftTree.chain([7]))
    budget = Budget([Member.looking(looked), model(seconds=50.0)], StepCost([1, 64], [1.0, 1.0]), timed=False)
    one, drafted = sequence(), []
    for step in range(60):
        looked.tree = LOOKED if step % 3 == 2 else DraftTree.chain([7])
        (shape,) = budget.plan([one])
        drafted.append(shape.levels)
    assert drafted == [0, 0, 2] * 20


def test_models_that_are_worth_it_are_weighed_at_every_step_that_finds_more_than_a_little(
    weighed: list[list[str]],
) -> None:
    members = [Member.looking(Parrot("looked", LOOKED)), model()]
    budget, one = Budget(members, StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    for _ in range(20):
        budget.plan([one])
    assert weighed == [["model"]] * 20


def test_a_pinned_shape_leaves_nobody_out(weighed: list[list[str]]) -> None:
    members = [Member.looking(Parrot("looked", LOOKED)), model(seconds=50.0)]
    budget = Budget(members, StepCost([1, 64], [1.0, 1.0]), TreeShape.chain(2), timed=False)
    one = sequence()
    for _ in range(20):
        budget.plan([one])
        assert budget.why is not None
        assert "model" in {way.model for way in budget.why.ways}
    assert not weighed, "nor is it weighed how much"


def test_the_pace_of_two_is_what_both_bring(weighed: list[list[str]]) -> None:
    """One copies, of the other nothing is found: what is expected of one is not counted for the other."""
    looked = Picky("looked", LOOKED)
    budget, one = Budget([Member.looking(looked)], StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    other = replace(one, id="other", tokens=[1, 7])
    for _ in range(30):
        shapes = budget.plan([one, other])
        trace, first = came(one, shapes[0], LOOKED, [3, 5, 7], 2)
        _, second = came(other, shapes[1], DraftTree.chain([7]), [9], 0)
        budget.stepped(trace, [*first, *second])
    budget.plan([one, other])
    assert budget._pace == pytest.approx(3.0 + 1.0, rel=0.02)


def test_a_choice_does_not_outlive_its_sequence(weighed: list[list[str]]) -> None:
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


def test_no_tree_is_offered_before_the_chain_was_tried_three_times() -> None:
    member = model()
    own = record("", member)
    for _ in range(3):
        assert own.expected(6).tree is None
        own.learn(DraftTree.chain([1, 2], "model"), [2], 1)
    assert own.expected(6).tree is not None


@pytest.mark.parametrize(("again", "steps"), [(0, 3), (1, 3), (2, 6), (3, 12), (10**9, 12)])
def test_what_no_model_is_worth_it_in_holds_for_longer_and_longer(again: int, steps: int) -> None:
    plain = Taken("", (0,), (0,), 1.0, 1.0)
    assert Held.of(["a"], [plain], {}, 1.0, 0.5, again).steps == steps


def test_but_not_while_time_is_getting_cheaper_and_a_model_may_soon_be_worth_it() -> None:
    plain = Taken("", (0,), (0,), 1.0, 1.0)
    assert Held.of(["a"], [plain], {}, 3.0, 1.5, 3).steps == 3, "at the pace without drafts it is worth it"
    assert Held.of(["a"], [plain], {}, 3.0, 0.5, 3).steps == 12, "it is not even then"
    found = Taken("", (2,), (0,), 3.0, 1.0)
    assert Held.of(["a"], [found, plain], {}, 3.0, 1.5, 3).steps == 12, "the pace is looked at in every step then"


def test_what_a_model_caught_up_with_is_paid_once() -> None:
    read: list[int] = []

    class Behind(Parrot):
        def unread(self, sequence: Sequence) -> int:
            return 1 if read else 401

    member = Member.model(Behind("model", MODEL), DraftCost(0.1, 0.1, 0.01))
    budget, one = Budget([member], StepCost([1, 64], [1.0, 1.0]), timed=False), sequence()
    seconds = []
    for _ in range(3):
        budget.plan([one])
        assert budget.why is not None
        seconds.append(budget.why.ways[0].seconds)
        read.append(401)
    assert seconds[0] > 4.0 > 2.0 > seconds[1] == seconds[2]


def test_a_pinned_shape_is_repeated_too_where_nothing_is_found() -> None:
    budget = Budget([model()], StepCost([1, 64], [1.0, 1.0]), TreeShape.chain(2), timed=False)
    one, whys = sequence(), []
    for _ in range(40):
        (shape,) = budget.plan([one])
        assert shape.levels == 2
        whys.append(budget.why)
    assert sum(why is before for before, why in pairwise(whys)) >= 28


def test_passages_are_told_apart_by_what_lies_between_them() -> None:
    looked = Parrot("looked", LOOKED)
    budget = Budget([Member.looking(looked)], StepCost([1, 64], [1.0, 1.0]), timed=False)
    one = replace(sequence(), limit=10_000)
    for _ in range(60):
        for step in range(12):
            looked.tree = LOOKED if step < 4 else DraftTree.chain([7])
            (shape,) = budget.plan([one])
            right = shape.levels > 0
            budget.stepped(*came(one, shape, looked.tree, [3, 5, 7] if right else [9], 2 * right))
    assert budget._timing._stretch == pytest.approx(8.0, abs=0.5)
