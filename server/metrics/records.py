"""What else metrics are read from: clients' connections, starts of the engine process, results of re-runs, and gauges
of the engine as of now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, get_args

import msgspec

import foresay
from foresay.server.engine.generation import Cause, EngineStatus
from foresay.server.metrics.counters import Counters, Counts
from foresay.server.metrics.fields import SOCKET_BOUNDS, Histogram, count, counter, gauge, histogram
from foresay.server.metrics.verdict import judged
from foresay.spec.request import EngineInfo

ByName = dict[tuple[str, ...], float]
_LIMITED = 429


class Replica(msgspec.Struct, frozen=True):
    """One engine of several. address: where it is reached. running, waiting: its requests, as far as this server knows;
    own: those of this server. kv_used: share of its KV pages that running requests use."""

    name: str
    address: str
    drafter: str
    running: int
    waiting: int
    own: int
    kv_used: float


@dataclass(slots=True)
class Connections:
    """Those of all clients of a server."""

    http_responses: Counts = counter("HTTP responses; 499: the client left; 101: a WebSocket closed.", ["status"])
    admission_rejections: Counts = counter(
        "Requests that a limit refused, with 429.", ["reason"], known=["limit"], vllm=True, keep=[0]
    )
    websocket_connections_active: int = gauge("WebSockets that are open.", vllm=True)
    websocket_connection_duration_seconds: Histogram = histogram(
        "How long WebSockets that are closed were open.", SOCKET_BOUNDS, vllm=True
    )

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Count a WebSocket while it is open."""
        self.websocket_connections_active += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.websocket_connections_active -= 1
            self.websocket_connection_duration_seconds.observe(time.monotonic() - began)

    def answered(self, status: int) -> None:
        """Count an HTTP response."""
        count(self.http_responses, str(status), 1)
        if status == _LIMITED:
            count(self.admission_rejections, "limit", 1)


@dataclass
class Startup:
    """Follows the engine's status. startup_time_seconds: by phase of the last start, including ``total`` once it is
    ready. engine_restarts: of the engine process, by the cause of its predecessor's end."""

    clock: Callable[[], float]
    engine_restarts: Counts = counter("Times the engine process was started again.", ["cause"], get_args(Cause))
    request_resumes: int = counter("Times a request went on in the next engine process.")
    startup_time_seconds: dict[str, float] = gauge("The engine's last start by phase.", ["phase"])

    def __post_init__(self) -> None:
        self._phase, self._starts = "", 0
        self._phase_began = self._began = self.clock()

    def see(self, status: EngineStatus) -> None:
        """Record a new status of the engine."""
        now = self.clock()
        if status.cause is not None:
            self.engine_restarts[status.cause] += 1
        self.request_resumes += status.resumed
        if status.starts != self._starts:
            self._starts, self._began, self._phase, self.startup_time_seconds = status.starts, now, "", {}
        if self._phase:
            count(self.startup_time_seconds, self._phase, now - self._phase_began)
        if status.state == "ready" and self._phase:
            self.startup_time_seconds["total"] = now - self._began
        self._phase = status.message.replace(" ", "_") if status.state == "loading" else ""
        self._phase_began = now


@dataclass(slots=True)
class SelfCheckCounts:
    """share: of the finished requests to be decoded again plainly. skipped: dropped for newer ones, or lost with the
    engine."""

    share: float = 0.0
    self_check_requests: int = counter("Finished requests that were decoded again plainly.")
    self_check_tokens: int = counter("Tokens compared with plain decoding.")
    self_check_mismatch: int = counter("Requests whose tokens differ from plain decoding.")
    self_check_waiting: int = gauge("Requests that wait to be decoded again.")
    self_check_skipped: int = counter("Requests that were picked but gave way to others, or were lost.")


@dataclass(frozen=True, slots=True)
class Gauges:
    """How busy the engine is."""

    num_requests_running: int = gauge("Requests that run.", vllm=True)
    num_requests_waiting: int = gauge("Requests that wait for their turn.", vllm=True)
    prompt_tokens_unread: int = gauge("Tokens of the prompts of these requests that are still to be read.")
    kv_cache_usage_perc: float = gauge("Share of the KV pages that running requests use; 1 is all of them.", vllm=True)
    kv_cache_kept_perc: float = gauge("Share of the KV pages that only hold old text for reuse.")


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """What is known of the engine. The speed-up is of the last minute."""

    spec_decode_speed_up: float | None = gauge(
        "Estimate of the speed over plain decoding in the last minute; without decoding there is none."
    )
    spec_decode_speed_up_unsure: bool | None = gauge(
        "1 if that may be wrong: there were too few steps, or it is estimated and the machine's pace has changed."
    )
    plain_step_seconds: float = gauge("A decoding step of one request without drafts.")
    num_requests_waiting_by_reason: Counts = gauge(
        "The same by what they wait for, which is always room.", ["reason"], vllm=True, keep=[0]
    )
    replica_running: ByName = gauge(
        "Requests that run in a replica, as far as this server knows.", ["replica", "address"]
    )
    replica_waiting: ByName = gauge("Requests that wait in a replica for their turn.", ["replica", "address"])
    replica_kv_used: ByName = gauge("Share of a replica's KV pages that running requests use.", ["replica", "address"])
    engine_up: bool = gauge("1 if the engine takes requests.")
    build_info: ByName = gauge(
        "Version and settings of the engine.",
        ["version", "target", "drafter", "draft", "dtype", "device", "exact"],
    )
    cache_config_info: ByName = gauge(
        "Pages of the KV cache.", ["block_size", "num_gpu_blocks", "cache_dtype"], vllm=True, keep=[0, 1, 2]
    )
    kv_cache_token_bytes: Counts = gauge("Bytes of the KV cache for one token, drafters' included.", ["kv_dtype"])

    @classmethod
    def of(
        cls, up: bool, info: EngineInfo | None, minute: Counters, waiting: int, plain: float, replicas: list[Replica]
    ) -> Self:
        """minute: what was counted in the last minute. plain: seconds of a step without drafts."""
        build: ByName = {}
        pages: ByName = {}
        token_bytes: Counts = {}
        if info is not None:
            token_bytes |= {info.kv_dtype: info.kv_token_bytes} if info.kv_token_bytes else {}
            exact = "yes" if info.exact else "no"
            build[foresay.__version__, info.target, info.drafter, info.draft, info.dtype, info.device, exact] = 1
            pages[str(info.page_size), str(info.kv_tokens // info.page_size), info.kv_dtype] = 1
        return cls(
            spec_decode_speed_up=minute.speed_up,
            spec_decode_speed_up_unsure=None if minute.speed_up is None else bool(judged(minute).doubt),
            plain_step_seconds=plain,
            num_requests_waiting_by_reason={"capacity": waiting, "deferred": 0},
            replica_running={(one.name, one.address): one.running for one in replicas},
            replica_waiting={(one.name, one.address): one.waiting for one in replicas},
            replica_kv_used={(one.name, one.address): one.kv_used for one in replicas},
            engine_up=up,
            build_info=build,
            cache_config_info=pages,
            kv_cache_token_bytes=token_bytes,
        )
