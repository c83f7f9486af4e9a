"""What a step shows of a model's tree, and what it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafters.combined import CombinedDrafter
from spec.budget import StepCost
from spec.budget.budget import Budget
from spec.budget.cost import DraftCost
from spec.budget.members import OPEN, Member
from spec.sequence import Sequence
from spec.step import Verdict, Work
from spec.trace import StepTrace
from spec.tree import DraftTree, TreeShape
from tests.drafters.test_combined import LOOKED, MODEL, Parrot, sequence

STEP = StepTrace(number=0, rows=1, sequences=1, prefill_rows=0, drafted=0, accepted=0, emitted=0, seconds={})


class Steps:
    """A budget of one model that says :data:`MODEL`, and one sequence. rows: seconds of each row of a step;
    branching: of one that branches."""

    def __init__(self, rows: float = 0.0, branching: float = 0.0) -> None:
        self.looked = Parrot("looked", DraftTree.chain([7]))
        self.model = Member.model(Parrot("model", MODEL), DraftCost(0.01, 0.01))
        cost = StepCost([1, 64], [1.0, 1.0 + 63 * rows], branching=branching)
        self.budget = Budget([Member.looking(self.looked), self.model], cost, timed=False)
        self.combined, self.one = CombinedDrafter(self.budget), sequence()
        while self.model.rates.trials[0] < 3:
            self.step([3, 6, 1], 2)

    def step(self, tokens: list[int], accepted: int, forced: int = 0) -> tuple[TreeShape, DraftTree]:
        """One in which these tokens come, the first so many of them nodes that were verified."""
        (shape,) = self.budget.plan([self.one])
        (tree,) = self.combined.propose([self.one], [shape])
        self.one.tokens.extend(tokens)
        depths = tree.depths.tolist()[1:]
        work = Work(self.one, 0, shape)
        verdict = Verdict(work, tree, emitted=tokens, accepted=accepted, depths=depths, forced=forced)
        self.budget.stepped(STEP, [verdict])
        return shape, tree


@pytest.fixture
def free() -> Steps:
    return Steps()


def grown(steps: Steps) -> tuple[float, ...]:
    assert steps.model.grown is not None
    return steps.model.grown.brings


def test_a_tree_that_grew_shows_what_its_nodes_promised(free: Steps) -> None:
    shape, tree = free.step([3, 6, 1], 2)
    assert shape.widths == OPEN.widths
    assert len(tree) == len(MODEL)
    assert grown(free) == pytest.approx((sum(MODEL.chances[1:]), len(MODEL) - 1, 2, 1))
    assert free.model.grown is not None
    before = free.model.grown.share
    free.step([9], 0)
    assert free.model.grown.share < before, "nothing came of what was promised"


def test_of_a_tree_that_was_cut_only_the_nodes_that_were_verified_count() -> None:
    dear = Steps(rows=0.1)
    _, tree = dear.step([3, 1], 1)
    assert 1 < len(tree) < len(MODEL)
    tokens, nodes, *_ = grown(dear)
    assert (tokens, nodes) == pytest.approx((sum(tree.chances[1:]), len(tree) - 1))


def test_where_branching_is_dear_the_likeliest_path_is_left_alone() -> None:
    """3 and 6 have chances of 0.5 and 0.4, their sibling 4 of 0.3."""
    for branching, tokens in ((0.1, [7, 4, 3, 6, 5]), (0.4, [7, 3, 6])):
        steps = Steps(branching=branching)
        for depth in [0, 1] * 40:
            steps.model.rates.saw(depth, True)
        for _ in range(2):
            _, tree = steps.step([3, 6, 1], 2)
            assert tree.tokens.tolist() == tokens
            assert tree.is_chain == (branching > 0.3)
        promised, nodes, _, branches = grown(steps)
        assert branches == (not tree.is_chain)
        assert (promised, nodes) == pytest.approx((sum(tree.chances[1:]), len(tree) - 1))


@pytest.mark.parametrize("forced", [0, 1])
def test_what_a_grammar_forced_shows_nothing(free: Steps, forced: int) -> None:
    free.step([3, 6, 1], 2, forced=forced)
    assert (grown(free)[1] == 0) == bool(forced)


def test_beside_found_nodes_a_tree_shows_nothing_of_how_it_does_alone(free: Steps) -> None:
    free.step([3, 6, 1], 2)
    known = grown(free)
    free.looked.tree = replace(LOOKED, drafter="looked")
    for _ in range(20):
        free.step([9], 0)
    beside = free.model.beside.trials[0]
    assert beside > 0, "it was asked beside them"
    assert grown(free) == known


def test_a_model_does_not_draft_what_a_grammar_forces_for_free(free: Steps) -> None:
    free.step([3, 6, 1], 2)
    (shape,) = free.budget.plan([free.one])
    assert shape.levels == OPEN.levels
    assert shape.likely_levels == 2
    assert Work(free.one, 0, shape, forced=[1]).drafts
    assert not Work(free.one, 0, shape, forced=[1, 2]).drafts


def test_one_sequence_that_does_poorly_is_asked_for_trees_as_long_as_the_model_is_worth_it(free: Steps) -> None:
    free.step([3, 6, 1], 2)
    other: Sequence = replace(sequence(), id="other")
    for _ in range(40):
        free.model.rates.saw(0, True)
    free.budget.plan([free.one, other])
    case = free.budget._cases.known("other")
    assert case is not None
    for _ in range(60):
        case.records["model"].rates._hits[0], case.records["model"].rates._trials[0] = 0.0, 60.0
    shapes = free.budget.plan([free.one, other])
    assert [shape.levels > 0 for shape in shapes] == [True, True]
