"""Counting what happened: runs, cuts and the summary, in numbers one can check by hand."""

from __future__ import annotations

import time

import msgspec
import pytest

from foresay.spec.trace import SequenceTrace, Statistics, Stopwatch


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


def test_nothing_happened() -> None:
    statistics = _summary(SequenceTrace(), 0)
    assert (statistics.steps, statistics.drafted, statistics.accepted) == (0, 0, 0)
    assert statistics.acceptance_histogram == [0, 0, 0, 0]
    assert statistics.time_to_first_token == statistics.decode_seconds == statistics.decode_tokens_per_second == 0.0


def test_a_drafter_deeper_than_configured_widens_the_histogram() -> None:
    statistics = _summary(_trace(([1, 2, 3, 4, 5], 5, 6)), 6)
    assert statistics.acceptance_histogram == [0, 0, 0, 0, 0, 1]
    assert statistics.num_spec_tokens == 5


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


def test_phases_add_up() -> None:
    trace = SequenceTrace()
    trace.charge({"forward": 1.0, "draw": 0.5})
    trace.charge({"forward": 2.0})
    assert _summary(trace, 0).seconds == {"queue": 0.0, "forward": 3.0, "draw": 0.5}


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


def test_statistics_cross_the_wire_unchanged() -> None:
    statistics = _summary(_trace(*LIFE), 9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(statistics), type=Statistics) == statistics


def test_a_phase_that_no_lap_could_tell_apart_gets_its_share() -> None:
    watch = Stopwatch()
    watch.seconds = {"forward": 4.0, "propose": 1.0}
    watch.share("forward", "propose", 0.25)
    assert watch.seconds == {"forward": 3.0, "propose": 2.0}
