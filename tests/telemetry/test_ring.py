"""Seconds, minutes and totals: nothing is lost or counted twice while time goes by."""

from __future__ import annotations

import random

import msgspec
import pytest

from foresay.server.metrics.counters import Counters, Shape
from foresay.server.metrics.fields import TOKEN_BOUNDS, Histogram
from foresay.server.metrics.report import Point
from foresay.server.metrics.ring import KEPT, MINUTES, SECONDS, Ring

SHAPE = Shape([-1, 0, 1])
START = 1_700_000_000


def run(counters: Counters) -> None:
    counters.run("d", SHAPE, 1, 2)
    counters.engine_steps += 1


def decoded(points: list[tuple[int, msgspec.Raw]]) -> list[Point]:
    found = [msgspec.json.decode(raw, type=Point) for _, raw in points]
    assert [point.at for point in found] == [begin for begin, _ in points]
    return found


def test_the_seconds_of_ten_minutes_the_minutes_of_an_hour_and_everything() -> None:
    ring, dice, now = Ring(), random.Random(1), float(START)
    at = []
    while now < START + 5000:
        run(ring.at(now))
        at.append(int(now))
        now += dice.choice([0.3, 0.9, 2.0, 45.0])
    now = max(at) + 1.0
    seconds, minutes = decoded(ring.seconds(now)), decoded(ring.minutes(now))
    assert [point.at for point in seconds] == sorted({second for second in at if now - second <= SECONDS})
    assert sum(point.runs for point in seconds) == sum(now - second <= SECONDS for second in at)
    assert all(minute.at % 60 == 0 for minute in minutes) and len(minutes) <= MINUTES + 2
    for minute in minutes:
        assert minute.runs == sum(second // 60 == minute.at // 60 for second in at)
    total = ring.total()
    assert total.runs == total.drafts == len(at)
    assert (total.generation_tokens, total.drafted, total.accepted) == (2 * len(at), 2 * len(at), len(at))


def test_what_was_counted_in_a_span() -> None:
    ring, dice, now = Ring(), random.Random(2), float(START)
    counted: dict[int, int] = {}
    for _ in range(4000):
        now += dice.choice([0.1, 0.4, 1.0, 1.0, 2.0, 7.0, 95.0] if dice.random() < 0.1 else [0.1, 0.4, 1.0])
        run(ring.at(now))
        counted[int(now)] = counted.get(int(now), 0) + 1
        if dice.random() < 0.05:
            begin, end = sorted(int(now) + 1 - dice.randint(0, KEPT - 1) for _ in range(2))
            for span, until in ((ring.since(begin), int(now) + 1), (ring.between(begin, end), end)):
                within = sum(runs for second, runs in counted.items() if begin <= second < until)
                assert (span.runs, span.engine_steps, span.spec_decode_tokens_per_step.count) == (
                    within,
                    within,
                    within,
                )
                assert span.spec_decode_num_drafts == ({"d": within} if within else {})
                assert span.spec_decode_num_accepted_tokens_per_pos == ({("d", "0"): within} if within else {})
                assert span.by_depth.cumulative == ([1.0, 0.0] if within else [])
            hour = int(now) - 60 * MINUTES
            over = sum(runs for second, runs in counted.items() if hour - hour % 60 <= second)
            assert ring.hour(now).runs == over


def test_the_running_second_is_in_the_totals_and_not_in_the_charts() -> None:
    ring = Ring()
    run(ring.at(START + 0.1))
    run(ring.at(START + 0.9))
    assert ring.total().runs == 2
    assert ring.seconds(START + 0.95) == ring.minutes(START + 0.95) == []
    assert [point.runs for point in decoded(ring.seconds(START + 1.0))] == [2]
    run(ring.at(START + 7.0))
    assert [point.runs for point in decoded(ring.minutes(START + 7.0))] == [2], "it has the finished seconds"
    assert [(point.at, point.runs) for point in decoded(ring.seconds(START + 8, START + 1))] == [(START + 7, 1)]
    assert (ring.since(START).runs, ring.since(START + 1).runs, ring.between(START, START + 7).runs) == (3, 1, 2)


def test_an_idle_server_has_nothing_to_show() -> None:
    ring = Ring()
    assert (ring.seconds(START), ring.minutes(START), ring.total().runs) == ([], [], 0)
    run(ring.at(START))
    assert ring.since(START + 3540).runs == 0
    assert ring.seconds(START + 3600) == []


def test_quantiles_of_a_histogram() -> None:
    dice, histogram = random.Random(3), Histogram(TOKEN_BOUNDS)
    values = sorted(dice.lognormvariate(-5, 1) for _ in range(5000))
    for value in values:
        histogram.observe(value)
    assert histogram.sum == pytest.approx(sum(values))
    for share in (0.1, 0.5, 0.99):
        found = histogram.quantile(share)
        assert found == pytest.approx(values[int(share * len(values))], rel=0.15)
    assert Histogram(TOKEN_BOUNDS).quantile(0.5) is None
    beyond = Histogram((1.0,))
    beyond.observe(50.0)
    assert beyond.quantile(0.5) == 1.0


def test_a_bound_counts_what_equals_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
