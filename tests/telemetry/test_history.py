"""Seconds, minutes and totals: nothing is lost or counted twice while time goes by."""

from __future__ import annotations

import random

import pytest

from foresay.server.observe.telemetry.counts import TOKEN_BOUNDS, Histogram, Shape
from foresay.server.observe.telemetry.history import MINUTES, SECONDS, TimeSeries
from foresay.server.observe.telemetry.window import Window

SHAPE = Shape([-1, 0, 1])
START = 1_700_000_000


def run(window: Window, kept: int = 2) -> None:
    entry = "d", SHAPE, 1, kept
    window.new_runs[entry] = window.new_runs.get(entry, 0) + 1
    window.steps += 1


def test_the_seconds_of_ten_minutes_the_minutes_of_an_hour_and_everything() -> None:
    history, dice, now = TimeSeries(), random.Random(1), float(START)
    at = []
    while now < START + 5000:
        run(history.at(now))
        at.append(int(now))
        now += dice.choice([0.3, 0.9, 2.0, 45.0])
    now = max(at) + 1.0
    seconds, minutes = history.seconds(now), history.minutes(now)
    assert [window.second for window in seconds] == sorted({second for second in at if now - second <= SECONDS})
    assert sum(window.runs for window in seconds) == sum(now - second <= SECONDS for second in at)
    whole = [minute.second for minute in minutes[1:]]
    assert all(second % 60 == 0 for second in whole) and len(minutes) <= MINUTES + 2
    assert {second // 60 for second in at if second >= minutes[1].second} == {second // 60 for second in whole}
    assert history.total().runs == history.total().drafts == len(at)
    assert history.total().tokens == 2 * len(at)


def test_sums_of_long_and_short_spans_are_those_of_seconds() -> None:
    history, dice, now = TimeSeries(), random.Random(2), float(START)
    counted: dict[int, int] = {}
    for _ in range(4000):
        now += dice.choice([0.1, 0.4, 1.0, 1.0, 2.0, 7.0, 95.0] if dice.random() < 0.1 else [0.1, 0.4, 1.0])
        run(history.at(now))
        counted[int(now)] = counted.get(int(now), 0) + 1
        if dice.random() < 0.05:
            seconds = dice.randint(1, SECONDS)
            begin = int(now) - seconds
            within = sum(runs for second, runs in counted.items() if second > begin)
            window = history.window(now, seconds)
            assert (window.runs, window.steps, window.run_lengths.count) == (within, within, within)
            hour = int(now) - 60 * MINUTES
            first = hour - hour % 60
            over = sum(runs for second, runs in counted.items() if first <= second < int(now))
            assert history.hour(now).runs == over


def test_the_running_second_is_in_the_totals_and_not_in_the_charts() -> None:
    history = TimeSeries()
    run(history.at(START + 0.1))
    run(history.at(START + 0.9))
    assert history.total().runs == 2
    assert history.seconds(START + 0.95) == []
    assert [window.runs for window in history.seconds(START + 1.0)] == [2]
    run(history.at(START + 7.0))
    assert [(window.second, window.runs) for window in history.since(START)] == [(START, 2), (START + 7, 1)]
    assert history.window(START + 7.5, 7).runs == 1
    assert history.window(START + 7.5, 8).runs == 3


def test_an_idle_server_has_nothing_to_show() -> None:
    history = TimeSeries()
    assert (history.seconds(START), history.minutes(START), history.total().runs) == ([], [], 0)
    run(history.at(START))
    assert history.window(START + 3600, 60).runs == 0
    assert history.seconds(START + 3600) == []


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
