"""The text of ``/metrics``: everything telemetry has counted, in Prometheus' words. docs/metrics.md describes each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from operator import attrgetter

import msgspec
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector

import foresay
from server.engine.generation import EngineStatus
from server.observe.telemetry.counts import Connections
from server.observe.telemetry.drafting import Drafting
from server.observe.telemetry.families import Families, Registry, SelfCheckCounts, Series, by, chosen, one
from server.observe.telemetry.report import Gauges, Replica
from server.observe.telemetry.telemetry import Telemetry
from server.observe.telemetry.views import Slices
from server.observe.telemetry.window import Window
from server.schemas.errors import EngineFailed
from spec.names import NONE
from spec.request import EngineInfo


class Reading(msgspec.Struct, frozen=True):
    """What the families of one scrape are made from. speed_up, unsure: of the last minute. restarts, resumed, startup:
    of the engine.
    """

    totals: Window
    gauges: Gauges
    speed_up: float | None
    unsure: bool
    plain_seconds: float
    status: EngineStatus
    info: EngineInfo | None
    restarts: dict[str, int]
    resumed: int
    startup: dict[str, float]
    connections: Connections
    self_check: SelfCheckCounts
    replicas: list[Replica]

    @classmethod
    def of(cls, telemetry: Telemetry) -> Reading:
        """As of now."""
        minute = telemetry.window(60)
        return cls(
            totals=telemetry.totals(),
            gauges=telemetry.gauges,
            speed_up=minute.speed_up,
            unsure=bool(minute.doubt),
            plain_seconds=telemetry.plain_seconds,
            status=telemetry.engine.status,
            info=telemetry.engine.info,
            restarts=dict(telemetry.startup.restarts),
            resumed=telemetry.startup.resumed,
            startup=dict(telemetry.startup.seconds),
            connections=deepcopy(telemetry.connections),
            self_check=copy(telemetry.self_check),
            replicas=telemetry.replicas(),
        )


#: How vLLM calls the ends of requests. Its tools count ``stop`` and ``length``.
FINISHED = {"cancelled": "abort", "tool_calls": "stop"}
ABOUT_TIMES = {
    "time_to_first_token": "From letting a request in to handing on its first tokens.",
    "e2e_request_latency": "From letting a request in to its end.",
    "request_queue_time": "How long a request waited in the engine for its turn.",
    "request_prefill_time": "From a request's turn to its first token.",
    "request_decode_time": "From a request's first token to its last.",
    "request_inference_time": "From a request's turn to its last token.",
}
ABOUT_LENGTHS = {
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens of a request's text.",
    "request_params_max_tokens": "The most tokens that a request could have.",
}


class Exposition:
    """Telemetry as Prometheus asks for it, told piece by piece: between two pieces the streams have their turn.

    One telemetry for each model. What is counted of the whole server bears the name of the only model, or none.
    """

    def __init__(self, *telemetries: Telemetry) -> None:
        self._models = [(one, Families(one.model)) for one in telemetries]
        self._whole = self._models[0][1] if len(telemetries) == 1 else Families("")
        self._process = ProcessCollector(registry=None)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that the Accept header asks for."""
        encode, content_type = chosen(accept)
        end, pieces, slices = encode(Registry()), [], Slices()
        for family in self.collect():
            pieces.append(encode(Registry(family)).removesuffix(end))
            await slices.pause()
        return b"".join([*pieces, end]), content_type

    def collect(self) -> Iterator[Metric]:
        """All families; what they tell is read before the first one."""
        readings = [(Reading.of(telemetry), families) for telemetry, families in self._models]
        yield from joined([_model(families, reading) for reading, families in readings])
        yield from _server(self._whole, readings[0][0].connections)
        yield from joined([_about(families, reading) for reading, families in readings])
        yield from self._process.collect()


def joined(models: Sequence[Iterator[Metric]]) -> Iterator[Metric]:
    """Families of several models, which have the same in the same order, as one each: in a text, no name may stand
    twice."""
    for whole, *others in zip(*models, strict=True):
        whole.samples.extend(sample for family in others for sample in family.samples)
        yield whole


def _model(families: Families, reading: Reading) -> Iterator[Metric]:
    """What is counted of one model."""
    yield from _speculation(families, reading.totals)
    yield from _shadows(families, reading.totals)
    yield from _estimates(families, reading)
    yield from _steps(families, reading.totals)
    yield from _requests(families, reading.totals)
    yield from _gauges(families, reading.gauges)
    yield from _replicas(families, reading.replicas)
    yield from _engine(families, reading)


def _about(families: Families, reading: Reading) -> Iterator[Metric]:
    """What runs, and whether it is right."""
    yield from _build(families, reading.info)
    yield from _self_check(families, reading.self_check)


def _speculation(families: Families, totals: Window) -> Iterator[Metric]:
    """What was drafted and what became of it."""
    drafting = sorted(totals.drafting.items())
    for name, about, value in (
        ("drafts", "Trees with at least one drafted token that were verified.", "drafts"),
        ("draft_tokens", "Drafted tokens that were verified.", "drafted"),
        ("accepted_tokens", "Drafted tokens that were accepted and are in a text.", "accepted"),
    ):
        yield from families.counter(f"spec_decode_num_{name}", about, _by_drafter(drafting, value), ["drafter"])
    yield from _by_position(families, drafting)
    yield from families.counter(
        "spec_decode_num_forced_tokens", "Drafted tokens that a grammar forced.", one(totals.forced)
    )
    yield from families.counter(
        "spec_decode_num_discarded_tokens", "Tokens made behind the end of a text.", one(totals.discarded)
    )
    yield from families.counter(
        "spec_decode_num_choices",
        "Steps by who was to draft in them, as the budget chose (none: nobody).",
        [((choice,), steps) for choice, steps in sorted(({NONE: 0} | totals.chosen).items())],
        ["choice"],
    )
    yield from families.histogram(
        "spec_decode_tokens_per_step", "Tokens that a step added to one request's text.", totals.run_lengths
    )


def _by_position(families: Families, drafting: list[tuple[str, Drafting]]) -> Iterator[Metric]:
    """The same by depth. drafting: by the drafter's name."""
    where = ["drafter", "position"]
    yield from families.counter(
        "spec_decode_num_draft_tokens_per_pos",
        "Drafted tokens that were verified, by how deep in the tree (0: right behind the text).",
        [series for name, counts in drafting for series in _positions(name, counts.drafted_per_depth)],
        where,
    )
    yield from families.counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were accepted and are in a text, by how deep in the tree (0: right behind the text).",
        [series for name, counts in drafting for series in _positions(name, counts.accepted_per_depth)],
        where,
        keep=[1],
    )


def _shadows(families: Families, totals: Window) -> Iterator[Metric]:
    """What drafters beside the one in use would have done for the requests that are over."""
    shadows = sorted(totals.shadows.items())
    for name, about, value in (
        ("steps", "Steps that a shadow drafter would have made.", "steps"),
        ("tokens", "Tokens that these steps would have emitted.", "tokens"),
        ("drafts", "Steps in which a shadow had something to propose.", "drafting.drafts"),
        ("draft_tokens", "Tokens that a shadow proposed.", "drafting.drafted"),
        ("accepted_tokens", "Proposed tokens that would have been accepted.", "drafting.accepted"),
        ("draft_seconds", "Time that a shadow took to draft.", "seconds"),
    ):
        yield from families.counter(f"shadow_{name}", about, _by_drafter(shadows, value), ["drafter"])


def _by_drafter(counts: Sequence[tuple[str, object]], value: str) -> list[Series]:
    """One of the counts of each drafter."""
    return [((drafter,), attrgetter(value)(one)) for drafter, one in counts]


def _positions(drafter: str, per_depth: list[int]) -> list[Series]:
    return [((drafter, str(position)), count) for position, count in enumerate(per_depth)]


def _estimates(families: Families, reading: Reading) -> Iterator[Metric]:
    """Whether it pays."""
    totals = reading.totals
    yield from families.counter(
        "decode_seconds",
        "Time in steps that read no prompt and in which nobody had switched speculation off.",
        one(totals.decode_seconds),
    )
    yield from families.counter(
        "spec_decode_plain_seconds",
        "Estimate of the time that plain decoding would have taken for the same tokens as those steps.",
        one(totals.plain_seconds),
    )
    yield from families.gauge(
        "spec_decode_speed_up",
        "Estimate of the speed over plain decoding in the last minute; without decoding there is none.",
        [] if reading.speed_up is None else one(reading.speed_up),
    )
    yield from families.gauge(
        "spec_decode_speed_up_unsure",
        "1 if that estimate may be wrong: the steps without drafts it rests on are few, old or of another pace.",
        [] if reading.speed_up is None else one(reading.unsure),
    )
    yield from families.gauge(
        "plain_step_seconds", "A decoding step of one request without drafts.", one(reading.plain_seconds)
    )


def _steps(families: Families, totals: Window) -> Iterator[Metric]:
    """The engine's steps, and how their tokens came out of the server."""
    yield from families.counter("engine_steps", "Steps of the engine.", one(totals.steps))
    yield from families.counter(
        "step_phase_seconds", "Time in steps by phase; deliver: in the server.", by(totals.phases), ["phase"]
    )
    yield from families.counter(
        "step_wait_seconds",
        "Time in steps in which the engine waited for a core that something else had, estimated.",
        one(totals.waited_seconds),
    )
    yield from families.histogram("step_seconds", "A whole step of the engine.", totals.step_seconds)
    yield from families.histogram(
        "iteration_tokens", "Tokens of a step: read of prompts, and written.", totals.step_tokens
    )
    yield from families.histogram(
        "inter_chunk_latency_seconds", "Between two chunks of one text, of however many tokens.", totals.chunk_gaps
    )
    yield from families.histogram(
        "time_per_output_token_seconds",
        "Each token's share of the gap before its chunk: one observation for every token but those of first chunks.",
        totals.token_times,
    )
    yield from families.counter("num_preemptions", "Requests that had to give back their KV.", one(totals.preemptions))


def _requests(families: Families, totals: Window) -> Iterator[Metric]:
    """What clients asked for and got."""
    yield from families.counter("prompt_tokens", "Tokens of prompts.", one(totals.prompt_tokens))
    cached = "Tokens of prompts whose KV was there already."
    yield from families.counter("prompt_tokens_cached", cached, one(totals.cached_tokens))
    yield from families.counter(
        "prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.", one(totals.prompt_tokens)
    )
    yield from families.counter("prefix_cache_hits", cached, one(totals.cached_tokens))
    yield from families.counter("generation_tokens", "Tokens of texts.", one(totals.tokens))
    finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    for reason, count in totals.finished.items():
        finished[FINISHED.get(reason, reason)] += count
    yield from families.counter(
        "request_success",
        "Requests that are over, by how they ended; abort: the client left or cancelled.",
        by(finished),
        ["finished_reason"],
        keep=[0],
    )
    yield from families.counter(
        "request_errors",
        "Requests that were let in and failed, by the error's code.",
        by({EngineFailed.code: 0} | totals.failed),
        ["code"],
    )
    for name, histogram in totals.times.items():
        yield from families.histogram(f"{name}_seconds", ABOUT_TIMES[name], histogram)
    yield from families.histogram(
        "request_time_per_output_token_seconds",
        "A request's mean time per token behind the first one.",
        totals.mean_token_times,
    )
    for name, histogram in totals.lengths.items():
        yield from families.histogram(name, ABOUT_LENGTHS[name], histogram)
    yield from families.histogram("request_params_n", "Choices that a prompt was to have.", totals.choices)


def _gauges(families: Families, now: Gauges) -> Iterator[Metric]:
    """What is going on now."""
    yield from families.gauge("num_requests_running", "Requests that run.", one(now.running))
    yield from families.gauge("num_requests_waiting", "Requests that wait for their turn.", one(now.waiting))
    yield from families.gauge(
        "kv_cache_usage_perc", "Share of the KV pages that running requests use; 1 is all of them.", one(now.kv_used)
    )
    yield from families.gauge(
        "kv_cache_kept_perc", "Share of the KV pages that only keep old text findable.", one(now.kv_kept)
    )


def _engine(families: Families, reading: Reading) -> Iterator[Metric]:
    """The engine process."""
    up = reading.status.state == "ready"
    yield from families.gauge("engine_up", "1 if the engine takes requests.", one(up))
    yield from families.counter(
        "engine_restarts", "Times the engine process was started again.", by(reading.restarts), ["cause"]
    )
    yield from families.counter(
        "request_resumes",
        "Times a request went on in the engine process behind the one that ran it.",
        one(reading.resumed),
    )
    yield from families.gauge(
        "startup_time_seconds", "The engine's last start by phase.", by(reading.startup), ["phase"]
    )


def _replicas(families: Families, replicas: Sequence[Replica]) -> Iterator[Metric]:
    """How each engine is, where there are several."""
    if not replicas:
        return
    labels = ("replica", "address")
    for name, about in (
        ("running", "Requests that run in a replica, as far as this server knows."),
        ("waiting", "Requests that wait in a replica for their turn."),
        ("kv_used", "Share of a replica's KV pages that running requests use."),
    ):
        series = [((one.name, one.address), float(getattr(one, name))) for one in replicas]
        yield from families.gauge(f"replica_{name}", about, series, labels)


def _server(families: Families, connections: Connections) -> Iterator[Metric]:
    """The server itself."""
    responses = {str(status): count for status, count in connections.http.items()}
    yield from families.counter(
        "http_responses", "HTTP responses; 499: the client left; 101: a WebSocket closed.", by(responses), ["status"]
    )
    yield from families.gauge("websocket_connections_active", "WebSockets that are open.", one(connections.websockets))
    yield from families.histogram(
        "websocket_connection_duration_seconds",
        "How long WebSockets that are closed were open.",
        connections.websocket_seconds,
    )


def _build(families: Families, info: EngineInfo | None) -> Iterator[Metric]:
    """What runs, once anything does."""
    labels = ("version", "target", "drafter", "draft", "dtype", "device", "exact")
    known: list[Series] = []
    if info is not None:
        exact = "yes" if info.exact else "no"
        known = [((foresay.__version__, info.target, info.drafter, info.draft, info.dtype, info.device, exact), 1)]
    yield from families.gauge("build_info", "What runs.", known, labels)
    kept = [((info.kv_dtype,), info.kv_token_bytes)] if info is not None and info.kv_token_bytes else []
    yield from families.gauge(
        "kv_cache_token_bytes", "Bytes that the KV cache keeps of a token, drafters' among them.", kept, ["kv_dtype"]
    )


def _self_check(families: Families, counts: SelfCheckCounts) -> Iterator[Metric]:
    """What re-runs found; all 0 where nobody asked for them."""
    for name, about, count in (
        ("requests", "Finished requests that were decoded again plainly.", counts.checked),
        ("tokens", "Tokens compared with plain decoding.", counts.tokens),
        ("mismatch", "Requests whose tokens differ from plain decoding.", counts.mismatches),
    ):
        yield from families.counter(f"self_check_{name}", about, one(count))
    yield from families.gauge("self_check_waiting", "Requests that wait to be decoded again.", one(counts.waiting))
    skipped = "Requests that were picked but had to give way, or were lost."
    yield from families.counter("self_check_skipped", skipped, one(counts.skipped))
