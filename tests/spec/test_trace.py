"""Counting what happened, in numbers one can check by hand: runs, cuts, and where each token comes from."""

from __future__ import annotations

import time

import pytest

from foresay.spec.accept import ByDepth, summed, tokens_per_step
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import SequenceTrace, Statistics, Stopwatch
from tests.spec.house import House
from tests.spec.tables import Guesser, TableModel


def _trace(*steps: tuple[list[int], int, int]) -> SequenceTrace:
    """A trace of steps: depths drafted, accepted, emitted."""
    trace = SequenceTrace()
    for depths, accepted, emitted in steps:
        trace.record(depths, accepted, emitted)
    return trace


#: A prefill, a chain of three with two accepted, a tree with none, a chain with all.
LIFE = (([], 0, 1), ([1, 2, 3], 2, 3), ([1, 1, 2, 2, 2], 0, 1), ([1, 2, 3], 3, 4))


def _summary(trace: SequenceTrace, completion_tokens: int) -> Statistics:
    return trace.statistics(prompt_tokens=7, cached_tokens=4, completion_tokens=completion_tokens, levels=3)


def test_a_life_in_numbers() -> None:
    statistics = _summary(_trace(*LIFE), 9)
    assert (statistics.prompt_tokens, statistics.cached_tokens, statistics.completion_tokens) == (7, 4, 9)
    assert (statistics.steps, statistics.drafted, statistics.accepted) == (4, 11, 5)
    assert statistics.drafted_per_depth == [4, 5, 2]
    assert statistics.accepted_per_depth == [2, 2, 1]
    assert statistics.acceptance_histogram == [2, 0, 1, 1]
    assert statistics.num_spec_tokens == 3
    assert statistics.per_step_drafted == [0, 3, 5, 3]
    assert statistics.per_step_accepted == [0, 2, 0, 3]
    assert (statistics.discarded, statistics.preemptions) == (0, 0)


@pytest.mark.parametrize(
    ("surplus", "accepted"),
    [
        (0, [0, 2, 0, 3]),
        (1, [0, 2, 0, 3]),  # the bonus token goes first; it was not drafted
        (2, [0, 2, 0, 2]),
        (3, [0, 2, 0, 1]),
        (4, [0, 2, 0, 0]),  # the whole last run
        (5, [0, 2, 0, 0]),
        (6, [0, 2, 0, 0]),
        (7, [0, 1, 0, 0]),
        (8, [0, 0, 0, 0]),
        (9, [0, 0, 0, 0]),
    ],
)
def test_a_text_cut_short(surplus: int, accepted: list[int]) -> None:
    trace = _trace(*LIFE)
    trace.cut(surplus)
    statistics = _summary(trace, 9 - surplus)
    assert statistics.per_step_accepted == accepted
    assert statistics.accepted == sum(accepted)
    assert statistics.accepted_per_depth == [sum(1 for a in accepted if a >= depth) for depth in (1, 2, 3)]
    assert statistics.acceptance_histogram == [accepted.count(j) for j in range(4)]
    assert statistics.discarded == surplus
    assert statistics.per_step_drafted == [0, 3, 5, 3]
    assert statistics.decode_tokens_per_second >= 0.0


def test_times() -> None:
    before = time.perf_counter()
    trace = SequenceTrace()
    trace.started = time.perf_counter()
    trace.record([], 0, 1)
    time.sleep(0.002)
    trace.record([1, 2], 2, 3)
    spent = time.perf_counter() - before
    statistics = _summary(trace, 4)
    assert 0.0 < statistics.seconds["queue"] <= statistics.time_to_first_token < spent
    assert 0.002 <= statistics.decode_seconds < spent
    # Three tokens came after the first run; that one's time is the time to first token.
    assert statistics.decode_tokens_per_second == pytest.approx(3 / statistics.decode_seconds)


def test_a_stopwatch_charges_every_moment_once() -> None:
    before = time.perf_counter()
    watch = Stopwatch()
    time.sleep(0.002)
    watch.lap("draw")
    time.sleep(0.001)
    watch.lap("commit")
    time.sleep(0.001)
    watch.lap("draw")
    spent = time.perf_counter() - before
    assert set(watch.seconds) == {"draw", "commit"}
    assert watch.seconds["draw"] >= 0.003
    assert watch.seconds["commit"] >= 0.001
    assert sum(watch.seconds.values()) <= spent


def test_a_phase_that_no_lap_could_tell_apart_gets_its_share() -> None:
    watch = Stopwatch()
    watch.seconds = {"forward": 4.0, "propose": 1.0}
    watch.share("forward", "propose", 0.25)
    assert watch.seconds == {"forward": 3.0, "propose": 2.0}


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


def test_both_ways_of_telling_how_deep() -> None:
    found = ByDepth.of([6, 3, 3], 10)
    assert found.cumulative == [0.6, 0.3, 0.3]
    assert found.conditional == [0.6, 0.5, 1.0]
    assert str(found) == "cumulative 0.60 0.30 0.30, conditional 0.60 0.50 1.00"


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


def test_sums_by_position() -> None:
    assert summed([[1, 2], [], [1, 1, 1]]) == [2, 3, 1]
    assert summed([]) == []
