"""What is expected of a tree that grows by its chances."""

from __future__ import annotations

import pytest

from spec.budget.promises import Promises
from spec.budget.weigh import Grove

TREE = Grove(1.0, 3.0, 2.0)


def test_what_trees_promise_is_expected_of_the_next_though_none_of_it_came_by_bad_luck() -> None:
    promises = Promises()
    own = promises.own()
    for came in (1, 1, 2, 0) * 20:
        promises.saw(own, TREE, came)
    before = promises.expected(own, 12)
    assert before == pytest.approx(TREE, abs=0.1)
    promises.saw(own, TREE, 0)
    assert promises.expected(own, 12).tokens == pytest.approx(before.tokens, abs=0.05)
    for _ in range(60):
        promises.saw(own, Grove(2.0, 6.0, 4.0), 2)
    assert promises.expected(own, 12) == pytest.approx((2.0, 6.0, 4.0), rel=0.3)
    assert promises.expected(own, 1)[::2] == (1.0, 1.0), "no more than may be drafted"


def test_promises_that_are_never_kept_are_not_believed_for_long() -> None:
    promises = Promises()
    for _ in range(60):
        promises.saw(promises.own(), TREE, 0)
    assert promises.expected(promises.own(), 12).tokens < 0.4
    own = promises.own()
    for _ in range(40):
        promises.saw(own, TREE, 1)
    assert promises.expected(own, 12).tokens > 0.7


def test_a_text_that_does_better_than_others_is_known_by_itself() -> None:
    promises = Promises()
    poor, rich = promises.own(), promises.own()
    for _ in range(40):
        promises.saw(poor, TREE, 0)
        promises.saw(rich, TREE, 1)
    assert promises.expected(poor, 12).tokens < 0.5 * promises.expected(rich, 12).tokens


def test_the_less_is_known_the_more_is_hoped() -> None:
    promises = Promises()
    begun = promises.share.hope - promises.share.kept
    for _ in range(50):
        promises.saw(promises.own(), TREE, 1)
    assert 0 < promises.share.hope - promises.share.kept < begun / 2


def test_the_first_trees_say_much_and_bad_luck_in_one_is_not_the_end() -> None:
    promises = Promises()
    begun = promises.brings.tokens
    promises.saw(promises.own(), Grove(0.1, 1.0, 1.0), 0)
    assert 0.75 * begun < promises.brings.tokens < 0.85 * begun
    for _ in range(10):
        promises.saw(promises.own(), Grove(0.1, 1.0, 1.0), 0)
    assert promises.expected(promises.own(), 12).tokens < 0.5 * begun
