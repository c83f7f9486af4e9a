"""What telemetry reports, ready for JSON. Rates are shares from 0 to 1, times are seconds; None: no data. Nothing of it
holds text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import msgspec

from foresay.server.metrics.counters import Counters, link, unlink
from foresay.server.metrics.fields import Histogram, declared, value_of
from foresay.server.metrics.records import Gauges, Replica, SelfCheckCounts
from foresay.server.metrics.verdict import judged
from foresay.spec.accept import ByDepth, tokens_per_step

S = TypeVar("S", bound=msgspec.Struct)


def from_counts(kind: type[S], counts: object, **own: Any) -> S:
    """A record with the fields of the same names in ``counts``, if it has them, except for ``own``."""
    return kind(**{name: getattr(counts, name) for name in kind.__struct_fields__ if hasattr(counts, name)} | own)


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None if ``whole`` is 0."""
    return part / whole if whole else None


class Quantiles(msgspec.Struct, frozen=True):
    """The exact mean; the median and the 99th percentile, estimated from a histogram."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, histogram: Histogram) -> Self:
        return cls(ratio(histogram.sum, histogram.count), histogram.quantile(0.5), histogram.quantile(0.99))


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The tiles, for the 60 seconds up to ``until``, the last second in which the engine stepped: an idle server shows
    its last activity. The gauges are current. ``tokens_per_second`` is over the time that the engine stepped.

    speed_up: speed relative to plain decoding: tokens per step of one request, times ``root_seconds`` over the mean
    seconds of a decoding step. spread: how far that may be off, as a share of it, where plain steps are measured now
    and then; 0 where it is estimated. doubt: why it is unknown; empty if it is known. root_seconds: of a step without
    drafts, in the mean. crowded: of the last 10 seconds, the share of the steps' time in which the engine waited
    for a core taken by another program.
    """

    until: int
    tokens_per_second: float | None
    time_to_first_token: Quantiles
    time_per_token: Quantiles
    chunk_gap: Quantiles
    acceptance_rate: float | None
    tokens_per_step: float | None
    speed_up: float | None
    spread: float
    doubt: str
    root_seconds: float
    step_seconds: float | None
    crowded: float
    gauges: Gauges

    @classmethod
    def of(cls, recent: Counters, minute: Counters, until: int, plain: float, gauges: Gauges) -> Self:
        """recent: of the last 10 seconds. minute: up to second ``until``. plain: seconds of a step without drafts, if
        there was none in it."""
        return cls(
            until=until,
            tokens_per_second=ratio(minute.generation_tokens, minute.step_seconds.sum),
            time_to_first_token=Quantiles.of(minute.time_to_first_token_seconds),
            time_per_token=Quantiles.of(minute.time_per_output_token_seconds),
            chunk_gap=Quantiles.of(minute.inter_chunk_latency_seconds),
            acceptance_rate=minute.acceptance_rate,
            tokens_per_step=tokens_per_step(minute.generation_tokens, minute.runs),
            speed_up=minute.speed_up,
            spread=minute.spread,
            doubt=judged(minute).doubt,
            root_seconds=ratio(minute.spec_decode_plain_seconds, minute.decode_tokens) or plain,
            step_seconds=ratio(minute.decode_seconds, minute.decode_steps),
            crowded=recent.crowded,
            gauges=gauges,
        )


class DrafterRates(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one drafter's trees. drafts: trees; share: of all trees. mean_acceptance_length: tokens of a step in
    which it drafted, including the target's own."""

    drafter: str
    drafts: int
    drafted: int
    accepted: int
    share: float
    acceptance_rate: float | None
    mean_acceptance_length: float | None

    @classmethod
    def each(cls, counters: Counters) -> list[Self]:
        """Those of each drafter, the most frequent first."""
        rows = []
        for name, drafts in counters.spec_decode_num_drafts.items():
            drafted, accepted = (
                counters.spec_decode_num_draft_tokens[name],
                counters.spec_decode_num_accepted_tokens.get(name, 0),
            )
            rows.append(
                cls(
                    drafter=name,
                    drafts=drafts,
                    drafted=drafted,
                    accepted=accepted,
                    share=drafts / counters.drafts,
                    acceptance_rate=ratio(accepted, drafted),
                    mean_acceptance_length=ratio(drafts + accepted, drafts),
                )
            )
        return sorted(rows, key=lambda row: (-row.drafts, row.drafter))


class Node(msgspec.Struct, frozen=True):
    """One position in a tree. rank: among the nodes of its depth, from 0 on. parent: the rank of its parent. drafted:
    how often it was drafted; accepted: how often it was accepted."""

    depth: int
    rank: int
    parent: int
    drafted: int
    accepted: int

    @classmethod
    def each(cls, counters: Counters) -> list[Self]:
        """The positions of all trees, depth by depth; one that had several parents with the most frequent."""
        parents: dict[tuple[int, int], dict[int, int]] = {}
        for number, times in counters.nodes.items():
            depth, rank, parent = unlink(number)
            parents.setdefault((depth, rank), {})[parent] = times
        found = []
        for (depth, rank), drafted in sorted(parents.items()):
            accepted = sum(counters.taken.get(link(depth, rank, parent), 0) for parent in drafted)
            found.append(cls(depth, rank, max(drafted, key=drafted.__getitem__), sum(drafted.values()), accepted))
        return found


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One interval. at: its first second, since 1970. seconds: its length, 1 or 60.

    tokens: in texts; runs: steps of single requests that emitted any. busy_seconds: of steps; decode_seconds: of those
    without prefill; plain_seconds: of plain decoding instead, estimated. first_tokens: requests that got their first
    token, after first_token_seconds in total. phases: seconds by phase: plan, propose, mask, forward, draw and commit
    in the engine, deliver in the server. drafters: trees of each. chunk_gaps, token_times: counts by the bounds in
    :class:`HistoryReport`, the last one above all. Gauges as of the last step.
    """

    at: int
    seconds: int
    steps: int
    tokens: int
    runs: int
    drafts: int
    drafted: int
    accepted: int
    busy_seconds: float
    decode_seconds: float
    plain_seconds: float
    first_tokens: int
    first_token_seconds: float
    phases: dict[str, float]
    drafters: dict[str, int]
    chunk_gaps: list[int]
    token_times: list[int]
    running: int
    waiting: int
    pages: int
    kept_pages: int
    finished: int
    failed: int

    @classmethod
    def of(cls, counters: Counters, at: int, seconds: int) -> Self:
        """What was counted in the interval."""
        latest, first = counters.latest, counters.time_to_first_token_seconds
        gauges = ("running", "waiting", "pages", "kept_pages")
        return from_counts(
            cls,
            counters,
            at=at,
            seconds=seconds,
            steps=counters.engine_steps,
            tokens=counters.generation_tokens,
            busy_seconds=counters.step_seconds.sum,
            plain_seconds=counters.spec_decode_plain_seconds,
            phases=counters.step_phase_seconds,
            first_tokens=first.count,
            first_token_seconds=first.sum,
            drafters=counters.spec_decode_num_drafts,
            chunk_gaps=counters.inter_chunk_latency_seconds.counts,
            token_times=counters.time_per_output_token_seconds.counts,
            finished=sum(counters.request_success.values()),
            failed=sum(counters.request_errors.values()),
            **{name: getattr(latest, name) if latest else 0 for name in gauges},
        )


class HistoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The charts' data. seconds: of the last ten minutes; minutes: of the last hour. bounds: of both histograms."""

    now: float
    bounds: list[float]
    seconds: list[Point]
    minutes: list[Point]


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The header. status: the engine's (ready, loading, down, failed), or draining: the server is about to stop.
    drafter: its name; draft: with the source; drafters: each. exact: whether the text is bit for bit that of plain
    decoding. resumed: how often a request continued in another engine. replicas: those that accept requests, if there
    are several engines."""

    model: str
    status: str
    message: str
    version: str
    started: float
    uptime: float
    restarts: int
    resumed: int
    replicas: list[Replica] = []
    target: str = ""
    drafter: str = ""
    draft: str = ""
    drafter_reason: str = ""
    drafters: Sequence[str] = ()
    dtype: str = ""
    device: str = ""
    exact: bool | None = None
    exact_reason: str = ""
    fingerprint: str = ""
    bits: str = ""
    draft_shape: Sequence[int] = ()
    kv_tokens: int = 0
    page_size: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The page's data without the charts. drafters: in the minute of :class:`Live`; drafters_hour: in the last
    hour. nodes: of that minute, by depth and rank, of all tree shapes. accepted_by_depth: of all drafters, in that
    minute and in the hour. totals: counters since the start, by their names in /metrics.
    verdict: in a sentence, whether speculation pays, and if not, why."""

    now: float
    server: Server
    live: Live
    drafters: list[DrafterRates]
    drafters_hour: list[DrafterRates]
    nodes: list[Node]
    accepted_by_depth: ByDepth
    accepted_by_depth_hour: ByDepth
    totals: dict[str, int | float]
    verdict: str
    self_check: SelfCheckCounts

    @classmethod
    def of(
        cls,
        now: float,
        server: Server,
        live: Live,
        minute: Counters,
        hour: Counters,
        totals: Counters,
        self_check: SelfCheckCounts,
    ) -> Self:
        """minute, hour: what was counted in them. totals: everything since the start."""
        unable = "" if minute.unable is None else minute.unable.unable
        values = {name: value_of(getattr(totals, name)) for name in declared(totals)}
        sums = {name: sum(one for _, one in each) for name, each in values.items() if not isinstance(each, Histogram)}
        return cls(
            now=now,
            server=server,
            live=live,
            drafters=DrafterRates.each(minute),
            drafters_hour=DrafterRates.each(hour),
            nodes=Node.each(minute),
            accepted_by_depth=minute.by_depth,
            accepted_by_depth_hour=hour.by_depth,
            totals=sums,
            verdict=f"{judged(minute).sentence} {unable}".rstrip(),
            self_check=self_check,
        )


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One request, finished or running (``finish_reason`` None). cancelled and error are reasons too.

    request_id: the ``X-Request-Id`` of its HTTP request. read_tokens: of the prompt, read so far. cached_tokens: of the
    prompt, found in the KV cache. seed: reproduces the text; None before it is known. drafters: trees of each. Times as
    measured by the server, from the admission of the request; ``tokens_per_second`` of a finished one is the engine's,
    as in the response's ``metrics``.
    """

    id: str
    request_id: str
    started: float
    temperature: float
    seed: int | None
    prompt_tokens: int
    read_tokens: int
    cached_tokens: int
    output_tokens: int
    time_to_first_token: float | None
    seconds: float
    tokens_per_second: float | None
    steps: int
    drafts: int
    drafted: int
    accepted: int
    discarded: int
    acceptance_rate: float | None
    tokens_per_step: float | None
    drafters: dict[str, int]
    finish_reason: str | None
