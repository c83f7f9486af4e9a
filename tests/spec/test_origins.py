"""Every emitted token says where it comes from, and the sum of that is the statistics."""

from __future__ import annotations

import pytest

from foresay.spec.sampling import SamplingParams
from tests.spec.house import House
from tests.spec.tables import Guesser, TableModel


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_origins_add_up_to_the_statistics(right, temperature) -> None:
    model = TableModel(9)
    house = House(model, Guesser(model, right, full=True), (2, 2, 1))
    answer = house.answer([1] * 10, SamplingParams(max_tokens=23, seed=1, temperature=temperature))
    deltas = [delta for delta in answer.deltas if delta.tokens]
    statistics = answer.deltas[-1].statistics
    assert statistics is not None
    per_depth = [0] * 3
    origins = [delta.origin for delta in deltas if delta.origin is not None]
    assert len(origins) == len(deltas)
    for delta, origin in zip(deltas, origins, strict=True):
        assert origin.step > 0
        assert (len(origin.parents) - 1, len(origin.path)) == (delta.drafted, delta.accepted)
        assert origin.parents[0] == -1
        assert set(origin.seconds) >= {"forward", "draw"}
        for depth, node in enumerate(origin.path):
            assert origin.parents[node] == (origin.path[depth - 1] if depth else 0), "the path begins below the root"
            per_depth[depth] += 1
    assert {origin.drafter for origin in origins if len(origin.parents) > 1} == {"guesser"}
    assert sum(len(origin.parents) - 1 for origin in origins) == statistics.drafted
    assert sum(len(origin.path) for origin in origins) == statistics.accepted
    assert [count for count in per_depth if count] == [count for count in statistics.accepted_per_depth if count]


def test_a_text_that_ends_in_the_middle_of_a_run_has_no_origins_past_its_end() -> None:
    model = TableModel(9)
    params = SamplingParams(max_tokens=12, seed=1)
    plain = House(model).answer([1] * 10, params).deltas
    text = [token for delta in plain for token in delta.tokens]
    place = next(i for i in range(2, 12) if text[i] not in text[:i] and i % 4)  # runs are of 1, 4, 4 ... tokens
    house = House(model, Guesser(model, 1.0, full=True), (1, 1, 1), eos=[text[place]])
    deltas = house.answer([1] * 10, params).deltas
    runs = [(len(delta.tokens), len(delta.origin.path)) for delta in deltas if delta.origin is not None]
    assert sum(count for count, _ in runs) == place + 1
    assert runs[-1][0] == runs[-1][1], "the run ends in a drafted token"


def test_a_step_tells_what_it_left_running() -> None:
    model = TableModel(9)
    house = House(model, Guesser(model, 1.0, full=True), (2, 1), max_seqs=1)
    house.add("first", [1] * 10, SamplingParams(max_tokens=7, seed=1))
    house.add("second", [2] * 10, SamplingParams(max_tokens=7, seed=1))
    house.step()
    assert (house.traces[-1].running, house.traces[-1].waiting) == (1, 1)
    assert house.traces[-1].pages >= 3
    house.run()
    assert (house.traces[-1].running, house.traces[-1].waiting, house.traces[-1].pages) == (0, 0, 0)
    assert house.traces[-1].kept_pages > 0, "old text stays findable"
