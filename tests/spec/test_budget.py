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


def test_between_and_beyond_the_points() -> None:
    rows = [0, 1, 2, 3, 4, 10, 16, 40, 64, 128, 640]
    seconds = [1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 2.0, 5.0, 8.0, 16.0, 80.0]
    assert [CURVE.seconds(each) for each in rows] == pytest.approx(seconds)


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
