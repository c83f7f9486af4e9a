"""Everything counted for one model, owned by its :class:`~foresay.server.models.service.Service`; runs only on the
event loop's thread.

::

    EngineClient.observe ── step(trace) ──┐
    Service.generation ── watching() ── RequestStats.kept, delivered ──┴── Ring ── snapshot, history, records, the log
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import cast

import foresay
from foresay.server.engine.generation import EngineStatus, StatusSource
from foresay.server.gateway.keys import CONTEXT
from foresay.server.metrics.counters import Counters
from foresay.server.metrics.fields import TOKEN_BOUNDS, Histogram, declared, value_of
from foresay.server.metrics.records import (
    Connections,
    EngineGauges,
    Gauges,
    Replica,
    SelfCheckCounts,
    Startup,
)
from foresay.server.metrics.report import (
    DrafterRates,
    HistoryReport,
    Live,
    Node,
    Point,
    RequestSummary,
    Server,
    Snapshot,
    Woken,
    from_counts,
)
from foresay.server.metrics.request_stats import Recent, RequestStats, SharedStats
from foresay.server.metrics.verdict import judged
from foresay.server.schemas.errors import ApiError
from foresay.server.text.choice import Choice
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import EngineInfo
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
        self._shared, self._recent = SharedStats(self.clock), Recent()
        self._ring = self._shared.ring
        self._root_seconds, self._stepped = 0.0, 0

    # -- counting ------------------------------------------------------------------------------------------------

    def step(self, trace: StepTrace) -> None:
        """Count a step of the engine. To be called for every step; costs microseconds. Of re-runs only the pace
        counts."""
        if trace.sequences == 1 and trace.root_seconds:
            known = self._root_seconds or trace.root_seconds
            self._root_seconds = known + _MOVED * (trace.root_seconds - known)
        for id, (read, cached) in trace.reading.items():
            self._recent.reads(id, read, cached, sum(trace.seconds.values()))
        if trace.aside:
            return
        shared = self._shared
        shared.step = trace
        shared.delivered = now = shared.clock()
        shared.ring.at(now).step(trace)
        self._stepped = int(now)

    def see(self, status: EngineStatus) -> None:
        """Record a new status of the engine. One that starts shares no step with the one before."""
        if status.state == "loading":
            self._root_seconds, self._shared.step = 0.0, None
        self.startup.see(status)

    @contextmanager
    def watching(self, choices: Sequence[Choice]) -> Iterator[list[RequestStats]]:
        """Count what becomes of these choices; one that has not ended by the end of the context has failed, or was
        cancelled by its client."""
        tenant, request_id = CONTEXT.get().caller.tenant, CONTEXT.get().id
        forks = Counter(choice.request.fork_of for choice in choices)
        all_stats = [
            RequestStats(choice, tenant, request_id, self._shared, 1 + forks[choice.request.id]) for choice in choices
        ]
        for stats in all_stats:
            self._recent.begin(stats)
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
                self._recent.end(stats)

    # -- reporting -------------------------------------------------------------------------------------------------

    @property
    def gauges(self) -> Gauges:
        """The current gauges. Between steps the admitted requests are more current than the latest step."""
        present, last, info = self._recent.running, self._shared.step, self.engine.info
        unread = sum(stats.prompt_tokens - stats.read_tokens for stats in self._recent.unread)
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
        now, info = self.clock(), self.engine.info
        until = self._stepped or int(now)
        recent = self._ring.since(int(now) - BUSY_SECONDS + 1)
        minute = self._ring.between(until - LIVE_SECONDS + 1, until + 1)
        unable = "" if minute.unable is None else minute.unable.unable
        return Snapshot(
            now=now,
            server=self._server(now, info),
            live=Live.of(recent, minute, until, self.plain_seconds, self.gauges),
            drafters=DrafterRates.each(minute),
            drafters_hour=DrafterRates.each(hour),
            nodes=Node.each(minute),
            accepted_by_depth=minute.by_depth,
            accepted_by_depth_hour=hour.by_depth,
            woken=Woken.each(hour),
            totals=_sums(self.totals()),
            verdict=f"{judged(minute).sentence} {unable}".rstrip(),
            self_check=copy(self.self_check),
        )

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
        return [stats.summary() for stats in self._recent.of(tenant)]

    def _server(self, now: float, info: EngineInfo | None) -> Server:
        status = self.engine.status
        made = Server if info is None else partial(from_counts, Server, info)
        return made(
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


def _sums(totals: Counters) -> dict[str, int | float]:
    """The sum of each counter, by its name."""
    values = {name: value_of(getattr(totals, name)) for name in declared(totals)}
    return {name: sum(one for _, one in value) for name, value in values.items() if not isinstance(value, Histogram)}
