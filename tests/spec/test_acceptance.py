"""The definitions of numbers that are told in many places."""

from __future__ import annotations

import pytest

from foresay.spec.accept import ByDepth, by_place, tokens_per_step
from foresay.spec.trace import SequenceTrace


def test_both_ways_of_telling_how_deep() -> None:
    found = ByDepth.of([6, 3, 3], 10)
    assert found.cumulative == [0.6, 0.3, 0.3]
    assert found.conditional == [0.6, 0.5, 1.0]
    assert str(found) == "cumulative 0.60 0.30 0.30, conditional 0.60 0.50 1.00"


def test_what_nothing_reached_is_told_once() -> None:
    assert ByDepth.of([4, 0, 0, 0], 8) == ByDepth(8, [0.5, 0.0], [0.5, 0.0])
    assert ByDepth.of([0, 0], 8) == ByDepth(8, [0.0], [0.0])
    assert ByDepth.of([0, 0], 0) == ByDepth.of([], 0) == ByDepth()


def test_for_people_the_ninth_depth_is_the_last() -> None:
    assert str(ByDepth.of([8] * 20, 8)).count("1.00") == 18


def test_steps_without_drafts_count_for_tokens_and_not_for_depths() -> None:
    trace = SequenceTrace()
    trace.record([], 0, 1)  # read the prompt
    trace.record([1, 2, 3], 2, 3)
    trace.record([], 0, 1)
    trace.record([1, 2, 3], 3, 4)
    trace.cut(2)  # a stop string two tokens before the end
    told = trace.statistics(4, 0, 7, 3)
    assert told.tokens_per_step == tokens_per_step(7, 4) == 1.75
    assert told.by_depth == ByDepth(2, [1.0, 1.0, 0.0], [1.0, 1.0, 0.0])
    assert tokens_per_step(0, 0) is None


def test_sums_by_place() -> None:
    assert by_place([[1, 2], [], [1, 1, 1]]) == [2, 3, 1]
    assert by_place([]) == []


@pytest.mark.parametrize("deepest", [1, 5])
def test_cumulative_is_the_product_of_conditional(deepest: int) -> None:
    found = ByDepth.of([9 - depth for depth in range(deepest)], 12)
    product = 1.0
    for cumulative, conditional in zip(found.cumulative, found.conditional, strict=True):
        product *= conditional
        assert cumulative == pytest.approx(product)
