"""All metrics: name, kind, help, labels, and where the numbers come from.

A row here is what ``/metrics`` exposes (exposition.py), what the page's footer sums up, and a line of docs/metrics.md
(``python -m tests.telemetry.page`` writes its tables). Its value is a field of
:class:`~foresay.server.observe.telemetry.window.Window`, or of another object reached from a :class:`Reading`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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


# -- values that are not fields ---------------------------------------------------------------------------------------

#: vLLM's names of finish reasons. Its tools count ``stop`` and ``length``.
FINISHED = {"cancelled": "abort", "tool_calls": "stop"}


def _finished(now: Reading) -> dict[str, int]:
    finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    for reason, count in now.totals.finished.items():
        finished[FINISHED.get(reason, reason)] += count
    return finished


def _each(value: str) -> Callable[[Reading], dict[str, float]]:
    """One count of each drafter."""
    return lambda now: {name: getattr(counts, value) for name, counts in now.totals.drafting.items()}


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


#: The values of the metrics of these names.
_OWN: dict[str, Callable[[Reading], Any]] = {
    "spec_decode_num_choices": lambda now: {NONE: 0} | now.totals.chosen,
    "request_success": _finished,
    "request_errors": lambda now: {EngineFailed.code or "": 0} | now.totals.failed,
    "num_requests_waiting_by_reason": lambda now: {"capacity": now.gauges.waiting, "deferred": 0},
    "kv_disk_tokens": lambda now: {"read": 0, "written": 0, "damaged": 0, "slow": 0} | now.totals.disk,
    "engine_up": lambda now: now.engine.status.state == "ready",
    "http_responses": lambda now: {str(status): count for status, count in now.connections.http.items()},
    "admission_rejections": lambda now: {"limit": now.connections.http.get(429, 0)},
    "build_info": _build,
    "cache_config_info": _pages,
    "kv_cache_token_bytes": _token_bytes,
}
#: Values with a parameter, such as ``drafter:drafted``.
_MADE: dict[str, Callable[[str], Callable[[Reading], Any]]] = {
    "drafter": _each,
    "depth": _by_position,
    "minute": _in_minute,
    "rows": _woken,
    "replica": _by_replica,
}


# -- the table -------------------------------------------------------------------------------------------------------

#: By their headings in docs/metrics.md: kind, name, labels, vLLM's name, labels that vLLM has too, and the page's name,
#: as in :class:`Metric`; then its value: ``own``, a value with a parameter, or a path of attributes; and its help.
_TEXT = """
Speculation
  counter spec_decode_num_drafts [drafter] vllm page = drafter:drafts: Trees with at least one drafted token that were
    verified.
  counter spec_decode_num_draft_tokens [drafter] vllm page = drafter:drafted: Drafted tokens that were verified.
  counter spec_decode_num_accepted_tokens [drafter] vllm page = drafter:accepted: Drafted tokens that were accepted
    and are in a text.
  counter spec_decode_num_draft_tokens_per_pos [drafter, position] = depth:drafted_per_depth: Drafted tokens that were
    verified, by depth in the tree (0: right after the text).
  counter spec_decode_num_accepted_tokens_per_pos [drafter, position] vllm keep=1 = depth:accepted_per_depth: Drafted
    tokens that were accepted and are in a text, by depth in the tree (0: right after the text).
  counter spec_decode_num_forced_tokens = totals.forced: Drafted tokens that a grammar forced.
  counter spec_decode_num_discarded_tokens page = totals.discarded: Tokens generated past the end of a text.
  counter spec_decode_num_choices [choice] = own: Steps by the drafter that the budget chose for
    them (none: no drafter).
  histogram spec_decode_tokens_per_step = totals.run_lengths: Tokens that a step added to one request's text.
  counter decode_seconds = totals.decode_seconds: Time in steps that read no prompt and in which no request had
    switched speculation off.
  counter spec_decode_plain_seconds = totals.plain_seconds: Estimate of the time that plain decoding would have taken
    for the same tokens as those steps.
  gauge spec_decode_speed_up = minute:speed_up: Estimate of the speed over plain decoding in the last minute; without
    decoding there is none.
  gauge spec_decode_speed_up_unsure = minute:unsure: 1 if that estimate may be wrong: it rests on steps without drafts
    that are few, old or of a different pace.
  gauge plain_step_seconds = plain_seconds: A decoding step of one request without drafts.
Steps and delivery
  counter engine_steps page = totals.steps: Steps of the engine.
  counter step_phase_seconds [phase] = totals.phases: Time in steps by phase; deliver: in the server.
  counter step_wait_seconds = totals.waited_seconds: Estimated time in steps that the engine waited for a core taken
    by another program.
  histogram step_seconds = totals.step_seconds: A whole step of the engine.
  histogram iteration_tokens vllm=iteration_tokens_total = totals.step_tokens: Tokens of a step: read from prompts,
    and written.
  histogram inter_chunk_latency_seconds vllm=inter_token_latency_seconds = totals.chunk_gaps: Time between two chunks
    of one text, however many tokens they hold.
  histogram time_per_output_token_seconds = totals.token_times: Each token's share of the gap before its chunk: one
    observation for every token but those of first chunks.
  counter experts_woken [rows] = rows:woken: Experts of a layer that steps without prompts woke, by rows (1, 2, 4,
    ..).
  counter experts_woken_steps [rows] = rows:woke: Those steps.
  counter num_preemptions vllm page = totals.preemptions: Requests that had to give up their KV.
Requests
  counter prompt_tokens vllm page = totals.prompt_tokens: Tokens of prompts.
  counter prompt_tokens_cached vllm page = totals.cached_tokens: Tokens of prompts whose KV was cached already.
  counter prefix_cache_queries vllm = totals.prompt_tokens: Tokens of prompts that were looked up in the prefix cache.
  counter prefix_cache_hits vllm = totals.cached_tokens: Tokens of prompts whose KV was cached already.
  counter generation_tokens vllm page = totals.tokens: Tokens of texts.
  counter request_success [finished_reason] vllm keep=0 page=requests = own: Finished requests, by how
    they ended; abort: the client left or cancelled.
  counter request_errors [code] page = own: Requests that were admitted and failed, by the error's code.
  histogram time_to_first_token_seconds vllm = totals.time_to_first_token: From admitting a request to handing on its
    first tokens.
  histogram e2e_request_latency_seconds vllm = totals.e2e_request_latency: From admitting a request to its end.
  histogram request_queue_time_seconds vllm = totals.request_queue_time: How long a request waited in the engine for
    its turn.
  histogram request_prefill_time_seconds vllm = totals.request_prefill_time: From a request's turn to its first token.
  histogram request_decode_time_seconds vllm = totals.request_decode_time: From a request's first token to its last.
  histogram request_inference_time_seconds vllm = totals.request_inference_time: From a request's turn to its last
    token.
  histogram request_time_per_output_token_seconds vllm = totals.request_time_per_output_token: A request's mean time
    per token after the first one.
  histogram request_prompt_tokens vllm = totals.request_prompt_tokens: Tokens of a request's prompt.
  histogram request_generation_tokens vllm = totals.request_generation_tokens: Tokens of a request's text.
  histogram request_params_max_tokens vllm = totals.request_params_max_tokens: The most output tokens that a request
    asked for.
  histogram request_params_n vllm = totals.request_params_n: Choices asked for per prompt.
  histogram request_num_preemptions vllm = totals.request_num_preemptions: Times that a request had to give up its KV.
  gauge num_requests_running vllm = gauges.running: Requests that run.
  gauge num_requests_waiting vllm = gauges.waiting: Requests that wait for their turn.
  gauge prompt_tokens_unread = gauges.unread: Tokens of the prompts of these requests that are still to be read.
  gauge num_requests_waiting_by_reason [reason] vllm keep=0 = own: The same by what they
    wait for, which is always room.
  gauge kv_cache_usage_perc vllm = gauges.kv_used: Share of the KV pages that running requests use; 1 is all of them.
  counter kv_disk_tokens [outcome] = own: Tokens of the KV on disk: read, written, damaged (and computed
    again), slow (computing them took less).
  gauge kv_cache_kept_perc = gauges.kv_kept: Share of the KV pages that only hold old text for reuse.
Replicas
  gauge replica_running [replica, address] = replica:running: Requests that run in a replica, as far as this server
    knows.
  gauge replica_waiting [replica, address] = replica:waiting: Requests that wait in a replica for their turn.
  gauge replica_kv_used [replica, address] = replica:kv_used: Share of a replica's KV pages that running requests use.
Engine
  gauge engine_up = own: 1 if the engine takes requests.
  counter engine_restarts [cause] = startup.restarts: Times the engine process was started again.
  counter request_resumes = startup.resumed: Times a request went on in the next engine process.
  gauge startup_time_seconds [phase] = startup.seconds: The engine's last start by phase.
Connections
  counter http_responses [status] = own: HTTP responses; 499: the client left; 101: a WebSocket closed.
  counter admission_rejections [reason] vllm keep=0 = own: Requests that a limit refused, with 429.
  gauge websocket_connections_active vllm = connections.websockets: WebSockets that are open.
  histogram websocket_connection_duration_seconds vllm = connections.websocket_seconds: How long WebSockets that are
    closed were open.
Build
  gauge build_info [version, target, drafter, draft, dtype, device, exact] = own: Version and settings of the
    engine.
  gauge cache_config_info [block_size, num_gpu_blocks, cache_dtype] vllm keep=0,1,2 = own: Pages of the
    KV cache.
  gauge kv_cache_token_bytes [kv_dtype] = own: Bytes of the KV cache for one token, drafters'
    included.
Self-check
  counter self_check_requests = self_check.checked: Finished requests that were decoded again plainly.
  counter self_check_tokens = self_check.tokens: Tokens compared with plain decoding.
  counter self_check_mismatch = self_check.mismatches: Requests whose tokens differ from plain decoding.
  gauge self_check_waiting = self_check.waiting: Requests that wait to be decoded again.
  counter self_check_skipped = self_check.skipped: Requests that were picked but gave way to others, or were lost.
"""
_ENTRY = re.compile(
    r"(counter|gauge|histogram) (\w+)(?: \[([\w, ]+)\])?( vllm)?(?:=(\w+))?(?: keep=([\d,]+))?"
    r"( page)?(?:=(\w+))? = (\S+): (.+)"
)


def _entries() -> Iterator[tuple[str, str]]:
    """The entries of the text, each with its heading: headings are not indented, further lines of an entry twice."""
    heading, entry = "", ""
    for line in _TEXT.strip().splitlines():
        if line.startswith("    "):
            entry += f" {line.strip()}"
            continue
        if entry:
            yield heading, entry
        heading, entry = (heading, line.strip()) if line.startswith(" ") else (line, "")
    yield heading, entry


def _metric(entry: str) -> Metric:
    found = _ENTRY.fullmatch(entry)
    assert found is not None, f"{entry} is no metric"
    kind, name, labels, vllm, vllm_name, keep, page, page_name, value, about = found.groups()
    made, _, parameter = value.partition(":")
    return Metric(
        kind,  # type: ignore[arg-type]
        name,
        about,
        _OWN[name] if value == "own" else _MADE[made](parameter) if parameter else value,
        labels.split(", ") if labels else (),
        vllm_name or bool(vllm) or "",
        [int(index) for index in keep.split(",")] if keep else (),
        page_name or bool(page) or "",
    )


#: All, by their headings.
SECTIONS: dict[str, list[Metric]] = {}
for _heading, _entry in _entries():
    SECTIONS.setdefault(_heading, []).append(_metric(_entry))
#: The state of each replica, if there are several; and what concerns the server itself, whatever models it has.
REPLICAS, CONNECTIONS = SECTIONS["Replicas"], SECTIONS["Connections"]
#: The metrics that the page sums up, by its names for them.
ON_PAGE = {
    metric.name if metric.page is True else metric.page: metric
    for metric in chain.from_iterable(SECTIONS.values())
    if metric.page
}
