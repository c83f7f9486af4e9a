"""What is expected of a tree that grows by its chances."""

from __future__ import annotations

import pytest

from spec.budget.grown import Grown, OwnGrown
from spec.budget.ways import Grove


def test_what_trees_promise_is_expected_of_the_next_though_none_of_it_came_by_bad_luck() -> None:
    own = OwnGrown(Grown())
    for came in (1, 1, 2, 0) * 20:
        own.saw(Grove(1.0, 3.0, 2.0), came)
    before = own.expected([])
    assert before == pytest.approx((1.0, 3.0, 2.0, 1.0), abs=0.1)
    own.saw(Grove(1.0, 3.0, 2.0), 0)
    assert own.expected([]).tokens == pytest.approx(before.tokens, abs=0.04)
    for _ in range(10):
        own.saw(Grove(2.0, 6.0, 4.0), 2)
    assert own.expected([]).tokens > 1.5


def test_promises_that_are_never_kept_are_not_believed_for_long() -> None:
    of_all = Grown()
    for _ in range(8):
        OwnGrown(of_all).saw(Grove(1.0, 3.0, 2.0), 0)
    assert of_all.share < 0.4
    own = OwnGrown(of_all)
    assert own.share == pytest.approx(of_all.share)
    for _ in range(40):
        own.saw(Grove(1.0, 3.0, 2.0), 1)
    assert own.share > 0.7


def test_a_text_that_does_better_than_others_is_known_by_itself() -> None:
    of_all = Grown()
    poor, rich = OwnGrown(of_all), OwnGrown(of_all)
    for _ in range(40):
        poor.saw(Grove(1.0, 3.0, 2.0), 0)
        rich.saw(Grove(1.0, 3.0, 2.0), 1)
    assert poor.share < 0.5 * rich.share


def test_the_less_is_known_the_more_is_hoped() -> None:
    of_all = Grown()
    begun = of_all.hope
    for _ in range(50):
        OwnGrown(of_all).saw(Grove(1.0, 3.0, 2.0), 1)
    assert 0 < of_all.hope < begun / 2


def test_of_what_was_long_not_asked_for_the_chain_is_the_guess() -> None:
    of_all = Grown()
    own = OwnGrown(of_all)
    chain = [0.9, 0.8, 0.7, 0.2]
    assert own.expected(chain).tokens == pytest.approx(2.6)
    for _ in range(20):
        own.saw(Grove(1.0, 3.0, 2.0), 0)
    assert own.expected(chain).tokens < 0.5
    for _ in range(8):
        of_all.missed()
    assert own.expected(chain).tokens == pytest.approx(2.6)
    own.saw(Grove(2.0, 3.0, 2.0), 2)
    assert own.expected(chain).tokens > 1.9
