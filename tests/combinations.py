"""Fewer cases than a product of parameters has, chosen so that every value is tried with several others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*parameters: Sequence[Any]) -> list[Any]:
    """Cases for ``parametrize``: of the product so many that any two values meet; `make soak` tries the others."""
    cases = list(product(*(range(len(values)) for values in parameters)))
    return _marked(parameters, cases, _covering(cases))


def alternating(one: Sequence[Any], other: Sequence[Any], first: int = 0) -> list[Any]:
    """As a chessboard has fields of two colours: each value with every other one of the other parameter; `make soak`
    tries the others. first: of the first value, which one it begins with."""
    cases = list(product(range(len(one)), range(len(other))))
    return _marked((one, other), cases, [case for case in cases if sum(case) % 2 == first])


def _marked(
    parameters: Sequence[Sequence[Any]], cases: Sequence[tuple[int, ...]], chosen: Collection[tuple[int, ...]]
) -> list[Any]:
    return [
        pytest.param(
            *(values[at] for values, at in zip(parameters, case, strict=True)),
            marks=() if case in chosen else pytest.mark.soak,
        )
        for case in cases
    ]


def _covering(cases: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """One case after the other, each with most of the pairs that are missing yet."""
    left = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*left.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(left[case] & missing))
        chosen.add(best)
        missing -= left[best]
    return chosen
