"""What a step shows of a model's tree, and what it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foresay.drafters.combined import CombinedDrafter
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import GUESS, OPEN, Member
from foresay.spec.budget.plan import Plan
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence, VerifyResult
from foresay.spec.trace import StepTrace
from foresay.spec.tree import DraftTree, TreeShape
from tests.drafters.test_combined import LOOKED, MODEL, Parrot, sequence

CHAIN = DraftTree.chain([7, 3], "model", (1.0, 0.5))
STEP = StepTrace(number=0, rows=1, sequences=1, prefill_rows=0, drafted=0, accepted=0, emitted=0, seconds={})


class Chained(Parrot):
    """Drafts chains."""

    def chain_chances(self, sequence: SequenceState, levels: int) -> list[float]:
        return [0.5**depth for depth in range(1, levels + 1)]


class Steps:
    """A budget of one model that drafts as :data:`MODEL`, and one sequence. rows: seconds of each row of a step."""

    def __init__(self, rows: float = 0.0) -> None:
        self.looked = Parrot("looked", DraftTree.chain([7]))
        self.model = Member.model(Parrot("model", MODEL), DraftCost(0.01, 0.01))
        cost = CostModel([1, 64], [1.0, 1.0 + 63 * rows])
        self.budget = Budget([Member.looking(self.looked), self.model], cost, timed=False)
        self.combined, self.one = CombinedDrafter(self.budget), sequence()

    def step(self, tokens: list[int], accepted: int, forced: int = 0) -> tuple[Plan, DraftTree]:
        """One in which these tokens come, the first so many of them nodes that were verified."""
        (plan,) = self.budget.plan([self.one])
        (tree,) = self.combined.draft([self.one], [plan])
        self.one.tokens.extend(tokens)
        scheduled, path = ScheduledSequence(self.one, 0, plan.shape, plan=plan), range(1, accepted + 1)
        result = VerifyResult(scheduled, replace(tree, forced=forced), path=path, emitted=tokens)
        self.budget.stepped(STEP, [result])
        return plan, tree


def moved(tree: tuple[float, ...]) -> list[float]:
    """What is expected after one tree, which counts a fifth against the guess."""
    return [old + (new - old) / 5 for old, new in zip(GUESS, tree, strict=True)]


def kept(steps: Steps) -> float:
    """What a claim of the model is worth in this text."""
    return steps.budget._texts["s"].claims["model"].chance(0.5)


@pytest.fixture
def free() -> Steps:
    return Steps()


def test_of_a_tree_that_was_cut_only_the_nodes_that_were_verified_count() -> None:
    dear = Steps(rows=0.1)
    _, tree = dear.step([3, 1], 1)
    assert 1 < len(tree) < len(MODEL)
    assert dear.model.brings == pytest.approx(moved((sum(tree.chances[1:]), len(tree) - 1, 2)))


@pytest.mark.parametrize("forced", [0, 1])
def test_what_a_grammar_forced_shows_nothing(free: Steps, forced: int) -> None:
    begun = free.model.brings
    free.step([3, 6, 1], 2, forced=forced)
    assert (free.model.brings == begun) == bool(forced)


def test_next_to_found_nodes_a_tree_shows_nothing_of_how_it_does_alone(free: Steps) -> None:
    free.step([3, 6, 1], 2)
    known, before = free.model.brings, kept(free)
    free.looked.tree = replace(LOOKED, drafter="looked")
    plan, _ = free.step([9], 0)
    assert [share.drafter for share in plan.shares] == ["looked", "model"]
    assert (free.model.brings, kept(free)) == (known, before)


def test_a_model_does_not_draft_what_a_grammar_forces_for_free(free: Steps) -> None:
    free.step([3, 6, 1], 2)
    (plan,) = free.budget.plan([free.one])
    assert plan.shape.levels == OPEN.levels
    assert plan.likely_levels == 2
    assert ScheduledSequence(free.one, 0, plan.shape, [1], plan).drafts
    assert not ScheduledSequence(free.one, 0, plan.shape, [1, 2], plan).drafts


def test_a_step_of_another_plan_changes_nothing_for_what_was_found(free: Steps) -> None:
    """A prompt is read, say, or a step goes without drafts: the text is longer than it was planned for."""
    free.looked.tree = replace(LOOKED, drafter="looked")
    free.step([9], 0)
    case = free.budget._texts.get("s")
    assert case is not None
    believed, pace = case.claims["looked"].chance(0.6), case.pace(1.0)
    free.one.tokens.extend([5, 5])
    plain = VerifyResult(ScheduledSequence(free.one, 0, TreeShape()), DraftTree.chain([7]), emitted=[5])
    free.budget.stepped(STEP, [plain])
    assert (case.claims["looked"].chance(0.6), case.pace(1.0)) == (believed, pace)


def test_bad_luck_in_the_first_trees_is_not_the_end_and_a_model_that_is_never_right_is_not_believed(
    free: Steps,
) -> None:
    def expected() -> float:
        case = free.budget._texts["s"]
        return free.model.tree(free.one, case.claims["model"]).tokens

    free.step([9], 0)
    begun = expected()
    for _ in range(3):
        free.step([9], 0)
    assert expected() > 0.4 * begun
    for _ in range(20):
        free.step([9], 0)
        free.one.limit += 1
    assert expected() < 0.3 * begun
    for _ in range(60):
        free.step([3, 1], 1)
        free.one.limit += 2
    assert expected() > 0.7 * begun


def test_what_trees_showed_is_forgotten_while_chains_are_drafted(free: Steps) -> None:
    """They are compared again some day."""
    free.step([9], 0)
    claims, member = free.budget._texts["s"].claims["model"], free.model
    for _ in range(60):
        member.saw(MODEL, MODEL, 0, claims)
    lost = member.came / member.claimed
    assert lost < 0.95
    member._chains = Chained("model", CHAIN)
    for _ in range(200):
        member.saw(CHAIN, CHAIN, 1, claims)
    assert member.came / member.claimed > 1 - (1 - lost) / 3
