"""What is left of a product of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.combinations import alternating, pairwise


def in_the_suite(cases: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3, 13, 3), (2, 2, 2, 2, 2), (3, 3, 5, 3, 3)], ids=str)
def test_any_two_values_meet(sizes: tuple[int, ...]) -> None:
    parameters = [[f"{at}: {value}" for value in range(size)] for at, size in enumerate(sizes)]
    cases = pairwise(*parameters)
    assert [case.values for case in cases] == list(product(*parameters)), "the soak has all the others"
    met = {pair for case in in_the_suite(cases) for pair in combinations(case, 2)}
    assert met == {pair for case in product(*parameters) for pair in combinations(case, 2)}
    least = max(a * b for a, b in combinations(sizes, 2))
    assert least <= len(in_the_suite(cases)) <= 2 * least


@pytest.mark.parametrize("first", [0, 1])
def test_each_value_meets_every_other_one(first: int) -> None:
    cases = alternating("abc", range(4), first)
    assert [case.values for case in cases] == list(product("abc", range(4)))
    suite = in_the_suite(cases)
    assert {one: [n for by, n in suite if by == one] for one in "abc"} == {
        one: [n for n in range(4) if (at + n) % 2 == first] for at, one in enumerate("abc")
    }
