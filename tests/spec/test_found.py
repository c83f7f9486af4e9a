"""What was looked up, and what is learnt of how deep it came."""

from __future__ import annotations

import pytest

from foresay.spec.budget.chance import Claims, Salts
from foresay.spec.budget.members import NOTHING, Found
from foresay.spec.tree import DraftTree

TOKENS = list(range(10, 18))


def found(own: Claims, tokens: list[int] = TOKENS) -> Found:
    chances = tuple(0.9**depth for depth in range(len(tokens) + 1))
    return Found.of([(own, DraftTree.chain([1, *tokens], "looked", chances))])


def deep(own: Claims) -> float:
    """What the eighth of such tokens is believed to be worth."""
    return found(own).chances[7]


@pytest.fixture
def own() -> Claims:
    return Salts().claims("a", 0)


def test_what_is_copied_whole_is_believed_and_what_is_wrong_early_is_not(own: Claims) -> None:
    before = deep(own)
    for _ in range(3):
        found(own).learn([*TOKENS, 9])
    assert deep(own) > 1.2 * before
    for _ in range(6):
        found(own).learn([10, 9])
    assert len(found(own).chances) < 8 or deep(own) < before


def test_deep_nodes_are_believed_less_than_they_claim_until_many_in_a_row_were_right(own: Claims) -> None:
    fresh, first = deep(own), found(own).chances[0]
    assert fresh < 0.7 * 0.9**8
    assert first > 0.9 * 0.9
    own.run = 200
    assert 0.95 * 0.9**8 < deep(own) < 0.9**8


def test_tokens_that_were_right_in_a_row_are_counted_through_steps_and_halved_by_a_miss(own: Claims) -> None:
    for emitted, run in (([10, 11], 2), ([10, 11, 12], 5), ([*TOKENS, 9], 13), ([10, 9], 7), ([9], 3)):
        found(own).learn(emitted)
        assert own.run == run


def test_what_two_found_is_one_tree_and_nothing_is_nothing() -> None:
    one, other = Salts().claims("", 0), Salts().claims("", 0)
    one.run = other.run = 10**9  # so that all is believed as it is claimed
    suffix = DraftTree.chain([1, 3, 5], "suffix", (1.0, 0.6, 0.5))
    both = Found.of([(one, suffix), (other, DraftTree.chain([1, 4], "ngram", (1.0, 0.3)))])
    assert both.names == ("suffix", "ngram")
    assert both.chances == pytest.approx([0.6, 0.5, 0.3])
    assert both.left == pytest.approx(0.65 * 0.1)
    assert both.best(2).tokens == [1, 3, 5]
    assert both.best(3).sources == ("", "suffix", "suffix", "ngram")
    unlikely = Found.of([(one, DraftTree.chain([1, 3], "suffix", (1.0, 0.01)))])
    for none in (NOTHING, unlikely):
        assert (none.chances, none.names, none.left) == ([], (), 1.0)


def test_what_two_found_alike_is_a_chain_whose_tokens_have_one_source_each() -> None:
    one, other = Salts().claims("", 0), Salts().claims("", 0)
    one.run = other.run = 10**9
    suffix = DraftTree.chain([1, 3], "suffix", (1.0, 0.6))
    both = Found.of([(one, suffix), (other, DraftTree.chain([1, 3, 5], "ngram", (1.0, 0.5, 0.4)))])
    assert both.tree is not None and both.tree.is_chain
    assert both.best(2).sources == ("", "suffix", "ngram")
    assert both.best(1).sources == ("", "suffix")
