"""The text of ``/metrics``: everything telemetry has counted, in Prometheus' words. docs/metrics.md describes each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector

import foresay
from foresay.server.observe.telemetry.counts import Histogram
from foresay.server.observe.telemetry.families import Registry, Series, chosen, counter, gauge, histogram
from foresay.server.observe.telemetry.report import Gauges
from foresay.server.observe.telemetry.telemetry import Telemetry
from foresay.server.observe.telemetry.views import Slices
from foresay.server.observe.telemetry.window import Window
from foresay.server.schemas.errors import EngineFailed
from foresay.spec.names import NONE


class Reading(NamedTuple):
    """What one model tells in one scrape. totals: since the start; minute: of the last one. of: for the rest."""

    totals: Window
    minute: Window
    gauges: Gauges
    of: Telemetry


#: How vLLM calls the ends of requests. Its tools count ``stop`` and ``length``.
FINISHED = {"cancelled": "abort", "tool_calls": "stop"}


def _finished(now: Reading) -> dict[str, int]:
    finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    for reason, count in now.totals.finished.items():
        finished[FINISHED.get(reason, reason)] += count
    return finished


def _by_drafter(value: str) -> Callable[[Reading], dict[str, float]]:
    """One of the counts of each drafter."""
    return lambda now: {drafter: getattr(counts, value) for drafter, counts in now.totals.drafting.items()}


def _by_position(value: str) -> Callable[[Reading], list[Series]]:
    """The same by depth."""
    return lambda now: [
        ((drafter, str(position)), count)
        for drafter, counts in sorted(now.totals.drafting.items())
        for position, count in enumerate(getattr(counts, value))
    ]


def _by_shadow(value: str) -> Callable[[Reading], dict[str, float]]:
    """One of the counts of each drafter beside the one in use."""
    return lambda now: {drafter: attrgetter(value)(counts) for drafter, counts in now.totals.shadows.items()}


def _by_replica(value: str) -> Callable[[Reading], list[Series]]:
    """One of the numbers of each engine."""
    return lambda now: [((one.name, one.address), float(getattr(one, value))) for one in now.of.replicas()]


def _in_minute(value: str) -> Callable[[Reading], list[Series]]:
    """Of the last minute, if anything was decoded in it."""
    return lambda now: [] if now.minute.speed_up is None else [((), getattr(now.minute, value))]


def _by_name(histograms: str, name: str) -> Callable[[Reading], Histogram]:
    """One of several histograms of the totals."""
    return lambda now: getattr(now.totals, histograms)[name]


def _build(now: Reading) -> list[Series]:
    info = now.of.engine.info
    if info is None:
        return []
    exact = "yes" if info.exact else "no"
    return [((foresay.__version__, info.target, info.drafter, info.draft, info.dtype, info.device, exact), 1)]


def _token_bytes(now: Reading) -> dict[str, int]:
    info = now.of.engine.info
    return {} if info is None or not info.kv_token_bytes else {info.kv_dtype: info.kv_token_bytes}


#: What was drafted and what became of it; what drafters beside the one in use would have done; whether it pays.
SPECULATION = (
    *(
        counter(f"spec_decode_num_{name}", about, _by_drafter(value), ["drafter"])
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
        keep=[1],
    ),
    counter("spec_decode_num_forced_tokens", "Drafted tokens that a grammar forced.", "totals.forced"),
    counter("spec_decode_num_discarded_tokens", "Tokens generated past the end of a text.", "totals.discarded"),
    counter(
        "spec_decode_num_choices",
        "Steps by the drafter that the budget chose for them (none: no drafter).",
        lambda now: {NONE: 0} | now.totals.chosen,
        ["choice"],
    ),
    histogram("spec_decode_tokens_per_step", "Tokens that a step added to one request's text.", "totals.run_lengths"),
    *(
        counter(f"shadow_{name}", about, _by_shadow(value), ["drafter"])
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
    gauge("plain_step_seconds", "A decoding step of one request without drafts.", "of.plain_seconds"),
)
#: The engine's steps, and how their tokens came out of the server.
STEPS = (
    counter("engine_steps", "Steps of the engine.", "totals.steps"),
    counter("step_phase_seconds", "Time in steps by phase; deliver: in the server.", "totals.phases", ["phase"]),
    counter(
        "step_wait_seconds",
        "Estimated time in steps that the engine waited for a core taken by another program.",
        "totals.waited_seconds",
    ),
    histogram("step_seconds", "A whole step of the engine.", "totals.step_seconds"),
    histogram("iteration_tokens", "Tokens of a step: read from prompts, and written.", "totals.step_tokens"),
    histogram(
        "inter_chunk_latency_seconds",
        "Time between two chunks of one text, however many tokens they hold.",
        "totals.chunk_gaps",
    ),
    histogram(
        "time_per_output_token_seconds",
        "Each token's share of the gap before its chunk: one observation for every token but those of first chunks.",
        "totals.token_times",
    ),
    counter("num_preemptions", "Requests that had to give up their KV.", "totals.preemptions"),
)
CACHED = "Tokens of prompts whose KV was cached already."
#: What clients asked for and got.
REQUESTS = (
    counter("prompt_tokens", "Tokens of prompts.", "totals.prompt_tokens"),
    counter("prompt_tokens_cached", CACHED, "totals.cached_tokens"),
    counter(
        "prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.", "totals.prompt_tokens"
    ),
    counter("prefix_cache_hits", CACHED, "totals.cached_tokens"),
    counter("generation_tokens", "Tokens of texts.", "totals.tokens"),
    counter(
        "request_success",
        "Finished requests, by how they ended; abort: the client left or cancelled.",
        _finished,
        ["finished_reason"],
        keep=[0],
    ),
    counter(
        "request_errors",
        "Requests that were admitted and failed, by the error's code.",
        lambda now: {EngineFailed.code or "": 0} | now.totals.failed,
        ["code"],
    ),
    *(
        histogram(f"{name}_seconds", about, _by_name("times", name))
        for name, about in (
            ("time_to_first_token", "From admitting a request to handing on its first tokens."),
            ("e2e_request_latency", "From admitting a request to its end."),
            ("request_queue_time", "How long a request waited in the engine for its turn."),
            ("request_prefill_time", "From a request's turn to its first token."),
            ("request_decode_time", "From a request's first token to its last."),
            ("request_inference_time", "From a request's turn to its last token."),
        )
    ),
    histogram(
        "request_time_per_output_token_seconds",
        "A request's mean time per token after the first one.",
        "totals.mean_token_times",
    ),
    *(
        histogram(name, about, _by_name("lengths", name))
        for name, about in (
            ("request_prompt_tokens", "Tokens of a request's prompt."),
            ("request_generation_tokens", "Tokens of a request's text."),
            ("request_params_max_tokens", "The most output tokens that a request asked for."),
        )
    ),
    histogram("request_params_n", "Choices asked for per prompt.", "totals.choices"),
    gauge("num_requests_running", "Requests that run.", "gauges.running"),
    gauge("num_requests_waiting", "Requests that wait for their turn.", "gauges.waiting"),
    gauge(
        "kv_cache_usage_perc", "Share of the KV pages that running requests use; 1 is all of them.", "gauges.kv_used"
    ),
    gauge("kv_cache_kept_perc", "Share of the KV pages that only hold old text for reuse.", "gauges.kv_kept"),
)
#: How each engine is, where there are several.
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
    gauge("engine_up", "1 if the engine takes requests.", lambda now: now.of.engine.status.state == "ready"),
    counter("engine_restarts", "Times the engine process was started again.", "of.startup.restarts", ["cause"]),
    counter(
        "request_resumes",
        "Times a request went on in the next engine process.",
        "of.startup.resumed",
    ),
    gauge("startup_time_seconds", "The engine's last start by phase.", "of.startup.seconds", ["phase"]),
)
#: The server itself, whatever models it has.
SERVER = (
    counter(
        "http_responses",
        "HTTP responses; 499: the client left; 101: a WebSocket closed.",
        lambda now: {str(status): count for status, count in now.of.connections.http.items()},
        ["status"],
    ),
    gauge("websocket_connections_active", "WebSockets that are open.", "of.connections.websockets"),
    histogram(
        "websocket_connection_duration_seconds",
        "How long WebSockets that are closed were open.",
        "of.connections.websocket_seconds",
    ),
)
#: What runs, once anything does, and whether it is right: what re-runs found, all 0 where nobody asked for them.
ABOUT = (
    gauge("build_info", "What runs.", _build, ("version", "target", "drafter", "draft", "dtype", "device", "exact")),
    gauge(
        "kv_cache_token_bytes",
        "Bytes of the KV cache for one token, drafters' included.",
        _token_bytes,
        ["kv_dtype"],
    ),
    counter("self_check_requests", "Finished requests that were decoded again plainly.", "of.self_check.checked"),
    counter("self_check_tokens", "Tokens compared with plain decoding.", "of.self_check.tokens"),
    counter("self_check_mismatch", "Requests whose tokens differ from plain decoding.", "of.self_check.mismatches"),
    gauge("self_check_waiting", "Requests that wait to be decoded again.", "of.self_check.waiting"),
    counter(
        "self_check_skipped", "Requests that were picked but gave way to others, or were lost.", "of.self_check.skipped"
    ),
)


class Exposition:
    """Telemetry as Prometheus asks for it, told piece by piece: between two pieces the streams have their turn.

    One telemetry for each model. What is counted of the whole server bears the name of the only model, or none.
    """

    def __init__(self, *telemetries: Telemetry) -> None:
        self._telemetries = telemetries
        self._process = ProcessCollector(registry=None)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that the Accept header asks for."""
        encode, content_type = chosen(accept)
        end, pieces, slices = encode(Registry()), [], Slices()
        for metric in self.collect():
            pieces.append(encode(Registry(metric)).removesuffix(end))
            await slices.pause()
        return b"".join([*pieces, end]), content_type

    def collect(self) -> Iterator[Metric]:
        """All metrics. What changes with each step is read before the first one."""
        readings = [Reading(one.totals(), one.window(60), one.gauges, one) for one in self._telemetries]
        replicas = REPLICAS if any(one.replicas() for one in self._telemetries) else ()
        models = [(reading.of.model, reading) for reading in readings]
        server = models if len(models) == 1 else [("", readings[0])]
        for families, told in (
            ((*SPECULATION, *STEPS, *REQUESTS, *replicas, *ENGINE), models),
            (SERVER, server),
            (ABOUT, models),
        ):
            for family in families:
                yield from family.metrics([(model, family.told(reading)) for model, reading in told])
        yield from self._process.collect()
