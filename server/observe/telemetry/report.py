"""What telemetry reports, ready for JSON. Rates are shares from 0 to 1, times are seconds; None: no data.

Only :class:`RequestSummary` and :class:`RequestDetail` hold text, and these are shown only to the key that sent the
request.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from foresay.server.observe.telemetry.counts import SelfCheckCounts
from foresay.spec.accept import ByDepth

S = TypeVar("S", bound=msgspec.Struct)


def told(kind: type[S], counts: object, **own: Any) -> S:
    """A record with the fields of the same names in ``counts``, except for ``own``."""
    return kind(**{name: getattr(counts, name) for name in kind.__struct_fields__ if name not in own}, **own)


class Quantiles(msgspec.Struct, frozen=True):
    """The mean, exactly; the middle and what one in a hundred exceeds, as a histogram tells them."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None


class Gauges(msgspec.Struct, frozen=True):
    """What is going on now: requests that run and that wait, and the shares of the KV pages that running requests use
    and that only keep old text findable."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    kv_kept: float = 0.0


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The tiles, of the 60 seconds up to ``until``, the last one in which the engine stepped: an idle server shows what
    it did last. The gauges are as of now. ``tokens_per_second`` is over the time that the engine stepped.

    speed_up: estimated, how many times faster than plain decoding: tokens per step of one request, times
    ``root_seconds`` over the mean seconds of a decoding step. doubt: why that cannot be told; empty if it can.
    root_seconds: of a step without drafts, as it would be now. crowded: of the 10 seconds up to now, the share of the
    steps' time in which the engine waited for a core that something else had.
    """

    until: int
    tokens_per_second: float | None
    time_to_first_token: Quantiles
    time_per_token: Quantiles
    chunk_gap: Quantiles
    acceptance_rate: float | None
    tokens_per_step: float | None
    speed_up: float | None
    doubt: str
    root_seconds: float
    step_seconds: float | None
    crowded: float
    gauges: Gauges


class DrafterRates(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one drafter's trees. drafts: trees; share: of all trees; by depth from 1 on.
    mean_acceptance_length: tokens of a step in which it drafted, the target's own included."""

    drafter: str
    drafts: int
    drafted: int
    accepted: int
    share: float
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    drafted_per_depth: list[int]
    accepted_per_depth: list[int]


class ShadowRates(msgspec.Struct, frozen=True, kw_only=True):
    """What a shadow drafter would have had accepted, of requests that are over. milliseconds: what drafting
    took it, per step."""

    drafter: str
    steps: int
    drafts: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    tokens_per_step: float | None
    mean_acceptance_length: float | None
    milliseconds: float | None
    drafted_per_depth: list[int]
    accepted_per_depth: list[int]


class Node(msgspec.Struct, frozen=True):
    """One place of a tree. rank: among the nodes of its depth, from 0 on. parent: the rank of its parent, one depth up.
    drafted: how often there was one; accepted: how often it was taken."""

    depth: int
    rank: int
    parent: int
    drafted: int
    accepted: int


class Woken(msgspec.Struct, frozen=True):
    """Experts that a step without prompts woke on average. rows: of these steps, up to so many."""

    rows: int
    steps: int
    experts: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket of time. at: its first second, since 1970. seconds: its length, 1 or 60.

    tokens: in texts; runs: steps of single requests that wrote any; emitted: by the engine. tokens_per_step: of one
    request. tree_nodes: drafted nodes per tree. busy_seconds: of steps; decode_seconds: of those that read no prompt;
    plain_seconds: of plain decoding in their place, estimated; doubted_seconds: of those of which that is unsure.
    first_tokens: requests that got their first, after first_token_seconds in all. phases: seconds spent in the bucket:
    plan, propose, mask, forward, draw and commit by the engine, deliver by the server. drafters: trees of each.
    chunk_gaps, token_times: counts by the bounds in :class:`HistoryReport`, the last one beyond all. Gauges as after
    the last step.
    """

    at: int
    seconds: int
    steps: int
    tokens: int
    emitted: int
    runs: int
    drafts: int
    drafted: int
    accepted: int
    discarded: int
    tokens_per_step: float | None
    acceptance_rate: float | None
    tree_nodes: float | None
    speed_up: float | None
    busy_seconds: float
    decode_seconds: float
    plain_seconds: float
    doubted_seconds: float
    first_tokens: int
    first_token_seconds: float
    phases: dict[str, float]
    drafters: dict[str, int]
    accepted_per_depth: list[int]
    chunk_gaps: list[int]
    token_times: list[int]
    running: int
    waiting: int
    pages: int
    kept_pages: int
    finished: int
    failed: int


class HistoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The charts. seconds: of the last ten minutes; minutes: of the last hour. bounds: of both histograms."""

    now: float
    bounds: list[float]
    seconds: list[Point]
    minutes: list[Point]


class Replica(msgspec.Struct, frozen=True):
    """One engine of several. address: where it is asked. running, waiting: requests it has, as far as this server
    knows; own: those of this server among them. kv_used: share of its KV pages that running requests use."""

    name: str
    address: str
    drafter: str
    running: int
    waiting: int
    own: int
    kv_used: float


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The header. status: the engine's (ready, loading, down, failed), or draining: the server is about to stop.
    drafter: by name; draft:
    with where they were loaded from; drafters: each. exact: whether the text is bit for bit that of plain decoding.
    root_seconds: at start-up. resumed: how often a request went on in another engine. replicas: those that take
    requests, where there are several engines."""

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
    drafters: list[str] = []
    dtype: str = ""
    device: str = ""
    exact: bool | None = None
    exact_reason: str = ""
    draft_shape: list[int] = []
    kv_tokens: int = 0
    page_size: int = 0
    max_seqs: int = 0
    root_seconds: float = 0.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page but its charts. drafters: in the minute of :class:`Live`; drafters_hour, shadows: in the last
    hour. nodes: of that minute, by depth and rank, of all shapes together. accepted_by_depth: of all drafters, in that
    minute and in the hour. totals: counters since the start, as in /metrics. startup: seconds of each phase of the
    engine's last start. verdict: one sentence: does speculation pay, and if not, why. woken: of a mixture's layer, in
    the hour."""

    now: float
    server: Server
    live: Live
    drafters: list[DrafterRates]
    drafters_hour: list[DrafterRates]
    shadows: list[ShadowRates]
    nodes: list[Node]
    accepted_by_depth: ByDepth
    accepted_by_depth_hour: ByDepth
    woken: list[Woken]
    totals: dict[str, int]
    startup: dict[str, float]
    verdict: str
    self_check: SelfCheckCounts


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is over, or still runs (``finish_reason`` None). cancelled and error are reasons too.

    request_id: the ``X-Request-Id`` of the HTTP request it came with. prompt: the first words of its prompt, or of what
    was said last in a conversation; None if its client wanted nothing stored. cached_tokens: of it, found in the
    KV cache. differs: where a long prompt differs from one that was sent before, in words; empty if it does not. seed:
    gives the same text again, None before it is known. drafters: trees of each. Times as the server saw them, from when
    the request was let in; ``tokens_per_second`` of one that is over is the engine's, as in the response's ``metrics``.
    """

    id: str
    request_id: str
    started: float
    prompt: str | None
    temperature: float
    seed: int | None
    prompt_tokens: int
    cached_tokens: int
    differs: str
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


class RequestStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of one request: the engine's number, who drafted how many nodes, how many of them were accepted, tokens
    kept in the text, and the milliseconds it took."""

    step: int
    drafter: str
    drafted: int
    accepted: int
    tokens: int
    milliseconds: float


class TokenText(msgspec.Struct, frozen=True, array_like=True):
    """What one token adds to the text. drafter: who proposed it, empty if it is the target's own. depth: at which it
    was accepted, 0: the target's own. forced: drafted because a grammar allowed nothing else."""

    text: str
    drafter: str
    depth: int
    forced: bool


class RequestDetail(msgspec.Struct, frozen=True):
    """One request of the asking key. whole: false if it was so long that only its beginning is kept. text_kept: false
    if its client wanted nothing stored; then there is no text."""

    summary: RequestSummary
    steps: list[RequestStep]
    text: list[TokenText]
    whole: bool
    text_kept: bool
