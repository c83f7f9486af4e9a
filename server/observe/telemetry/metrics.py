"""All metrics: name, kind, help, labels, and where the numbers come from.

A row here is what ``/metrics`` exposes (exposition.py), what the page's footer sums up, and a line of docs/metrics.md
(``python -m tests.telemetry.page`` writes its tables). Its value is a field of
:class:`~foresay.server.observe.telemetry.window.Window`, or of another object reached from a :class:`Reading`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import foresay
from foresay.server.engine.generation import StatusSource
from foresay.server.observe.telemetry.counts import Connections, Histogram, SelfCheckCounts, Startup
from foresay.server.observe.telemetry.report import Gauges, Replica
from foresay.server.observe.telemetry.window import Window
from foresay.server.schemas.errors import EngineFailed
from foresay.spec.names import NONE

#: One series: the values of its labels, and its value.
Series = tuple[Sequence[str], float]


class Reading(NamedTuple):
    """One model's numbers at one moment. totals: since the start; minute: of the last minute. plain_seconds: of a step
    without drafts."""

    totals: Window
    minute: Window
    gauges: Gauges
    engine: StatusSource
    startup: Startup
    connections: Connections
    self_check: SelfCheckCounts
    replicas: Sequence[Replica]
    plain_seconds: float


class Metric(NamedTuple):
    """A metric, exposed under our name and, where tools expect it, vLLM's.

    about: its help. of: its value in a reading (a number, numbers by the only label, series or a histogram), as a path
    of attributes or a function. labels: besides those that every series has. vllm: vLLM's name for it, True for the
    same;
    keep: indices of the labels that vLLM has too: series that agree in these are summed there. page: the page's name
    for the sum of its series, if shown; True for the same name.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    about: str
    of: str | Callable[[Reading], Any]
    labels: Sequence[str] = ()
    vllm: str | Literal[True] = ""
    keep: Sequence[int] = ()
    page: str | Literal[True] = ""

    def read(self, reading: Reading) -> Histogram | Sequence[Series]:
        """Its value in a reading; series by label are sorted."""
        value = attrgetter(self.of)(reading) if isinstance(self.of, str) else self.of(reading)
        if isinstance(value, Mapping):
            return [((label,), number) for label, number in sorted(value.items())]
        return value if isinstance(value, Histogram | Sequence) else [((), value)]

    def total(self, reading: Reading) -> int:
        """The sum of the series of a counter."""
        value = self.read(reading)
        return 0 if isinstance(value, Histogram) else int(sum(number for _, number in value))


counter, gauge, histogram = partial(Metric, "counter"), partial(Metric, "gauge"), partial(Metric, "histogram")


# -- values that are not fields ---------------------------------------------------------------------------------------

#: vLLM's names of finish reasons. Its tools count ``stop`` and ``length``.
FINISHED = {"cancelled": "abort", "tool_calls": "stop"}


def _finished(now: Reading) -> dict[str, int]:
    finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    for reason, count in now.totals.finished.items():
        finished[FINISHED.get(reason, reason)] += count
    return finished


def _each(counted: str, value: str) -> Callable[[Reading], dict[str, float]]:
    """One count of each drafter or shadow."""
    return lambda now: {name: attrgetter(value)(counts) for name, counts in getattr(now.totals, counted).items()}


def _by_position(value: str) -> Callable[[Reading], list[Series]]:
    """One count of each drafter by depth."""
    return lambda now: [
        ((drafter, str(position)), count)
        for drafter, counts in sorted(now.totals.drafting.items())
        for position, count in enumerate(getattr(counts, value))
    ]


def _woken(value: str) -> Callable[[Reading], dict[str, float]]:
    """By rows; there is one of one row, which dense models have too."""
    return lambda now: {"1": 0} | getattr(now.totals, value)


def _by_replica(value: str) -> Callable[[Reading], list[Series]]:
    """One number of each replica."""
    return lambda now: [((one.name, one.address), float(getattr(one, value))) for one in now.replicas]


def _in_minute(value: str) -> Callable[[Reading], list[Series]]:
    """A value of the last minute, if anything was decoded in it."""
    return lambda now: [] if now.minute.speed_up is None else [((), getattr(now.minute, value))]


def _build(now: Reading) -> list[Series]:
    info = now.engine.info
    if info is None:
        return []
    exact = "yes" if info.exact else "no"
    return [((foresay.__version__, info.target, info.drafter, info.draft, info.dtype, info.device, exact), 1)]


def _pages(now: Reading) -> list[Series]:
    info = now.engine.info
    if info is None:
        return []
    return [((str(info.page_size), str(info.kv_tokens // info.page_size), info.kv_dtype), 1)]


def _token_bytes(now: Reading) -> dict[str, int]:
    info = now.engine.info
    return {} if info is None or not info.kv_token_bytes else {info.kv_dtype: info.kv_token_bytes}


# -- the table -------------------------------------------------------------------------------------------------------

#: Drafts and their acceptance; what shadow drafters would have done; whether speculation pays.
SPECULATION = (
    *(
        counter(f"spec_decode_num_{name}", about, _each("drafting", value), ["drafter"], vllm=True, page=True)
        for name, about, value in (
            ("drafts", "Trees with at least one drafted token that were verified.", "drafts"),
            ("draft_tokens", "Drafted tokens that were verified.", "drafted"),
            ("accepted_tokens", "Drafted tokens that were accepted and are in a text.", "accepted"),
        )
    ),
    counter(
        "spec_decode_num_draft_tokens_per_pos",
        "Drafted tokens that were verified, by depth in the tree (0: right after the text).",
        _by_position("drafted_per_depth"),
        ["drafter", "position"],
    ),
    counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were accepted and are in a text, by depth in the tree (0: right after the text).",
        _by_position("accepted_per_depth"),
        ["drafter", "position"],
        vllm=True,
        keep=[1],
    ),
    counter("spec_decode_num_forced_tokens", "Drafted tokens that a grammar forced.", "totals.forced"),
    counter(
        "spec_decode_num_discarded_tokens", "Tokens generated past the end of a text.", "totals.discarded", page=True
    ),
    counter(
        "spec_decode_num_choices",
        "Steps by the drafter that the budget chose for them (none: no drafter).",
        lambda now: {NONE: 0} | now.totals.chosen,
        ["choice"],
    ),
    histogram("spec_decode_tokens_per_step", "Tokens that a step added to one request's text.", "totals.run_lengths"),
    *(
        counter(f"shadow_{name}", about, _each("shadows", value), ["drafter"])
        for name, about, value in (
            ("steps", "Steps that a shadow drafter would have made.", "steps"),
            ("tokens", "Tokens that these steps would have emitted.", "tokens"),
            ("drafts", "Steps in which a shadow had something to propose.", "drafting.drafts"),
            ("draft_tokens", "Tokens that a shadow proposed.", "drafting.drafted"),
            ("accepted_tokens", "Proposed tokens that would have been accepted.", "drafting.accepted"),
            ("draft_seconds", "Time that a shadow took to draft.", "seconds"),
        )
    ),
    counter(
        "decode_seconds",
        "Time in steps that read no prompt and in which no request had switched speculation off.",
        "totals.decode_seconds",
    ),
    counter(
        "spec_decode_plain_seconds",
        "Estimate of the time that plain decoding would have taken for the same tokens as those steps.",
        "totals.plain_seconds",
    ),
    gauge(
        "spec_decode_speed_up",
        "Estimate of the speed over plain decoding in the last minute; without decoding there is none.",
        _in_minute("speed_up"),
    ),
    gauge(
        "spec_decode_speed_up_unsure",
        "1 if that estimate may be wrong: it rests on steps without drafts that are few, old or of a different pace.",
        _in_minute("unsure"),
    ),
    gauge("plain_step_seconds", "A decoding step of one request without drafts.", "plain_seconds"),
)
#: The engine's steps, and the delivery of their tokens.
STEPS = (
    counter("engine_steps", "Steps of the engine.", "totals.steps", page=True),
    counter("step_phase_seconds", "Time in steps by phase; deliver: in the server.", "totals.phases", ["phase"]),
    counter(
        "step_wait_seconds",
        "Estimated time in steps that the engine waited for a core taken by another program.",
        "totals.waited_seconds",
    ),
    histogram("step_seconds", "A whole step of the engine.", "totals.step_seconds"),
    histogram(
        "iteration_tokens",
        "Tokens of a step: read from prompts, and written.",
        "totals.step_tokens",
        vllm="iteration_tokens_total",
    ),
    histogram(
        "inter_chunk_latency_seconds",
        "Time between two chunks of one text, however many tokens they hold.",
        "totals.chunk_gaps",
        vllm="inter_token_latency_seconds",
    ),
    histogram(
        "time_per_output_token_seconds",
        "Each token's share of the gap before its chunk: one observation for every token but those of first chunks.",
        "totals.token_times",
    ),
    *(
        counter(name, about, _woken(counted), ["rows"])
        for name, counted, about in (
            ("experts_woken", "woken", "Experts of a layer that steps without prompts woke, by rows (1, 2, 4, ..)."),
            ("experts_woken_steps", "woke", "Those steps."),
        )
    ),
    counter("num_preemptions", "Requests that had to give up their KV.", "totals.preemptions", vllm=True, page=True),
)
CACHED = "Tokens of prompts whose KV was cached already."
#: Requests and their results.
REQUESTS = (
    counter("prompt_tokens", "Tokens of prompts.", "totals.prompt_tokens", vllm=True, page=True),
    counter("prompt_tokens_cached", CACHED, "totals.cached_tokens", vllm=True, page=True),
    counter(
        "prefix_cache_queries",
        "Tokens of prompts that were looked up in the prefix cache.",
        "totals.prompt_tokens",
        vllm=True,
    ),
    counter("prefix_cache_hits", CACHED, "totals.cached_tokens", vllm=True),
    counter("generation_tokens", "Tokens of texts.", "totals.tokens", vllm=True, page=True),
    counter(
        "request_success",
        "Finished requests, by how they ended; abort: the client left or cancelled.",
        _finished,
        ["finished_reason"],
        vllm=True,
        keep=[0],
        page="requests",
    ),
    counter(
        "request_errors",
        "Requests that were admitted and failed, by the error's code.",
        lambda now: {EngineFailed.code or "": 0} | now.totals.failed,
        ["code"],
        page=True,
    ),
    *(
        histogram(f"{name}_seconds", about, f"totals.{name}", vllm=True)
        for name, about in (
            ("time_to_first_token", "From admitting a request to handing on its first tokens."),
            ("e2e_request_latency", "From admitting a request to its end."),
            ("request_queue_time", "How long a request waited in the engine for its turn."),
            ("request_prefill_time", "From a request's turn to its first token."),
            ("request_decode_time", "From a request's first token to its last."),
            ("request_inference_time", "From a request's turn to its last token."),
            ("request_time_per_output_token", "A request's mean time per token after the first one."),
        )
    ),
    *(
        histogram(name, about, f"totals.{name}", vllm=True)
        for name, about in (
            ("request_prompt_tokens", "Tokens of a request's prompt."),
            ("request_generation_tokens", "Tokens of a request's text."),
            ("request_params_max_tokens", "The most output tokens that a request asked for."),
            ("request_params_n", "Choices asked for per prompt."),
            ("request_num_preemptions", "Times that a request had to give up its KV."),
        )
    ),
    gauge("num_requests_running", "Requests that run.", "gauges.running", vllm=True),
    gauge("num_requests_waiting", "Requests that wait for their turn.", "gauges.waiting", vllm=True),
    gauge(
        "num_requests_waiting_by_reason",
        "The same by what they wait for, which is always room.",
        lambda now: {"capacity": now.gauges.waiting, "deferred": 0},
        ["reason"],
        vllm=True,
        keep=[0],
    ),
    gauge(
        "kv_cache_usage_perc",
        "Share of the KV pages that running requests use; 1 is all of them.",
        "gauges.kv_used",
        vllm=True,
    ),
    counter(
        "kv_disk_tokens",
        "Tokens of the KV on disk: read, written, damaged (and computed again), slow (computing them took less).",
        lambda now: {"read": 0, "written": 0, "damaged": 0, "slow": 0} | now.totals.disk,
        ["outcome"],
    ),
    gauge("kv_cache_kept_perc", "Share of the KV pages that only hold old text for reuse.", "gauges.kv_kept"),
)
#: The state of each replica, if there are several.
REPLICAS = tuple(
    gauge(f"replica_{value}", about, _by_replica(value), ["replica", "address"])
    for value, about in (
        ("running", "Requests that run in a replica, as far as this server knows."),
        ("waiting", "Requests that wait in a replica for their turn."),
        ("kv_used", "Share of a replica's KV pages that running requests use."),
    )
)
#: The engine process.
ENGINE = (
    gauge("engine_up", "1 if the engine takes requests.", lambda now: now.engine.status.state == "ready"),
    counter("engine_restarts", "Times the engine process was started again.", "startup.restarts", ["cause"]),
    counter("request_resumes", "Times a request went on in the next engine process.", "startup.resumed"),
    gauge("startup_time_seconds", "The engine's last start by phase.", "startup.seconds", ["phase"]),
)
#: The server itself, whatever models it has.
CONNECTIONS = (
    counter(
        "http_responses",
        "HTTP responses; 499: the client left; 101: a WebSocket closed.",
        lambda now: {str(status): count for status, count in now.connections.http.items()},
        ["status"],
    ),
    counter(
        "admission_rejections",
        "Requests that a limit refused, with 429.",
        lambda now: {"limit": now.connections.http.get(429, 0)},
        ["reason"],
        vllm=True,
        keep=[0],
    ),
    gauge("websocket_connections_active", "WebSockets that are open.", "connections.websockets", vllm=True),
    histogram(
        "websocket_connection_duration_seconds",
        "How long WebSockets that are closed were open.",
        "connections.websocket_seconds",
        vllm=True,
    ),
)
#: The engine's build, once known.
ABOUT = (
    gauge(
        "build_info",
        "Version and settings of the engine.",
        _build,
        ("version", "target", "drafter", "draft", "dtype", "device", "exact"),
    ),
    gauge(
        "cache_config_info",
        "Pages of the KV cache.",
        _pages,
        ("block_size", "num_gpu_blocks", "cache_dtype"),
        vllm=True,
        keep=[0, 1, 2],
    ),
    gauge(
        "kv_cache_token_bytes", "Bytes of the KV cache for one token, drafters' included.", _token_bytes, ["kv_dtype"]
    ),
)
#: Results of re-runs, all 0 if they are not enabled.
SELF_CHECK = (
    counter("self_check_requests", "Finished requests that were decoded again plainly.", "self_check.checked"),
    counter("self_check_tokens", "Tokens compared with plain decoding.", "self_check.tokens"),
    counter("self_check_mismatch", "Requests whose tokens differ from plain decoding.", "self_check.mismatches"),
    gauge("self_check_waiting", "Requests that wait to be decoded again.", "self_check.waiting"),
    counter(
        "self_check_skipped", "Requests that were picked but gave way to others, or were lost.", "self_check.skipped"
    ),
)
#: All, by their headings in docs/metrics.md.
SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Speculation": SPECULATION,
    "Steps and delivery": STEPS,
    "Requests": REQUESTS,
    "Replicas": REPLICAS,
    "Engine": ENGINE,
    "Connections": CONNECTIONS,
    "Build": ABOUT,
    "Self-check": SELF_CHECK,
}
#: The metrics that the page sums up, by its names for them.
ON_PAGE = {
    metric.name if metric.page is True else metric.page: metric
    for metric in chain.from_iterable(SECTIONS.values())
    if metric.page
}
