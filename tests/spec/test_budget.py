"""The cost curve as it was measured: read between its points, never falling, and what it lets into a mixed step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from foresay.kvpaging import PagePool
from foresay.spec.budget import CostModel
from foresay.spec.scheduler import MIXED_STEP_FACTOR, MIXED_STEP_SECONDS, Scheduler
from foresay.spec.tree import TreeShape

CURVE = CostModel([2, 4, 16, 64], [1.0, 1.0, 2.0, 8.0])


def chunk_of(cost: CostModel, decode_rows: int, most: int) -> int:
    return Scheduler(PagePool(4), None, TreeShape(), cost, 1).chunk(decode_rows, most)


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 1.0),
        (10, 1.5),
        (16, 2.0),
        (40, 5.0),
        (64, 8.0),
        (128, 16.0),
        (640, 80.0),
    ],
)
def test_between_and_beyond_the_points(rows: int, seconds: float) -> None:
    assert CURVE.seconds(rows) == pytest.approx(seconds)


def test_more_rows_never_take_less() -> None:
    cost = CostModel([1, 2, 4, 8], [1.0, 3.0, 2.0, 4.0])
    assert [cost.seconds(rows) for rows in (1, 2, 3, 4, 6, 8)] == [1.0, 3.0, 3.0, 3.0, 3.5, 4.0]


def test_a_step_of_prefill_alone_takes_all_it_may() -> None:
    assert chunk_of(CURVE, 0, 256) == 256


@pytest.mark.parametrize(
    ("decode_rows", "most", "chunk"), [(1, 256, 15), (4, 256, 12), (4, 5, 5), (16, 256, 16), (64, 256, 64)]
)
def test_a_mixed_step_takes_twice_the_time_of_the_decode_step(decode_rows: int, most: int, chunk: int) -> None:
    assert chunk_of(CURVE, decode_rows, most) == chunk


def test_quick_steps_take_more_of_a_prompt_than_twice_their_time() -> None:
    """Where few rows cost much, a prompt in small pieces takes several times as long, and keeps everybody waiting."""
    cost = CostModel([1, 5, 85], [0.004, 0.008, 0.088])
    assert cost.seconds(1 + chunk_of(cost, 1, 256)) == pytest.approx(MIXED_STEP_SECONDS)
    assert MIXED_STEP_FACTOR * cost.seconds(1) < MIXED_STEP_SECONDS, "or this says nothing"


def test_at_least_one_row_of_prefill_moves_on() -> None:
    assert chunk_of(CostModel([1, 2], [1.0, 100.0]), 1, 256) == 1


def test_random_curves() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = sorted(rng.sample(range(1, 300), rng.randint(1, 8)))
        cost = CostModel(sizes, [rng.random() + 0.01 for _ in sizes])
        spent = [cost.seconds(rows) for rows in range(400)]
        assert all(more >= less * (1 - 1e-12) for less, more in pairwise(spent))
        decode, most = rng.randint(1, 80), rng.randint(1, 256)
        chunk = chunk_of(cost, decode, most)
        assert 1 <= chunk <= most
        allowed = max(MIXED_STEP_FACTOR * spent[decode], MIXED_STEP_SECONDS)
        assert chunk == 1 or cost.seconds(decode + chunk) <= allowed
        assert chunk == most or cost.seconds(decode + chunk + 1) > allowed
