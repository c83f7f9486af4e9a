"""Counting what happened, in numbers one can check by hand: runs, cuts, and where each token comes from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foresay.spec.accept import ByDepth, summed, tokens_per_step
from foresay.spec.request import Delta, Origin, RequestEnd
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics, Stopwatch
from tests.spec.harness import Harness
from tests.spec.tables import Guesser, TableModel

CHAIN = [-1, 0, 1, 2]
#: A prefill, a chain of three with two accepted, a tree with none, a chain with all.
LIFE = (([-1], 0), (CHAIN, 2), ([-1, 0, 0, 1, 1, 2], 0), (CHAIN, 3))


def _summary(steps: Sequence[tuple[list[int], int]], total: int) -> Statistics:
    """Of steps: trees, and how many nodes of a chain in them were accepted. total: tokens in the text."""
    counts = Statistics(prompt_tokens=7)
    for number, (parents, accepted) in enumerate(steps):
        origin = Origin(number, "", parents, 0, list(range(1, accepted + 1)), {})
        kept = min(accepted + 1, total - counts.completion_tokens)
        counts.take(Delta(id="r", tokens=[5] * (accepted + 1), origin=origin, elapsed=number, cached_tokens=4), kept)
    counts.take(Delta(id="r", tokens=[], ending=RequestEnd(levels=3)), 0)
    return counts


def test_a_life_in_numbers() -> None:
    statistics = _summary(LIFE, 9)
    assert (statistics.prompt_tokens, statistics.cached_tokens, statistics.completion_tokens) == (7, 4, 9)
    assert (statistics.steps, statistics.drafted, statistics.accepted) == (4, 11, 5)
    assert statistics.drafted_per_depth == [4, 5, 2]
    assert statistics.accepted_per_depth == [2, 2, 1]
    assert statistics.num_spec_tokens == 3
    assert statistics.per_step_drafted == [0, 3, 5, 3]
    assert statistics.per_step_accepted == [0, 2, 0, 3]
    assert statistics.discarded == 0


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
    statistics = _summary(LIFE, 9 - surplus)
    assert statistics.per_step_accepted == accepted
    assert statistics.accepted == sum(accepted)
    assert statistics.accepted_per_depth == [sum(1 for a in accepted if a >= depth) for depth in (1, 2, 3)]
    assert statistics.discarded == surplus
    assert statistics.per_step_drafted == [0, 3, 5, 3]
    assert statistics.decode_tokens_per_second >= 0.0


class Clock:
    """Seconds that pass where a test lets them."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock.perf_counter)
    return clock


def test_times() -> None:
    statistics, phases = Statistics(), {"forward": 1.5}
    statistics.take(Delta(id="r", tokens=[5], queued=1.0, elapsed=3.0, origin=Origin(1, "", [-1], 0, [], phases)), 1)
    statistics.take(Delta(id="r", tokens=[5] * 3, elapsed=9.0, origin=Origin(2, "", CHAIN, 0, [1, 2], phases)), 3)
    assert statistics.seconds == {"queue": 1.0, "prefill": 2.0, "forward": 1.5}
    assert (statistics.seconds["queue"], statistics.time_to_first_token, statistics.decode_seconds) == (1.0, 3.0, 6.0)
    assert statistics.decode_tokens_per_second == 0.5, "three tokens came after the first run"


def test_a_stopwatch_charges_every_moment_once(clock: Clock) -> None:
    watch = Stopwatch()
    for seconds, phase in ((2.0, "draw"), (1.0, "commit"), (4.0, "draw")):
        clock.now += seconds
        watch.lap(phase)
    assert watch.seconds == {"draw": 6.0, "commit": 1.0}


def test_a_phase_that_no_lap_could_separate_gets_its_share() -> None:
    watch = Stopwatch()
    watch.seconds = {"forward": 4.0, "propose": 1.0}
    watch.share("forward", "propose", 0.25)
    assert watch.seconds == {"forward": 3.0, "propose": 2.0}


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_origins_add_up_to_the_statistics(right, temperature) -> None:
    model = TableModel(9)
    harness = Harness(model, Guesser(model, right, full=True), (2, 2, 1))
    answer = harness.answer([1] * 10, SamplingParams(max_tokens=23, seed=1, temperature=temperature))
    deltas = [delta for delta in answer.deltas if delta.tokens]
    statistics = answer.statistics
    per_depth = [0] * 3
    origins = [delta.origin for delta in deltas if delta.origin is not None]
    assert len(origins) == len(deltas)
    for origin in origins:
        assert origin.step > 0
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
    plain = Harness(model).answer([1] * 10, params).deltas
    text = [token for delta in plain for token in delta.tokens]
    position = next(i for i in range(2, 12) if text[i] not in text[:i] and i % 4)  # runs are of 1, 4, 4 ... tokens
    harness = Harness(model, Guesser(model, 1.0, full=True), (1, 1, 1), eos=[text[position]])
    deltas = harness.answer([1] * 10, params).deltas
    runs = [(len(delta.tokens), len(delta.origin.path)) for delta in deltas if delta.origin is not None]
    assert sum(count for count, _ in runs) == position + 1
    assert runs[-1][0] == runs[-1][1], "the run ends in a drafted token"


def test_a_step_reports_what_it_left_running() -> None:
    model = TableModel(9)
    harness = Harness(model, Guesser(model, 1.0, full=True), (2, 1), max_seqs=1)
    harness.add("first", [1] * 10, SamplingParams(max_tokens=7, seed=1))
    harness.add("second", [2] * 10, SamplingParams(max_tokens=7, seed=1))
    harness.step()
    assert (harness.traces[-1].running, harness.traces[-1].waiting) == (1, 1)
    assert harness.traces[-1].pages >= 3
    harness.run()
    assert (harness.traces[-1].running, harness.traces[-1].waiting, harness.traces[-1].pages) == (0, 0, 0)
    assert harness.traces[-1].kept_pages > 0, "old text stays findable"


def test_both_ways_of_naming_the_depth() -> None:
    found = ByDepth.of([6, 3, 3], 10)
    assert found.cumulative == [0.6, 0.3, 0.3]
    assert found.conditional == [0.6, 0.5, 1.0]
    assert str(found) == "cumulative 0.60 0.30 0.30, conditional 0.60 0.50 1.00"


def test_steps_without_drafts_count_for_tokens_and_not_for_depths() -> None:
    steps = [([-1], 0), (CHAIN, 2), ([-1], 0), (CHAIN, 3)]
    summary = _summary(steps, 7)  # a stop string two tokens before the end
    assert summary.tokens_per_step == tokens_per_step(7, 4) == 1.75
    assert summary.by_depth == ByDepth(2, [1.0, 1.0, 0.0], [1.0, 1.0, 0.0])
    assert tokens_per_step(0, 0) is None


def test_sums_by_position() -> None:
    assert summed([[1, 2], [], [1, 1, 1]]) == [2, 3, 1]
    assert summed([]) == []
