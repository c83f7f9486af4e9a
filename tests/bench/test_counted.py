"""The budget in counted seconds."""

from __future__ import annotations

import random

import pytest

from bench.counted import Counted
from bench.forced import copy_heavy
from foresay.spec.budget import CostModel

COST = CostModel([1, 4, 8, 64], [10.0, 10.0, 12.0, 60.0], context=[(1, 0.001), (8, 0.002)])


def test_a_step_costs_its_rows_and_what_stands_before_it() -> None:
    """A text that repeats itself: nothing is known at first, and then all four tokens of each draft come."""
    counted = Counted(COST, "suffix:4")
    spent = counted.seconds([([5, 6, 7, 8], [*[9, 5, 6, 7, 8], *[9, 5, 6, 7, 8], 9, 5])], "")
    drafted = COST.table(1, 0, 8)[5] + COST.behind(5, 6)
    assert spent > 2 * drafted
    assert spent < 12 * COST.seconds(1)
    fresh = Counted(COST, "suffix:4").seconds([([5, 6, 7, 8], [10, 11, 12])], "")
    assert fresh == pytest.approx(sum(COST.seconds(1) + COST.behind(1, context) for context in (5, 6)))


def test_on_edits_the_budget_is_about_as_fast_as_a_length_that_suits_them() -> None:
    rng, spent = random.Random(1), {}
    texts = [copy_heavy("", 4096, rng, 64) for _ in range(20)]
    for way in ("auto", "suffix:2", "suffix:16"):
        counted = Counted(COST, way)
        asked = [[(text.prompt, text.output)] for text in texts]
        spent[way] = sum(counted.seconds(one, f"{number}") for number, one in enumerate(asked))
    assert spent["auto"] < 1.05 * spent["suffix:16"]
    assert spent["auto"] < 0.8 * spent["suffix:2"]
