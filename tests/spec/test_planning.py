"""What a step is planned as: for several at once, with what must be caught up with, and when not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise

import numpy as np
import pytest

from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import GUESS, RESTING, Member, TextStats
from foresay.spec.budget.plan import NO_PLAN, Plan, Share
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence, VerifyResult
from foresay.spec.trace import StepTrace
from foresay.spec.tree import DraftTree, TreeShape
from tests.drafters.test_combined import LOOKED, MODEL, Parrot, sequence

FLAT = ([1, 64], [1.0, 1.0])


class Picky(Parrot):
    """Says its tree for one sequence alone."""

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        return [self.tree if one.id == "s" else DraftTree.chain([7], self.name) for one in sequences]


class Reader(Parrot):
    """Drafts one tree, and has 64 tokens to catch up with before the last one."""

    def unread(self, sequence: SequenceState) -> int:
        return 65


class Behind(Parrot):
    """Has read nothing of a long prompt."""

    def unread(self, sequence: SequenceState) -> int:
        return 10_000


class Chained(Parrot):
    """Says how often its chains come."""

    def chain_chances(self, sequence: SequenceState, levels: int) -> Sequence[float]:
        return [0.8**depth for depth in range(1, levels + 1)]


class Checking(Chained):
    """Goes on from what is found."""

    checks = True

    def check(self, sequence: SequenceState, found: DraftTree) -> None: ...


def model(seconds: float = 0.1, parrot: type[Parrot] = Parrot) -> Member:
    return Member.model(parrot("model", MODEL), DraftCost(seconds, 0.1, 0.01, deciding=1e-9))


def budget_of(*members: Member, timed: bool = False, pinned: TreeShape | None = None) -> Budget:
    return Budget(members, CostModel(*FLAT), pinned, timed=timed)


NUMBERS = count()  # of steps


def came(
    one: SequenceState, plan: Plan, tree: DraftTree, tokens: list[int], accepted: int, /, **seconds: float
) -> tuple[StepTrace, list[VerifyResult]]:
    """A step of this shape in which these tokens came."""
    one.tokens.extend(tokens)
    trace = StepTrace(
        number=next(NUMBERS),
        rows=len(tree),
        sequences=1,
        prefill_rows=0,
        drafted=len(tree) - 1,
        accepted=accepted,
        emitted=0,
        seconds=seconds,
    )
    scheduled = ScheduledSequence(one, 0, plan.shape, plan=plan)
    return trace, [VerifyResult(scheduled, tree, path=range(1, accepted + 1), emitted=tokens)]


def model_share(plan: Plan) -> Share:
    return next(share for share in plan.shares if share.drafter == "model")


def test_the_pace_of_two_is_what_both_bring() -> None:
    """One copies, of the other nothing is found."""
    budget, one = budget_of(Member.looking(Picky("looked", LOOKED))), sequence()
    other = replace(one, id="other", tokens=[1, 7])
    for _ in range(100):
        plans = budget.plan([one, other])
        trace, first = came(one, plans[0], LOOKED, [3, 5, 7], 2)
        _, second = came(other, plans[1], DraftTree.chain([7]), [9], 0)
        budget.stepped(trace, [*first, *second])
    assert sum(case.pace(1.0) for case in budget._texts.values()) == pytest.approx(3.0 + 1.0, rel=0.02)


def test_a_text_that_learns_before_it_is_weighed_has_the_pace_of_plain_steps() -> None:
    """One more among many that draft nothing."""
    budget, one = budget_of(model()), sequence()
    text = TextStats.begun(one, budget.members.values())
    _, (result,) = came(one, NO_PLAN, DraftTree.chain([7]), [9], 0)
    text.learn(result, 0.01)
    assert text.pace(0.01) == pytest.approx(100.0)


def test_a_pinned_shape_is_drafted_by_the_best_and_measures_the_others() -> None:
    shape = TreeShape.chain(2)
    budget = budget_of(Member.looking(Parrot("looked", LOOKED)), model(seconds=50.0), pinned=shape)
    for _ in range(20):
        (planned,) = budget.plan([sequence()])
        assert planned.shape.widths == shape.widths
        assert budget.choice == "looked"
        assert budget.why is not None
        assert [way.model for way in budget.why.ways] == ["", "model", ""]


def test_where_there_is_no_room_for_a_draft_none_is_planned() -> None:
    budget, one = budget_of(model()), sequence()
    assert budget.plan([one])[0].shape.levels
    one.limit = len(one.tokens) + 1
    assert budget.plan([one]) == [NO_PLAN]


def test_what_a_model_catches_up_with_makes_its_levels_no_dearer() -> None:
    """Its draft takes as long as expected of so many tokens, and a draft."""
    member = model(parrot=Reader)
    budget, one = budget_of(member, timed=True), sequence()
    one.limit, before = 1000, member.cost.seconds(2)
    for _ in range(30):
        (plan,) = budget.plan([one])
        took = member.cost.seconds(2, 2 + 64)
        budget.stepped(
            *came(one, plan, MODEL if plan.shares else DraftTree.chain([7]), [9], 0, propose=took, forward=1.0)
        )
    assert member.costs.now().seconds(2) == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("timed", [False, True])
def test_what_a_model_has_to_catch_up_with_is_part_of_its_price(timed: bool) -> None:
    """It is read once a text has gone on for as long, and no try is worth it."""
    member = model(parrot=Behind)
    budget, one = budget_of(member, timed=timed), sequence()
    one.limit, member.tries, drafted = 20_000, 100, []
    for _ in range(700):
        (plan,) = budget.plan([one])
        drafted.append(bool(plan.shares) or budget.guard.now)
        budget.stepped(*came(one, plan, DraftTree.chain([7]), [9], 0, plan=0.0001, forward=1.0))
    assert not any(drafted[:50])
    assert any(drafted[50:])


def test_a_model_that_was_not_the_best_for_long_is_at_rest() -> None:
    member = model(seconds=50.0)
    budget, one = budget_of(member), sequence()
    budget.plan([one])
    assert not member.resting
    for _ in range(RESTING):
        budget.plan([one])
    assert member.resting


def test_a_model_at_rest_is_cheaper_where_the_machine_has_become_faster() -> None:
    member = model(seconds=50.0)
    budget, one = budget_of(member, timed=True), sequence()
    one.limit = 1000
    for _ in range(300):
        (plan,) = budget.plan([one])
        budget.cost.saw(1, 1, 0, {"forward": 0.5})
        budget.stepped(*came(one, plan, DraftTree.chain([7]), [9], 0, plan=0.0, forward=0.5))
    assert member.costs.now().seconds(2) < 0.75 * member.cost.seconds(2)


def test_what_a_draft_takes_corrects_its_price() -> None:
    member = model()
    budget, one = budget_of(member, timed=True), sequence()
    one.limit = 1000
    for _ in range(200):
        (plan,) = budget.plan([one])
        budget.stepped(*came(one, plan, MODEL, [3, 6, 1], 2, propose=0.9, forward=1.0))
    assert member.costs.now().seconds(2, 2) == pytest.approx(0.9, rel=0.05)


def test_where_looking_is_dear_and_vain_a_step_without_drafts_is_not_planned_anew() -> None:
    """And it is again soon after another text has begun, at most some 3 % of the time later."""
    budget, one = budget_of(Member.looking(Parrot("looked", DraftTree.chain([7]))), model(50.0), timed=True), sequence()
    one.limit, whys = 10_000, []
    budget.members["model"].tries = 16  # or it would be tried first
    for _ in range(2000):
        (plan,) = budget.plan([one])
        assert (plan.shape.levels, plan.why, budget.choice) == (0, budget.why, "none")
        budget.stepped(*came(one, plan, DraftTree.chain([7]), [9], 0, plan=0.3, forward=1.0))
        whys.append(budget.why)
    repeated = [why is before for before, why in pairwise(whys)]
    assert sum(repeated[100:]) > 1800
    budget.ended(one)
    other = replace(one, id="other", tokens=[1, 7])
    assert any(budget.plan([other]) and budget.why is not whys[-1] for _ in range(12))


def test_a_step_in_which_no_text_may_draft_may_be_the_first() -> None:
    budget, one = budget_of(Member.looking(Parrot("looked", LOOKED)), timed=True), sequence()
    one.limit = len(one.tokens) + 1
    (plan,) = budget.plan([one])
    budget.stepped(*came(one, plan, DraftTree.chain([7]), [9], 0, plan=0.3, forward=1.0))
    assert plan is NO_PLAN and not budget.failed


@pytest.mark.parametrize("parrot", [Parrot, Chained])
def test_a_model_that_drafts_nothing_is_found_out(parrot: type[Parrot]) -> None:
    """In its first text, and from then on."""
    budget, nothing, tried = budget_of(model(parrot=parrot), timed=True), DraftTree.chain([7]), []
    for text in range(4):
        one = replace(sequence(), id=f"{text}", limit=10_000)
        for _ in range(400):
            (plan,) = budget.plan([one])
            tried.append(bool(plan.shares))
            budget.stepped(*came(one, plan, nothing, [9], 0, plan=0.0001, propose=0.05 * tried[-1], forward=1.0))
        budget.ended(one)
    assert not budget.failed and budget.members["model"].resting
    assert sum(tried[:400]) < 40 and sum(tried[400:]) < 40


@pytest.mark.parametrize("others", [0, 300])
def test_steps_in_which_no_text_may_draft_teach_nothing_of_looks(others: int) -> None:
    budget, one = budget_of(Member.looking(Parrot("looked", DraftTree.chain([7]))), timed=True), sequence()
    one.limit, looked = 10_000, 0
    for text, steps in ((one, 1000), (replace(one, id="other", speculate=False), others), (one, 500)):
        looked = 0
        for _ in range(steps):
            (plan,) = budget.plan([text])
            looked += budget.looks
            took = 0.3 if budget.looks and text is one else 0.003
            budget.stepped(*came(text, plan, DraftTree.chain([7]), [9], 0, plan=took, forward=1.0))
    assert looked < 20


def test_of_lookups_alone_what_is_found_is_weighed() -> None:
    parrot, one = Parrot("looked", DraftTree.chain([7])), sequence()
    budget = budget_of(Member.looking(parrot))
    for _ in range(20):
        (plan,) = budget.plan([one])
        assert not plan.shares
        budget.stepped(*came(one, plan, DraftTree.chain([7]), [9], 0))
    assert len(parrot.shapes) == 20
    parrot.tree = LOOKED
    (plan,) = budget.plan([one])
    assert plan.shape.levels > 0 and budget.choice == "looked"


@pytest.mark.parametrize("timed", [False, True])
def test_a_lookup_that_was_wrong_for_long_is_noticed_when_it_is_right(timed: bool) -> None:
    """Though its nodes are too unlikely to be drafted."""
    budget, one = budget_of(Member.looking(Parrot("looked", LOOKED)), timed=timed), sequence()
    one.limit, drafted = 10_000, 0
    for right in (False, True):
        for _ in range(400):
            (plan,) = budget.plan([one])
            drafted += bool(plan.shares) and right
            tree = LOOKED if plan.shares else DraftTree.chain([7])
            tokens = [3, 5, 7] if right else [9]
            emitted = tokens if plan.shares else tokens[:1]
            budget.stepped(*came(one, plan, tree, emitted, len(emitted) - 1, plan=0.001, forward=1.0))
    assert drafted > 300


@pytest.mark.parametrize("count", [32, 3])
def test_a_text_more_or_less_among_many_without_drafts_is_no_reason_to_choose(count: int) -> None:
    budget, chosen = budget_of(model(50.0), timed=True), 0
    budget.members["model"].tries = 16  # or it would be tried first
    texts = [replace(sequence(), id=f"{number}", limit=10_000) for number in range(count)]
    for step in range(300):
        if step % 3 == 2:
            budget.ended(texts.pop(0))
            texts.append(replace(sequence(), id=f"later {step}", limit=10_000))
            plans = budget.plan(texts)
        plans = budget.plan(texts)
        chosen += budget.looks
        results = [
            came(one, plan, DraftTree.chain([7]), [9], 0, plan=0.3, forward=1.0)
            for one, plan in zip(texts, plans, strict=True)
        ]
        budget.stepped(results[0][0], [each for _, (each,) in results])
    assert chosen < 60


def test_where_looking_is_dear_and_vain_a_model_drafts_on_as_planned() -> None:
    """As long as there is room for what was planned, and the sequences are the same."""
    budget, one = budget_of(Member.looking(Parrot("looked", DraftTree.chain([7]))), model(), timed=True), sequence()
    one.limit, whys = 10_000, []
    for _ in range(70):
        budget.cost.saw(1, 1, 0, {"forward": 1.0})
        (plan,) = budget.plan([one])
        if budget.guard.now:  # this step is plain, to be measured
            budget.stepped(*came(one, plan, DraftTree.chain([one.tokens[-1]]), [3], 0, forward=1.0))
            continue
        assert plan.shape.levels > 0 and plan.why is budget.why
        budget.stepped(*came(one, plan, MODEL, [3, 6, 1], 2, plan=0.3, propose=0.3, forward=1.0))
        whys.append(budget.why)
    repeated = [why is before for before, why in pairwise(whys)]
    assert sum(repeated[30:]) > 20
    assert budget._texts[one.id].pace(1.0) > 1.5, "what comes of it still tells the pace"
    for fewer in range(4):  # of these no look can be due, each would be planned as the one before
        one.limit = len(one.tokens) + 5 - fewer
        (plan,) = budget.plan([one])
        assert plan.shape.levels <= one.most_levels
    both = budget.plan([one, replace(one, id="other", tokens=[1, 7], limit=10_000)])
    assert both[1].shape.levels > 0 and both[0].why is both[1].why


def test_a_drafter_that_may_not_draft_is_skipped_and_its_neighbour_is_not() -> None:
    budget, one = budget_of(model()), sequence()
    mine, other = budget.plan([one, replace(one, id="other", speculate=False)])
    assert mine.shape.levels > 0
    assert other == NO_PLAN


def test_rows_planned_for_others_make_those_of_one_dearer_and_its_level_cheaper() -> None:
    """Eight rows cost as much as one, each further one two seconds more; a level is drafted for all at once."""
    budget = Budget([model()], CostModel([1, 8, 64], [1.0, 1.0, 113.0]), timed=False)
    alone = model_share(budget.plan([sequence()])[0]).shape.price
    two = model_share(budget.plan([sequence(), replace(sequence(), id="other")])[0]).shape.price
    assert alone is not None
    assert two is not None
    assert alone.rows[7] == 0.0 < alone.rows[8]
    assert two.rows[4] == 0.0 < two.rows[5], "two rows are the roots, and of the other two more are expected"
    assert two.level == pytest.approx(alone.level), "half the seconds, at twice the pace"


def test_next_to_found_nodes_levels_and_rows_cost_more() -> None:
    looked = Parrot("looked", DraftTree.chain([7]))
    budget, one = budget_of(Member.looking(looked), model(seconds=0.01)), sequence()
    budget.cost = CostModel([1, 64], [1.0, 1.63])
    alone = model_share(budget.plan([one])[0]).shape.price
    looked.tree = DraftTree.chain([7, 5], "looked", (1.0, 0.4))
    together = model_share(budget.plan([one])[0]).shape.price
    assert alone is not None
    assert together is not None
    assert together.level > 1.3 * alone.level
    assert np.all(np.array(together.rows) >= np.array(alone.rows))


def test_what_is_checked_has_room_in_the_draft() -> None:
    """Together with a text that goes on, one of which two tokens are left, and for which two disagree on them."""
    names = ("one", 3), ("two", 4)
    looked = [Member.looking(Parrot(name, DraftTree.chain([7, t, t], name, (1.0, 0.5, 0.4)))) for name, t in names]
    member = Member.model(Checking("model", MODEL), DraftCost(0.0, 0.05, 0.0, 0.1))
    budget, one = budget_of(*looked, member), sequence()
    one.limit, other = 10_000, replace(one, id="other", limit=len(one.tokens) + 3)
    long, short = (model_share(plan) for plan in budget.plan([one, other]))
    assert long.first and short.first and len(short.first) <= short.shape.nodes == 3


def test_a_chain_is_planned_whole_where_deciding_level_by_level_is_not_worth_it() -> None:
    """Its cost is corrected by what chains take, and what it brings says nothing of trees."""
    cost = DraftCost(0.1, 0.1, 0.01, deciding=0.3)
    member = Member.model(Chained("model", MODEL), cost)
    assert cost.seconds(3, grown=False) == pytest.approx(0.4) and cost.seconds(3) == pytest.approx(1.3)
    budget, one = Budget([member], CostModel([1, 64], [1.0, 4.0])), sequence()
    one.limit = 10_000
    for _ in range(40):  # as it was measured
        budget.cost.saw(1, 1, 0, {"forward": 1.0})
        member.costs.saw(3, 0, False, 0.4)
        member.costs.saw(3, 0, True, 1.3)
    (plan,) = budget.plan([one])
    shape = model_share(plan).shape
    assert shape.is_chain and shape.price is None and shape.levels > 3
    assert budget.why is not None and [way.kind for way in budget.why.ways] == [("model", False), ("", False)]
    chain = DraftTree.chain([7, 3, 6], "model", (1.0, 0.8, 0.64))
    for _ in range(100):
        budget.cost.saw(1, 1, 0, {"forward": 1.0})
        budget.stepped(*came(one, plan, chain, [3, 6, 1], 2, plan=0.0, propose=0.6, forward=1.0))
        (plan,) = budget.plan([one])
    assert member.costs.now().seconds(2, grown=False) == pytest.approx(0.6, rel=0.1)
    assert member.brings == GUESS and budget._texts[one.id].claims["model"].chance(0.8) > 0.8
    assert member.costs.now().seconds(2) < 1.45, "deciding is no part of a chain"
