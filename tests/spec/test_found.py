"""What was looked up, and what is learnt of how deep it came."""

from __future__ import annotations

import pytest

from spec.budget.case import Case
from spec.budget.claims import Salts
from spec.budget.found import NOTHING, Found, Looking
from spec.budget.reach import Reach
from spec.step import Verdict, Work
from spec.tree import ROOT_ONLY, DraftTree
from tests.drafters.test_combined import sequence


def found(own: Looking, tokens: list[int]) -> Found:
    chances = tuple(0.9**depth for depth in range(len(tokens) + 1))
    return NOTHING.plus(own, DraftTree.chain([1, *tokens], "looked", chances))


def deep(own: Looking) -> float:
    """What the eighth of such tokens is believed to be worth."""
    return found(own, list(range(10, 18))).chances[7]


@pytest.fixture
def own() -> Looking:
    return Looking(Salts().claims("a"))


def test_what_is_copied_whole_is_believed_and_what_is_wrong_early_is_not(own: Looking) -> None:
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
            own, running = Looking(Salts().claims("a")), sequence()
            case, right = Case({"looked": own}, {}, found(own, tokens), len(running.tokens)), 0
            for emitted in steps:
                running.tokens.extend(emitted)
                case.learn(Verdict(Work(running, 0, ROOT_ONLY), DraftTree.chain([1]), emitted=emitted))
                right += len(emitted)
                case.found, case.length = found(own, tokens[right:]) if again else NOTHING, len(running.tokens)
            counted.append(own.claims.reach.chances([0.1] * 8))
    assert counted[0] != Reach().chances([0.1] * 8)
    assert counted[1:] == counted[:1] * 3


def test_a_chain_is_followed_where_nothing_was_planned(own: Looking) -> None:
    tokens = list(range(10, 18))
    running = sequence()
    case = Case({"looked": own}, {}, found(own, tokens), len(running.tokens))
    for emitted in (tokens[:4], [*tokens[4:], 9]):
        running.tokens.extend(emitted)
        case.learn(Verdict(Work(running, 0, ROOT_ONLY), DraftTree.chain([1]), emitted=emitted))
    assert own.claims.reach.chances([0.1] * 8)[7] > Reach().chances([0.1] * 8)[7]


def test_what_two_found_is_one_tree_and_nothing_is_added_to_nothing() -> None:
    one, other = Looking(Salts().claims("")), Looking(Salts().claims(""))
    both = NOTHING.plus(one, DraftTree.chain([1, 3, 5], "suffix", (1.0, 0.6, 0.5)))
    both = both.plus(other, DraftTree.chain([1, 4], "ngram", (1.0, 0.3)))
    assert both.names == ["suffix", "ngram"]
    assert both.chances == pytest.approx([0.6, 0.5, 0.3])
    assert both.first == pytest.approx(0.9)
    assert both.best(2).tokens.tolist() == [1, 3, 5]
    assert both.best(3).sources == ("", "suffix", "suffix", "ngram")
    assert both.learn([9]), "all of it was wrong"
    assert not both.learn([4, 9])
    assert (one.run, other.run) == (0, 1), "and the second was right on one token in a row"
    other.run = 3
    assert both.plus(other, None) is both
    assert other.run == 0
    assert (NOTHING.chances, NOTHING.names) == ([], [])


def test_a_tree_shows_what_came_of_all_its_siblings() -> None:
    own = Looking(Salts().claims(""))
    tree = DraftTree.build([1, 3, 4, 5, 6], [-1, 0, 0, 2, 2], "looked", (1.0, 0.5, 0.3, 0.2, 0.1))
    made = NOTHING.plus(own, tree)
    assert made.first == pytest.approx(0.8)
    seen: list[tuple[float, bool]] = []
    own.claims.saw = lambda claim, hit: seen.append((round(claim, 2), hit))  # type: ignore[method-assign]
    assert not made.learn([4, 6, 9])
    assert seen == [(0.5, False), (0.3, True), (0.67, False), (0.33, True)]
    assert own.run == 2
