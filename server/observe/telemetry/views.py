"""Windows as the structs of :mod:`foresay.server.observe.telemetry.report`, made in slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from foresay.server.observe.telemetry import report
from foresay.server.observe.telemetry.counts import Histogram, link, unlink
from foresay.server.observe.telemetry.window import Window, judged
from foresay.spec.accept import ByDepth, summed, tokens_per_step

#: After this long the event loop runs. A single piece of work takes up to five times as long.
SLICE_SECONDS = 50e-6


class WorkSlices:
    """Splits work into slices; the first begins now. Call ``pause`` between consistent states."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pause(self) -> None:
        """Let other tasks run, if the slice is over."""
        if time.perf_counter() - self._began > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


BUSY_SECONDS = 10
LIVE_SECONDS = 60


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None if ``whole`` is 0."""
    return part / whole if whole else None


def quantiles(histogram: Histogram) -> report.Quantiles:
    """The mean, the median and the 99th percentile."""
    return report.Quantiles(ratio(histogram.sum, histogram.count), histogram.quantile(0.5), histogram.quantile(0.99))


def live(recent: Sequence[Window], whole: Window, until: int, plain: float, gauges: report.Gauges) -> report.Live:
    """The tiles. recent: the last ``BUSY_SECONDS``. whole: the sum of the ``LIVE_SECONDS`` up to second ``until``.
    plain: seconds of a step without drafts."""
    busy = sum(window.step_seconds.sum for window in recent)
    return report.Live(
        until=until,
        tokens_per_second=ratio(whole.tokens, whole.step_seconds.sum),
        time_to_first_token=quantiles(whole.time_to_first_token),
        time_per_token=quantiles(whole.token_times),
        chunk_gap=quantiles(whole.chunk_gaps),
        acceptance_rate=whole.acceptance_rate,
        tokens_per_step=tokens_per_step(whole.tokens, whole.runs),
        speed_up=whole.speed_up,
        spread=whole.spread,
        doubt=judged(whole).doubt,
        root_seconds=ratio(whole.plain_seconds, whole.decode_tokens) or plain,
        step_seconds=ratio(whole.decode_seconds, whole.decode_steps),
        crowded=ratio(sum(window.waited_seconds for window in recent), busy) or 0.0,
        gauges=gauges,
    )


def drafters(window: Window) -> list[report.DrafterRates]:
    """Each drafter's trees, the most frequent drafter first."""
    rows = [
        report.from_counts(
            report.DrafterRates,
            drafting,
            drafter=name,
            share=drafting.drafts / window.drafts,
            acceptance_rate=ratio(drafting.accepted, drafting.drafted),
            mean_acceptance_length=ratio(drafting.drafts + drafting.accepted, drafting.drafts),
        )
        for name, drafting in window.drafting.items()
    ]
    return sorted(rows, key=lambda row: (-row.drafts, row.drafter))


def nodes(window: Window) -> list[report.Node]:
    """The positions of the trees, depth by depth. A position that had several parents is reported with the most
    frequent."""
    parents: dict[tuple[int, int], dict[int, int]] = {}
    for number, times in window.places.drafted.items():
        depth, rank, parent = unlink(number)
        parents.setdefault((depth, rank), {})[parent] = times
    found = []
    for (depth, rank), drafted in sorted(parents.items()):
        taken = sum(window.places.taken.get(link(depth, rank, parent), 0) for parent in drafted)
        found.append(report.Node(depth, rank, max(drafted, key=drafted.__getitem__), sum(drafted.values()), taken))
    return found


def by_depth(window: Window) -> ByDepth:
    """How deep drafts were accepted, of all drafters."""
    return ByDepth.of(summed(drafting.accepted_per_depth for drafting in window.drafting.values()), window.drafts)


def woken(window: Window) -> list[report.Woken]:
    """Experts, by the rows of steps."""
    steps = sorted((int(rows), rows, steps) for rows, steps in window.woke.items())
    return [report.Woken(number, count, window.woken[rows] / count) for number, rows, count in steps]


async def points(windows: Sequence[Window], seconds: int) -> list[report.Point]:
    """Buckets of a chart, each as the JSON of its :class:`~foresay.server.observe.telemetry.report.Point`: encoded
    once, since a finished bucket no longer changes."""
    slices, found = WorkSlices(), []
    for window in windows:
        if window.encoded is None:
            await slices.pause()
            window.encoded = msgspec.Raw(msgspec.json.encode(point(window, seconds)))
        found.append(window.encoded)
    return cast("list[report.Point]", found)


def point(window: Window, seconds: int) -> report.Point:
    """One bucket of a chart."""
    latest, first = window.latest, window.time_to_first_token
    gauges = ("running", "waiting", "pages", "kept_pages")
    return report.from_counts(
        report.Point,
        window,
        at=window.second,
        seconds=seconds,
        tokens_per_step=tokens_per_step(window.tokens, window.runs),
        tree_nodes=ratio(window.drafted, window.drafts),
        busy_seconds=window.step_seconds.sum,
        doubted_seconds=sum(window.doubted.values()),
        first_tokens=first.count,
        first_token_seconds=first.sum,
        drafters={name: drafting.drafts for name, drafting in window.drafting.items()},
        accepted_per_depth=summed(drafting.accepted_per_depth for drafting in window.drafting.values()),
        chunk_gaps=list(window.chunk_gaps.counts),
        token_times=list(window.token_times.counts),
        finished=sum(window.finished.values()),
        failed=sum(window.failed.values()),
        **{name: getattr(latest, name) if latest else 0 for name in gauges},
    )
