"""How far chains come: learnt of all of a chain, however much of it was drafted."""

from __future__ import annotations

import random

import pytest

from spec.budget.claims import Salts
from spec.budget.reach import Pursuit, Reach

LONG = list(range(10, 34))


@pytest.fixture
def reach() -> Reach:
    return Reach()


@pytest.fixture
def pursuit(reach: Reach) -> Pursuit:
    return Pursuit(reach)


def end(reach: Reach) -> float:
    """What the last of so many nodes is believed to be worth."""
    return reach.chances([0.8] * 24)[23]


def test_deep_nodes_are_believed_less_before_anything_was_seen(reach: Reach) -> None:
    chances = reach.chances([0.9] * 24)
    assert chances[:2] == pytest.approx([0.9] * 2)
    assert chances[23] < 0.8 * chances[0]
    assert chances == sorted(chances, reverse=True)


def test_what_is_copied_whole_is_believed_to_its_end_after_a_few_drafts() -> None:
    """And a sequence that begins later in the same salt believes it at once."""
    salts = Salts()
    reach, other = salts.claims("a").reach, end(salts.claims("b").reach)
    for _ in range(3):
        reach.saw([0.8] * 24, 24)
    assert end(reach) > 0.7
    assert end(salts.claims("a").reach) == end(reach)
    assert end(salts.claims("b").reach) == other < 0.6


def test_what_is_wrong_early_makes_the_depths_it_would_have_reached_less_likely(reach: Reach) -> None:
    for _ in range(10):
        reach.saw([0.8] * 8, 2)
    chances = reach.chances([0.8] * 8)
    assert chances[0] > 0.7
    assert chances[7] < 0.25


def test_no_node_is_believed_more_than_its_parent(reach: Reach) -> None:
    for _ in range(5):
        reach.saw([0.9, 0.9], 0)
    first, second, third = reach.chances([0.5] * 3)
    assert first == second == third < 0.5


def learnt(pursuit: Pursuit, chain: list[int], text: list[int], each: int) -> None:
    """A text is written in such steps; each finds what is left of the chain, as long as it is right."""
    right = 0
    for first in range(0, len(text), each):
        if pursuit.idle and right == first:
            pursuit.begin(chain[right:], [0.8 ** (depth + 1) for depth in range(len(chain) - right)])
        pursuit.saw(text[first : first + each])
        while right < min(first + each, len(chain)) and text[right] == chain[right]:
            right += 1


def test_a_chain_is_followed_to_its_end_through_many_steps(reach: Reach, pursuit: Pursuit) -> None:
    """As if all of it had been drafted in the first."""
    pursuit.begin(LONG, [0.8] * 24)
    for first in range(0, 24, 4):
        assert end(reach) == end(Reach())
        pursuit.saw(LONG[first : first + 4])
    at_once = Reach()
    at_once.saw([0.8] * 24, 24)
    assert pursuit.idle
    assert end(reach) == end(at_once) > end(Reach())


def test_a_chain_that_misses_in_a_later_step_came_as_far_as_that(reach: Reach, pursuit: Pursuit) -> None:
    pursuit.begin(LONG, [0.8] * 24)
    pursuit.saw(LONG[:9])
    pursuit.saw([*LONG[9:11], 1, LONG[12]])
    at_once = Reach()
    at_once.saw([0.8] * 24, 11)
    assert reach.chances([0.8] * 24) == at_once.chances([0.8] * 24)
    pursuit.saw(LONG[13:])
    assert reach.chances([0.8] * 24) == at_once.chances([0.8] * 24)


def test_no_more_is_followed_than_was_expected_of(reach: Reach, pursuit: Pursuit) -> None:
    pursuit.begin(LONG, [0.8] * 3)
    pursuit.saw(LONG[:4])
    at_once = Reach()
    at_once.saw([0.8] * 3, 3)
    assert reach.chances([0.8] * 24) == at_once.chances([0.8] * 24)


def test_how_far_a_chain_comes_is_counted_once_however_long_the_steps_are() -> None:
    """It is found anew in each of them, up to the one in which it is wrong."""
    shares = []
    for each in (1, 3, 7, 24):
        rng, found = random.Random(0), Reach()
        for _ in range(300):
            right = next((depth for depth in range(24) if rng.random() < 0.1), 24)
            learnt(Pursuit(found), LONG, [*LONG[:right], 1], each)
        shares.append(found.chances([0.5] * 24))
    assert shares[1:] == shares[:1] * 3
