"""What was looked up, and what is learnt of how deep it came."""

from __future__ import annotations

import pytest

from spec.budget.case import Case
from spec.budget.found import NOTHING, Found
from spec.budget.members import Member, Record
from spec.budget.reach import Reach
from spec.step import Verdict, Work
from spec.tree import ROOT_ONLY, DraftTree
from tests.drafters.test_combined import LOOKED, Parrot, record, sequence


def found(own: Record, tokens: list[int]) -> Found:
    made = Found()
    made.add(own, DraftTree.chain([1, *tokens], "looked", tuple(0.9**depth for depth in range(len(tokens) + 1))))
    return made


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
        found(own, tokens).learn([*tokens, 9])
    assert deep(own) > 1.2 * before
    for _ in range(6):
        found(own, tokens).learn([10, 9])
    assert deep(own) < before


def test_a_case_follows_its_chains_through_steps_that_find_nothing_or_the_rest_of_them() -> None:
    """What is found meanwhile is no chain of its own, or the one that misses would be counted twice."""
    tokens = list(range(10, 18))
    counted = []
    for steps in ([[*tokens[:6], 9]], [tokens[:2], tokens[2:4], [*tokens[4:6], 9]]):
        for again in (False, True):
            own, running = record("a", Member.looking(Parrot("looked", LOOKED))), sequence()
            case, right = Case({"looked": own}, found(own, tokens), len(running.tokens)), 0
            for emitted in steps:
                running.tokens.extend(emitted)
                case.learn(Verdict(Work(running, 0, ROOT_ONLY), DraftTree.chain([1]), emitted=emitted))
                right += len(emitted)
                case.found, case.length = found(own, tokens[right:]) if again else NOTHING, len(running.tokens)
            counted.append(own.claims.reach.chances([0.1] * 8))
    assert counted[0] != Reach().chances([0.1] * 8)
    assert counted[1:] == counted[:1] * 3


def test_a_chain_is_followed_where_nothing_was_planned(own: Record) -> None:
    tokens = list(range(10, 18))
    running = sequence()
    case = Case({"looked": own}, found(own, tokens), len(running.tokens))
    for emitted in (tokens[:4], [*tokens[4:], 9]):
        running.tokens.extend(emitted)
        case.learn(Verdict(Work(running, 0, ROOT_ONLY), DraftTree.chain([1]), emitted=emitted))
    assert own.claims.reach.chances([0.1] * 8)[7] > Reach().chances([0.1] * 8)[7]
