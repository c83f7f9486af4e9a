"""One request's stats and the counters of all: the same counts, whatever was cut off."""

from __future__ import annotations

import random
from itertools import count

import pytest

from foresay.server.metrics.counters import Shape, shape_of, unlink
from foresay.server.metrics.fields import Histogram
from foresay.server.metrics.report import Node
from foresay.server.metrics.ring import Ring
from foresay.server.metrics.telemetry import RequestStats
from foresay.server.text.choice import Piece
from foresay.spec.accept import summed
from foresay.spec.request import Delta, Origin, RequestEnd
from foresay.spec.trace import Statistics
from tests.telemetry.counted import chosen, kept


def stats(ring: Ring, id: str = "r", prompt: int = 3) -> RequestStats:
    return RequestStats(chosen(id, prompt), "", "", ring)


def ticking(step: float = 0.001) -> Ring:
    """Ring whose clock goes on by ``step`` each time it is read."""
    ticks = count()
    return Ring(lambda: 1_000_000.0 + step * next(ticks))


def random_origin(dice: random.Random, number: int) -> Origin:
    """A random tree and a path down from its root."""
    parents, path = [-1], [0]
    for node in range(1, dice.randint(1, 12)):
        parents.append(dice.randrange(node))
        if parents[node] == path[-1] and dice.random() < 0.6:
            path.append(node)
    return Origin(number, dice.choice(["big", "small"]), parents, 0, path[1:], {"forward": 0.001})


def run_randomly(dice: random.Random, ring: Ring, id: str) -> tuple[RequestStats, Statistics]:
    """A request of random steps whose text ends somewhere in them; what the stats say, and what its choice says."""
    entry = stats(ring, id)
    steps, surplus, emitted = dice.randint(1, 12), dice.randint(0, 15), 0
    origins = [random_origin(dice, number) for number in range(1, steps + 1)]
    runs = [len(origin.path) + 1 for origin in origins]
    total = max(sum(runs) - surplus, 1)
    for origin, run in zip(origins, runs, strict=True):
        count = max(0, min(run, total - emitted))
        emitted += run
        piece = Piece(text="x" * count, token_ids=[7] * count, offsets=list(range(count)))
        kept(entry, Delta(id=id, tokens=[7] * run, origin=origin), piece)
        entry.delivered(count)
    kept(entry, Delta(id=id, tokens=[], finish_reason="stop", ending=RequestEnd()), Piece(finish_reason="stop"))
    return entry, entry._counts


@pytest.mark.parametrize("seed", range(40))
def test_random_runs_count_as_the_engine_counts_them(seed: int) -> None:
    dice, ring = random.Random(seed), ticking(step=0.02)
    all_statistics = []
    for number in range(6):
        entry, statistics = run_randomly(dice, ring, str(number))
        summary = entry.summary()
        assert (summary.steps, summary.drafted, summary.accepted) == (
            statistics.steps,
            statistics.drafted,
            statistics.accepted,
        )
        assert (summary.output_tokens, summary.discarded) == (statistics.completion_tokens, statistics.discarded)
        all_statistics.append(statistics)
    totals = ring.total()
    for counts, field in (
        (totals.spec_decode_num_draft_tokens_per_pos, "drafted_per_depth"),
        (totals.spec_decode_num_accepted_tokens_per_pos, "accepted_per_depth"),
    ):
        by_depth = summed([0] * int(depth) + [count] for (_, depth), count in counts.items())
        assert by_depth == summed(getattr(statistics, field) for statistics in all_statistics)
    assert totals.drafts == sum(1 for one in all_statistics for drafted in one.per_step_drafted if drafted)
    assert totals.spec_decode_num_discarded_tokens == sum(one.discarded for one in all_statistics)
    assert totals.request_success == {"stop": 6, "length": 0, "abort": 0, "error": 0}
    tree = Node.each(totals)
    assert sum(node.drafted for node in tree) == totals.drafted
    assert sum(node.accepted for node in tree) == totals.accepted
    by_depth = [sum(node.accepted for node in tree if node.depth == depth) for depth in range(1, 13)]
    assert by_depth[: len(summed(one.accepted_per_depth for one in all_statistics))] == summed(
        one.accepted_per_depth for one in all_statistics
    )


def test_the_positions_of_a_tree() -> None:
    #      0
    #    1   2
    #   3 4  5
    shape = Shape([-1, 0, 0, 1, 1, 2])
    assert (shape.drafted, shape.per_depth) == (5, [2, 3])
    assert [unlink(place) for place in shape.links] == [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (2, 2, 1)]
    assert [unlink(place) for place in shape.trails[5]] == [(1, 1, 0), (2, 2, 1)]
    assert shape_of((-1, 0)) is shape_of((-1, 0)) is not shape_of((-1, 0, 1))


def test_gaps_between_chunks_and_the_time_of_a_token() -> None:
    now = [100.0]
    entry = stats(Ring(lambda: now[0]))
    for at, tokens in ((100.5, 1), (100.5036, 3), (100.5036, 0), (100.5095, 2)):
        now[0] = at
        entry.delivered(tokens)
    totals = entry._ring.total()
    assert totals.time_to_first_token_seconds.sum == pytest.approx(0.5)
    assert (totals.inter_chunk_latency_seconds.count, totals.time_per_output_token_seconds.count) == (2, 5)
    assert (
        totals.inter_chunk_latency_seconds.sum
        == pytest.approx(totals.time_per_output_token_seconds.sum)
        == pytest.approx(0.0095)
    )
    assert counted(totals.inter_chunk_latency_seconds) == {0.004: 1, 0.0065: 1}
    assert counted(totals.time_per_output_token_seconds) == {0.0015: 3, 0.003: 2}


@pytest.mark.parametrize("whole", [False, True])
def test_the_response_and_the_list_have_one_first_token_and_one_rate(whole: bool) -> None:
    """Whether the answer comes in several deltas or in one, which ends it too."""
    now = [100.0]
    entry = stats(Ring(lambda: now[0]))
    piece = Piece(text="abcd", token_ids=[7] * 4, offsets=[0, 1, 2, 3])
    now[0] = 100.5
    if not whole:
        kept(entry, Delta(id="r", tokens=[7], elapsed=0.4), Piece(text="a", token_ids=[7], offsets=[0]))
        entry.delivered(1)
        now[0], piece = 101.0, Piece(text="bcd", token_ids=[7] * 3, offsets=[1, 2, 3])
    piece.finish_reason = "stop"
    last = Delta(id="r", tokens=piece.token_ids, finish_reason="stop", elapsed=0.65, ending=RequestEnd())
    kept(entry, last, piece)
    entry.delivered(len(piece.token_ids))
    statistics, first = entry._counts, entry._ring.total().time_to_first_token_seconds
    assert entry.summary().time_to_first_token == statistics.time_to_first_token == first.sum == 0.5
    rates = entry.summary().tokens_per_second, statistics.decode_tokens_per_second
    assert rates == (None, 0.0) if whole else rates == pytest.approx((12.0, 12.0))


def counted(histogram: Histogram) -> dict[float, int]:
    bounds = [*histogram.bounds, float("inf")]
    return {bound: times for bound, times in zip(bounds, histogram.counts, strict=True) if times}
