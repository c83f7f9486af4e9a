"""What was looked up, and what is learnt of how deep it came."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec.budget.found import Found
from spec.budget.members import Member, Record
from spec.tree import DraftTree
from tests.drafters.test_combined import LOOKED, Parrot, record

ROOT = DraftTree.chain([1])


def found(own: Record, tokens: list[int]) -> Found:
    made = Found()
    made.add(own, DraftTree.chain([1, *tokens], "looked", tuple(0.9**depth for depth in range(len(tokens) + 1))))
    return made


def drafted(tokens: list[int], drafter: str = "looked") -> DraftTree:
    return DraftTree.chain([1, *tokens], drafter)


def deep(own: Record) -> float:
    """What the eighth of such tokens is believed to be worth."""
    return found(own, list(range(10, 18))).chances[7]


@pytest.fixture
def own() -> Record:
    return record("a", Member.looking(Parrot("looked", LOOKED)))


def test_what_is_copied_whole_is_believed_and_what_is_wrong_early_is_not(own: Record) -> None:
    tokens = list(range(10, 18))
    before = deep(own)
    for _ in range(3):
        found(own, tokens).learn([*tokens, 9], drafted(tokens))
    assert deep(own) > 1.2 * before
    for _ in range(6):
        found(own, tokens).learn([10, 9], drafted(tokens))
    assert deep(own) < before


def test_of_depths_that_were_not_verified_nothing_is_learnt(own: Record) -> None:
    """Wrong at the second token of three that were verified: it would have been told of the first three alone."""
    tokens = list(range(10, 18))
    reach = own.claims.reach
    before = reach.chances([1.0] * 8)
    found(own, tokens).learn([9], ROOT)
    found(own, tokens).learn([10, 9], drafted(tokens[:3]))
    after = reach.chances([1.0] * 8)
    assert after[0] < before[0]
    assert reach.chances([0.1] * 8)[4:] == pytest.approx([0.1 * before[4]] * 4)


def test_only_its_own_path_in_what_was_verified_counts(own: Record) -> None:
    """Another drafter's branch was verified deep, and of this one two nodes."""
    tokens = list(range(10, 18))
    verified = DraftTree.build([1, 10, 11, 20, 21, 22, 23, 24, 25], [-1, 0, 1, 0, 3, 4, 5, 6, 7])
    verified = replace(verified, parts=(drafted([10, 11]), drafted([20, 21, 22, 23, 24, 25], "other")))
    reach = own.claims.reach
    before = reach.chances([0.1] * 8)
    found(own, tokens).learn([20, 21, 22, 23, 24, 25, 9], verified)
    after = reach.chances([0.1] * 8)
    assert after[4:] == pytest.approx(before[4:], rel=0.05)
    assert after[0] < before[0]


def test_what_another_drafted_alike_does_not_count(own: Record) -> None:
    """It was drafted there because it was likelier to come."""
    tokens = list(range(10, 18))
    before = own.claims.reach.chances([0.1] * 8)
    found(own, tokens).learn([*tokens, 9], drafted(tokens, "model"))
    assert own.claims.reach.chances([0.1] * 8)[4:] == pytest.approx(before[4:], rel=0.05)
