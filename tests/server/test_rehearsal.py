"""The steps before the first request: what they tell, and that nothing is left of them."""

from __future__ import annotations

import random

from server.rehearsal import Rehearsal
from tests.drafters.test_regimes import Foresight
from tests.spec.house import House
from tests.spec.tables import TableModel


def rehearsed(max_model_len: int = 128, pages: int = 200) -> tuple[House, Rehearsal]:
    house = House(TableModel(3), pages=pages, max_model_len=max_model_len)
    return house, Rehearsal(house.engine.info, house.verifier, house.pool)


def test_a_curve_of_growing_rows_and_what_a_draft_takes() -> None:
    house, rehearsal = rehearsed(max_model_len=64)
    assert [rows for rows, _ in rehearsal.curve().points] == [1, 2, 4, 8, 16, 32]
    assert all(seconds > 0 for _, seconds in rehearsal.curve().points)
    rng = random.Random(1)
    cost = rehearsal.draft_cost(Foresight([rng.randrange(32) for _ in range(200)], lambda position: 0.5))
    assert cost.seconds(4) >= cost.seconds(1) > 0
    assert rehearsal.root_seconds() > 0
    house.pool.check([], at_rest=True)
    assert house.pool.available == house.pool.num_pages - 1


def test_a_context_without_room_is_no_error() -> None:
    """Of one that holds a few tokens only the small steps are measured; of one that holds none, nothing."""
    _, short = rehearsed(max_model_len=12)
    assert [rows for rows, _ in short.curve().points] == [1, 2, 4, 8]
    _, none = rehearsed(max_model_len=1)
    assert none.root_seconds() == 0.0
    assert none.curve().points == [(1, 1.0)]


def test_a_small_cache_is_measured_as_far_as_it_goes() -> None:
    house, rehearsal = rehearsed(max_model_len=64, pages=8)
    assert [rows for rows, _ in rehearsal.curve().points] == [1, 2, 4, 8, 16]
    house.pool.check([], at_rest=True)
