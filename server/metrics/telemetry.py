"""Everything counted for one model, owned by its :class:`~foresay.server.models.service.Service`; runs only on the
event loop's thread.

::

    EngineClient.observe ── step(trace) ──┐
    Service.generation ── watching() ── RequestStats.kept, delivered ──┴── Ring ── snapshot, history, records, the log
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import cast

import foresay
from foresay.server.engine.generation import EngineStatus, StatusSource
from foresay.server.gateway.keys import CONTEXT
from foresay.server.metrics.counters import Counters, shape_of
from foresay.server.metrics.fields import TOKEN_BOUNDS, count
from foresay.server.metrics.records import (
    Connections,
    EngineGauges,
    Gauges,
    Replica,
    SelfCheckCounts,
    Startup,
)
from foresay.server.metrics.report import HistoryReport, Live, Point, RequestSummary, Server, Snapshot, from_counts
from foresay.server.metrics.ring import Ring
from foresay.server.schemas.errors import ApiError
from foresay.server.schemas.shared import PromptProgress
from foresay.server.text.choice import Choice, Piece
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta, Origin, RequestEnd
from foresay.spec.trace import StepTrace

#: The page's message for a server that is about to stop.
DRAINING = "running requests finish, new ones are refused"
#: Error codes that are no failure: the client ended the request.
CLIENT_ENDED = frozenset({"cancelled"})
#: Seconds of the page's figures, and of those that tell whether the machine is busy.
LIVE_SECONDS, BUSY_SECONDS = 60, 10
#: Weight of one step in the moving average of a step without drafts.
_MOVED = 1 / 16
#: Exceptions that mean that the client has left.
LEFT = (asyncio.CancelledError, GeneratorExit, ConnectionError)
#: Finished requests that are shown to their tenant.
MOST_PER_TENANT = 100


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 that do not run backwards when the clock is set."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class Telemetry:
    """What one model's engine did and what clients got. connections: of the whole
    server. draining: no more requests are taken. self_check: results of re-runs. arriving: requests that wait until the
    model is loaded. replicas: the state of each engine, if there are several.
    """

    def __init__(
        self,
        model: str,
        engine: StatusSource,
        clock: Callable[[], float] | None = None,
        connections: Connections | None = None,
    ) -> None:
        self.model = model
        self.connections = connections or Connections()
        self.clock = clock or steady_clock()
        self.started = self.clock()
        self.startup = Startup(self.clock)
        self.self_check = SelfCheckCounts()
        self.draining = False
        self.arriving = 0
        self.replicas: Callable[[], list[Replica]] = list
        self.engine = engine
        self._ring = Ring(self.clock)
        self._running: dict[str, RequestStats] = {}
        self._finished: dict[str, deque[RequestSummary]] = {}  # by tenant, which never sees another's
        self._last: StepTrace | None = None
        self._root_seconds, self._stepped = 0.0, 0

    # -- counting ------------------------------------------------------------------------------------------------

    def step(self, trace: StepTrace) -> None:
        """Count a step of the engine. To be called for every step; costs microseconds. Of re-runs only the pace
        counts."""
        if trace.sequences == 1 and trace.root_seconds:
            known = self._root_seconds or trace.root_seconds
            self._root_seconds = known + _MOVED * (trace.root_seconds - known)
        for id, (read, cached) in trace.reading.items():
            if (stats := self._running.get(id)) is not None:
                stats.reads(read, cached, sum(trace.seconds.values()))
        if trace.aside:
            return
        self._last = trace
        self._ring.delivered = now = self.clock()
        self._ring.at(now).step(trace)
        self._stepped = int(now)

    def see(self, status: EngineStatus) -> None:
        """Record a new status of the engine. One that starts shares no step with the one before."""
        if status.state == "loading":
            self._root_seconds, self._last = 0.0, None
        self.startup.see(status)

    @contextmanager
    def watching(self, choices: Sequence[Choice]) -> Iterator[list[RequestStats]]:
        """Count what becomes of these choices; one that has not ended by the end of the context has failed, or was
        cancelled by its client."""
        tenant, request_id = CONTEXT.get().caller.tenant, CONTEXT.get().id
        forks = Counter(choice.request.fork_of for choice in choices)
        all_stats = [
            RequestStats(choice, tenant, request_id, self._ring, 1 + forks[choice.request.id]) for choice in choices
        ]
        self._running |= {stats.id: stats for stats in all_stats}
        reason, failed = "cancelled", False
        try:
            yield all_stats
        except LEFT:
            raise
        except (ApiError, InvalidRequest) as error:
            reason = error.code or "invalid_request"
            failed = reason not in CLIENT_ENDED
            raise
        except Exception:
            reason, failed = "internal_error", True
            raise
        finally:
            for stats in all_stats:
                stats.failed(reason, failed)
                if self._running.pop(stats.id, None) is not None:
                    self._finished.setdefault(tenant, deque(maxlen=MOST_PER_TENANT)).append(stats.summary())

    # -- reporting -------------------------------------------------------------------------------------------------

    @property
    def gauges(self) -> Gauges:
        """The current gauges. Between steps the admitted requests are more current than the latest step."""
        present, last, info = len(self._running), self._last, self.engine.info
        reading = [stats for stats in self._running.values() if stats.leads and not stats.runs]
        unread = sum(stats.prompt_tokens - stats.read_tokens for stats in reading)
        if last is None or info is None or self.engine.status.state != "ready":
            return Gauges(num_requests_waiting=present + self.arriving, prompt_tokens_unread=unread)
        room = info.kv_tokens / info.page_size
        waiting = max(present - info.max_seqs, min(last.waiting, present))
        used = min(1.0, last.pages / room) if present else 0.0
        return Gauges(present - waiting, waiting, unread, used, min(1.0, last.kept_pages / room))

    @property
    def plain_seconds(self) -> float:
        """Seconds of a decoding step of one request without drafts; 0 if unknown."""
        info = self.engine.info
        return self._root_seconds or (info.root_seconds if info is not None else 0.0)

    def totals(self) -> Counters:
        """Everything counted since the start."""
        return self._ring.total()

    def records(self) -> tuple[Counters, Gauges, EngineGauges, Startup, SelfCheckCounts]:
        """All that metrics are read from, as of now, besides connections."""
        up, info, gauges, plain = self.engine.status.state == "ready", self.engine.info, self.gauges, self.plain_seconds
        of_engine = EngineGauges.of(up, info, self.minute(), gauges.num_requests_waiting, plain, self.replicas())
        return self.totals(), gauges, of_engine, self.startup, self.self_check

    def minute(self) -> Counters:
        """What was counted in the last minute."""
        return self._ring.since(int(self.clock()) - LIVE_SECONDS + 1)

    def between(self, begin: int, end: int) -> Counters:
        """What was counted from second ``begin`` up to, but not including, second ``end``, of the last two minutes."""
        return self._ring.between(begin, end)

    async def snapshot(self) -> Snapshot:
        """Header, tiles, drafters and tree, as of now."""
        hour = self._ring.hour(self.clock())
        await asyncio.sleep(0)  # half of the work is done: let streams run
        now = self.clock()
        until = self._stepped or int(now)
        recent = self._ring.since(int(now) - BUSY_SECONDS + 1)
        minute = self._ring.between(until - LIVE_SECONDS + 1, until + 1)
        live = Live.of(recent, minute, until, self.plain_seconds, self.gauges)
        return Snapshot.of(now, self._server(now), live, minute, hour, self.totals(), copy(self.self_check))

    def history(self) -> HistoryReport:
        """All charts, for ``msgspec.json.encode``. Seconds without activity are left out, and so is the current one."""
        now = self.clock()
        return HistoryReport(
            now=now,
            bounds=list(TOKEN_BOUNDS),
            minutes=cast("list[Point]", [point for _, point in self._ring.minutes(now)]),
            seconds=cast("list[Point]", [point for _, point in self._ring.seconds(now)]),
        )

    def points(self, after: int) -> tuple[list[Point], int]:
        """The finished seconds after second ``after``, for ``msgspec.json.encode``, and the last of them."""
        over = self._ring.seconds(self.clock(), after + 1)
        return cast("list[Point]", [point for _, point in over]), over[-1][0] if over else after

    def requests(self, tenant: str) -> list[RequestSummary]:
        """The tenant's running requests and last 100 finished ones, the newest first."""
        running = [stats.summary() for stats in self._running.values() if stats.tenant == tenant]
        summaries = [*reversed(running), *reversed(self._finished.get(tenant, ()))]
        return sorted(summaries, key=lambda one: one.started, reverse=True)

    def _server(self, now: float) -> Server:
        status = self.engine.status
        return from_counts(
            Server,
            self.engine.info,
            model=self.model,
            status="draining" if self.draining else status.state,
            message=DRAINING if self.draining else status.message,
            version=foresay.__version__,
            started=self.started,
            uptime=now - self.started,
            restarts=sum(self.startup.engine_restarts.values()),
            resumed=self.startup.request_resumes,
            replicas=self.replicas(),
        )


# -- one request -------------------------------------------------------------------------------------------------------

#: The origin of tokens that came without one.
NOWHERE = Origin(0, "", [-1], 0, [], {})


class RequestStats:
    """What is shown of one request, and of it counted in the counters of all. Its acceptance is counted by its choice.

    choices: number requested with it.
    """

    def __init__(self, choice: Choice, tenant: str, request_id: str, ring: Ring, choices: int = 1) -> None:
        self.tenant, self.request_id, self.choices = tenant, request_id, choices
        self.id, self.prompt_tokens = choice.request.id, len(choice.request.prompt)
        self.leads, self.params = choice.request.fork_of is None, choice.request.params
        self.seed = self.params.seed
        self.began = ring.clock()
        self.ended: float | None = None
        self.finish_reason: str | None = None
        self.read_tokens = 0 if self.leads else self.prompt_tokens
        self.cached_tokens = 0
        self.drafters: dict[str, int] = {}
        self._counts = choice.counts
        self._first: float | None = None
        self._last = 0.0
        self._ring = ring
        self._reading_since, self._adopted = self.began, 0

    def reads(self, read: int, cached: int, seconds: float) -> None:
        """The engine has read ``read`` tokens of its prompt, and found ``cached`` of them. seconds: of this step."""
        if not self.read_tokens:
            self._reading_since = self._ring.clock() - seconds
        if not self.runs:  # later, the text is read again after preemption
            self.read_tokens, self._adopted = read, cached

    @property
    def progress(self) -> PromptProgress | None:
        """How far its prompt is read."""
        if not self.leads or not (self.read_tokens or self.runs):
            return None
        until = self._ring.clock() if self._first is None else self._first
        return PromptProgress(
            total=self.prompt_tokens,
            cache=max(self._adopted, self.cached_tokens),
            processed=self.prompt_tokens if self.runs else self.read_tokens,
            time_ms=round(1000 * (until - self._reading_since), 3),
        )

    def kept(self, delta: Delta, piece: Piece) -> None:
        """Count one step of this request, and what of it is in the text."""
        now = self._ring.clock()
        counters = self._ring.at(now)
        if delta.cached_tokens > self.cached_tokens and self.leads:
            counters.prompt_tokens_cached += delta.cached_tokens - self.cached_tokens
            counters.prefix_cache_hits = counters.prompt_tokens_cached
            self.cached_tokens = delta.cached_tokens
        if delta.tokens:
            self.seed = delta.seed
            self._run(counters, delta, piece)
        if piece.finish_reason is not None and self.finish_reason is None:
            self.finish_reason = piece.finish_reason
            self._over(counters, now, delta.ending)

    def delivered(self, tokens: int) -> None:
        """A chunk of ``tokens`` is sent: the time since the previous one is a chunk gap, and each token's share of it a
        time per token. The first chunk ends the time to first token instead."""
        if not tokens:
            return
        now = self._ring.clock()
        counters = self._ring.at(now)
        count(counters.step_phase_seconds, "deliver", now - (self._ring.delivered or now))
        self._ring.delivered = now
        if self._first is None:
            self._first = now
            until = self._counts.delivered = round(1000 * (now - self.began), 3) / 1000  # as a response's milliseconds
            counters.time_to_first_token_seconds.observe(until)
        else:
            gap = now - self._last
            counters.inter_chunk_latency_seconds.observe(gap)
            counters.time_per_output_token_seconds.observe(gap / tokens, tokens)
        self._last = now

    def failed(self, reason: str, error: bool) -> None:
        """It ended without its last delta. reason: the code of its error, or why it was cancelled."""
        if self.finish_reason is None:
            now = self._ring.clock()
            counters = self._ring.at(now)
            if error:
                count(counters.request_errors, reason, 1)
            self.finish_reason = "error" if error else "cancelled"
            self._over(counters, now, None)

    def summary(self) -> RequestSummary:
        """The request in numbers, rounded as in the response's ``metrics``, so that both are shown as the same."""
        seconds = (self._ring.clock() if self.ended is None else self.ended) - self.began
        counts, per_step, drafted = self._counts, self._counts.tokens_per_step, self._counts.drafted
        return from_counts(
            RequestSummary,
            self,
            started=self.began,
            temperature=self.params.temperature,
            output_tokens=counts.completion_tokens,
            time_to_first_token=counts.delivered,
            seconds=seconds,
            tokens_per_second=round(counts.decode_tokens_per_second, 2) or None,
            steps=counts.steps,
            drafts=counts.drafts,
            drafted=drafted,
            accepted=counts.accepted,
            discarded=counts.discarded,
            acceptance_rate=round(counts.accepted / drafted, 4) if drafted else None,
            tokens_per_step=per_step and round(per_step, 4),
        )

    @property
    def runs(self) -> int:
        """Steps that emitted tokens."""
        return self._counts.steps

    def _run(self, counters: Counters, delta: Delta, piece: Piece) -> None:
        """Count the tokens of one step, which its choice has just counted."""
        origin, kept = delta.origin or NOWHERE, len(piece.token_ids)
        drafted, accepted = self._counts.per_step_drafted[-1], self._counts.per_step_accepted[-1]
        last = origin.path[accepted - 1] if accepted else 0
        counters.run(origin.drafter, shape_of(tuple(origin.parents)), last, kept)
        if self.runs == 1 and self.leads:
            counters.prompt_tokens += self.prompt_tokens
            counters.prefix_cache_queries = counters.prompt_tokens
        self.read_tokens = self.prompt_tokens
        counters.spec_decode_num_discarded_tokens += len(delta.tokens) - kept
        if drafted:
            count(self.drafters, origin.drafter, 1)
        counters.spec_decode_num_forced_tokens += origin.forced

    def _over(self, counters: Counters, now: float, ending: RequestEnd | None) -> None:
        """Count a request that has ended; its phases only if it ran to its end."""
        counts = self._counts
        self.ended = now
        counters.ended(self.finish_reason or "")
        counters.e2e_request_latency_seconds.observe(now - self.began)
        counters.request_prompt_tokens.observe(self.prompt_tokens)
        counters.request_generation_tokens.observe(counts.completion_tokens)
        if (most := self.params.max_tokens) is not None:
            counters.request_params_max_tokens.observe(most)
        if self.leads:
            counters.request_params_n.observe(self.choices)
        if ending is not None:
            queue = counts.seconds["queue"]
            reading = max((counts.first or 0.0) - queue, 0.0)
            counters.request_queue_time_seconds.observe(queue)
            counters.request_num_preemptions.observe(ending.preemptions)
            counters.request_prefill_time_seconds.observe(reading)
            counters.request_decode_time_seconds.observe(counts.decode_seconds)
            counters.request_inference_time_seconds.observe(reading + counts.decode_seconds)
        if self._first is not None and counts.completion_tokens > 1:
            counters.request_time_per_output_token_seconds.observe((now - self._first) / (counts.completion_tokens - 1))
