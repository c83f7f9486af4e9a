"""Several drafters as one: who drafts, whose nodes are kept, and what each learns of what was committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from foresay.drafters.calibration import Calibration
from foresay.drafters.combined import CombinedDrafter, united
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import Member
from foresay.spec.budget.plan import Plan, Share
from foresay.spec.price import Price
from foresay.spec.protocols import FeatureRequest
from foresay.spec.sample import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from tests.drafters.growing import grown
from tests.drafters.growing import sequence as sequence_of


class Parrot:
    """Implements :class:`foresay.spec.protocols.Drafter`: drafts one tree, and records its notifications."""

    needs: FeatureRequest | None = None

    def __init__(self, name: str, tree: DraftTree) -> None:
        self.name, self.tree = name, tree
        self.shapes: list[TreeShape] = []
        self.paths: list[list[int]] = []
        self.read = self.over = 0

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        self.shapes += shapes
        return [self.tree for _ in sequences]

    def extend(self, sequence: SequenceState) -> None:
        self.read += 1

    def committed(self, sequence: SequenceState, path: list[int]) -> None:
        self.paths.append(path)

    def finished(self, sequence: SequenceState) -> None:
        self.over += 1


LOOKED = DraftTree.chain([7, 3, 5], "looked", (1.0, 0.6, 0.5))
#: 3 and 4 below the root; 5 and 6 below 3.
MODEL = DraftTree.build([7, 4, 3, 6, 5], [-1, 0, 0, 2, 2], "model", (1.0, 0.3, 0.5, 0.4, 0.05))


def sequence(*emitted: int) -> SequenceState:
    return SequenceState(
        id="s",
        tokens=[1, 7, *emitted],
        prompt_length=1,
        sampling=SamplingParams(),
        table=PageTable(PagePool(4)),
        noise=Noise(0, 16),
        limit=100,
        stop_ids=frozenset(),
    )


def three() -> tuple[Budget, CombinedDrafter, dict[str, Parrot]]:
    """A model, one that looks things up, and one that never drafts."""
    parrots = {"looked": Parrot("looked", LOOKED), "model": Parrot("model", MODEL), "other": Parrot("other", MODEL)}
    members = [
        Member.looking(parrots["looked"]),
        Member.model(parrots["model"], DraftCost()),
        Member.model(parrots["other"], DraftCost(100.0)),
    ]
    budget = Budget(members, CostModel([1, 64], [1.0, 1.0]), timed=False)
    return budget, CombinedDrafter(budget), parrots


def mixed(row: float | None = None) -> Plan:
    """row: what each of the model's rows costs, in tokens."""
    price = None if row is None else Price(0.0, (row * np.arange(33.0)).tolist())
    requested = replace(TreeShape((2, 2)), price=price)
    return Plan.of([Share("looked", TreeShape.chain(2), LOOKED), Share("model", requested)])


def test_one_tree_and_each_gets_its_own_part_of_the_path() -> None:
    budget, combined, parrots = three()
    budget.plan([sequence()])
    (tree,) = combined.draft([sequence()], [mixed()])
    assert tree.tokens == [7, 3, 5, 4, 6]
    assert tree.sources == ("", "looked", "looked", "model", "model")
    assert parrots["model"].shapes == [TreeShape((2, 2))]
    combined.committed(sequence(3, 6, 9), [0, 1, 4])  # both know 3, the model alone 6
    assert parrots["looked"].paths == [[0, 1, -1]]
    assert parrots["model"].paths == [[0, 2, 3]]
    assert parrots["other"].paths == [[0, -1, -1]]
    combined.committed(sequence(8), [0])
    assert [parrot.paths[-1] for parrot in parrots.values()] == [[0]] * 3
    assert not parrots["other"].shapes


@pytest.mark.parametrize(("row", "tokens"), [(0.0, [7, 3, 5, 4, 6]), (0.35, [7, 3, 5, 6]), (0.9, [7, 3, 5])])
def test_nodes_of_a_drafter_of_your_own_that_are_not_worth_their_rows_are_cut_off(
    row: float, tokens: list[int]
) -> None:
    """What was found was weighed already. However dear rows are, the model's likeliest node is seen: 3, found too."""
    _, combined, parrots = three()
    (tree,) = combined.draft([sequence()], [mixed(row)])
    assert tree.tokens == tokens
    emitted = 6 if 6 in tokens else 5
    combined.committed(sequence(3, emitted, 9), [0, 1, tokens.index(emitted)])
    assert parrots["model"].paths == [[0, 2, MODEL.tokens.index(emitted)]], "it has the row, whoever's node it was"


def test_a_prompt_is_shown_to_all_but_models_at_rest() -> None:
    budget, combined, parrots = three()
    budget.members["other"].idle = budget.members["looked"].idle = 1000
    combined.extend(sequence())
    assert [parrot.read for parrot in parrots.values()] == [1, 1, 0]
    combined.finished(sequence())
    assert [parrot.over for parrot in parrots.values()] == [1, 1, 1]


def test_a_request_that_names_one_is_drafted_for_by_no_other() -> None:
    budget, _, parrots = three()
    requested = sequence()
    requested.draft_method = "model"
    (plan,) = budget.plan([requested])
    assert {share.drafter for share in plan.shares} <= {"model"}
    assert not parrots["looked"].shapes
    requested.id, requested.draft_method, requested.most_drafted = "t", "", 1
    budget.plan([requested])
    assert [shape.levels for shape in parrots["looked"].shapes] == [1]


def test_a_tree_stops_growing_where_a_level_is_not_worth_its_price() -> None:
    """Uniform logits over 16 tokens: every node is a sixteenth as likely as the one above."""
    depths = {}
    for level in (0.0, 0.05, 0.5):
        shape = TreeShape((2, 2, 2, 2), price=Price(level, [0.0] * 33))
        alike = sequence_of([7], temperature=0.0, vocab=16)
        depths[level] = grown(alike, shape, lambda g: torch.zeros(len(g.front), 16), calibration=Calibration()).depth
    assert depths[0.0] == 4
    assert depths[0.5] < depths[0.05] < 4


def test_final_states_of_all_rows_are_wanted_if_anybody_wants_them() -> None:
    every, sampled, layers = FeatureRequest(True), FeatureRequest(True, sampled=True), FeatureRequest(layers=(3, 1))
    assert united([None, sampled, layers]) == FeatureRequest(True, (1, 3), sampled=True)
    assert united([sampled, every]) == united([every, sampled, None]) == every
    assert united([layers, None]) == FeatureRequest(layers=(1, 3)) and united([None]) is None
    assert [one.below(2) for one in (sampled, every, layers, FeatureRequest(layers=(2,)))] == [True, False, False, True]
