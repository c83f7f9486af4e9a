"""What is expected of a tree that grows by its chances."""

from __future__ import annotations

import pytest

from foresay.spec.budget.members import Promises
from foresay.spec.budget.weigh import ExpectedTree

TREE = ExpectedTree(1.0, 3.0, 2.0)


def test_what_trees_promise_is_expected_of_the_next_though_none_of_it_came_by_bad_luck() -> None:
    promises = Promises()
    for came in (1, 1, 2, 0) * 20:
        promises.saw(TREE, came)
    before = promises.expected(12)
    assert before == pytest.approx(TREE, abs=0.1)
    promises.saw(TREE, 0)
    assert promises.expected(12).tokens == pytest.approx(before.tokens, abs=0.05)
    for _ in range(60):
        promises.saw(ExpectedTree(2.0, 6.0, 4.0), 2)
    assert promises.expected(12) == pytest.approx((2.0, 6.0, 4.0), rel=0.3)
    assert promises.expected(1)[::2] == (1.0, 1.0), "no more than may be drafted"


def test_promises_that_are_never_kept_are_not_believed_for_long() -> None:
    promises = Promises()
    for _ in range(60):
        promises.saw(TREE, 0)
    assert promises.expected(12).tokens < 0.4
    for _ in range(60):
        promises.saw(TREE, 1)
    assert promises.expected(12).tokens > 0.45


def test_the_first_trees_say_much_and_bad_luck_in_one_is_not_the_end() -> None:
    promises = Promises()
    begun = promises.brings.tokens
    promises.saw(ExpectedTree(0.1, 1.0, 1.0), 0)
    assert 0.75 * begun < promises.brings.tokens < 0.85 * begun
    for _ in range(10):
        promises.saw(ExpectedTree(0.1, 1.0, 1.0), 0)
    assert promises.expected(12).tokens < 0.5 * begun
