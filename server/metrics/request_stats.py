"""Counts of one request, made where its text is cut: into the counters of all, and the request's own record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from foresay.server.metrics.counters import Counters, shape_of
from foresay.server.metrics.fields import count
from foresay.server.metrics.report import RequestSummary, from_counts
from foresay.server.metrics.ring import Ring
from foresay.server.schemas.shared import PromptProgress
from foresay.server.text.choice import Choice, Piece
from foresay.spec.request import Delta, Origin, RequestEnd
from foresay.spec.trace import StepTrace

#: The origin of tokens that came without one.
NOWHERE = Origin(0, "", [-1], 0, [], {})


@dataclass(slots=True)
class SharedStats:
    """What the stats of all requests share. clock: seconds since 1970 that do not run backwards. delivered: the time up
    to which delivery is counted: when the latest step arrived, or its latest text was passed on. step: the latest.
    """

    clock: Callable[[], float]
    ring: Ring = field(default_factory=Ring)
    delivered: float = 0.0
    step: StepTrace | None = None


class RequestStats:
    """What is shown of one request, and of it counted in the counters of all. Its acceptance is counted by its choice.

    choices: number requested with it.
    """

    def __init__(self, choice: Choice, tenant: str, request_id: str, shared: SharedStats, choices: int = 1) -> None:
        request = choice.request
        self.id, self.tenant, self.request_id = request.id, tenant, request_id
        self.prompt_tokens, self.leads = len(request.prompt), request.fork_of is None
        self.max_tokens, self.choices = request.params.max_tokens, choices
        self.temperature, self.seed = request.params.temperature, request.params.seed
        self.began = shared.clock()
        self.ended: float | None = None
        self._final: RequestSummary | None = None
        self.finish_reason: str | None = None
        self.read_tokens = 0 if self.leads else self.prompt_tokens
        self.cached_tokens = 0
        self.drafters: dict[str, int] = {}
        self._counts = choice.counts
        self._first: float | None = None
        self._last = 0.0
        self._shared = shared
        self._reading_since, self._adopted = self.began, 0

    def reads(self, read: int, cached: int, seconds: float) -> None:
        """The engine has read ``read`` tokens of its prompt, and found ``cached`` of them. seconds: of this step."""
        if not self.read_tokens:
            self._reading_since = self._shared.clock() - seconds
        if not self.runs:  # later, the text is read again after preemption
            self.read_tokens, self._adopted = read, cached

    @property
    def progress(self) -> PromptProgress | None:
        """How far its prompt is read."""
        if not self.leads or not (self.read_tokens or self.runs):
            return None
        until = self._shared.clock() if self._first is None else self._first
        return PromptProgress(
            total=self.prompt_tokens,
            cache=max(self._adopted, self.cached_tokens),
            processed=self.prompt_tokens if self.runs else self.read_tokens,
            time_ms=round(1000 * (until - self._reading_since), 3),
        )

    def kept(self, delta: Delta, piece: Piece) -> None:
        """Count one step of this request, and what of it is in the text."""
        now = self._shared.clock()
        counters = self._shared.ring.at(now)
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
        shared = self._shared
        now = shared.clock()
        counters = shared.ring.at(now)
        count(counters.step_phase_seconds, "deliver", now - (shared.delivered or now))
        shared.delivered = now
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
            now = self._shared.clock()
            counters = self._shared.ring.at(now)
            if error:
                count(counters.request_errors, reason, 1)
            self.finish_reason = "error" if error else "cancelled"
            self._over(counters, now, None)

    def summary(self) -> RequestSummary:
        """The request in numbers, rounded as in the response's ``metrics``, so that both are shown as the same."""
        if self._final is not None:  # the page asks for those of many requests each second
            return self._final
        seconds = (self._shared.clock() if self.ended is None else self.ended) - self.began
        counts, per_step, drafted = self._counts, self._counts.tokens_per_step, self._counts.drafted
        shown = from_counts(
            RequestSummary,
            self,
            started=self.began,
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
        self._final = None if self.ended is None else shown
        return shown

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
        if self.max_tokens is not None:
            counters.request_params_max_tokens.observe(self.max_tokens)
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


MOST_PER_TENANT = 100


class Recent:
    """Request stats by id. A tenant never sees another's."""

    def __init__(self) -> None:
        self._running: dict[str, RequestStats] = {}
        self._over: dict[str, RequestStats] = {}

    def begin(self, stats: RequestStats) -> None:
        """A request is admitted."""
        self._running[stats.id] = stats

    def end(self, stats: RequestStats) -> None:
        """It has ended: keep it among the last of its tenant."""
        if self._running.pop(stats.id, None) is None:
            return
        self._over[stats.id] = stats
        own = [one for one in self._over.values() if one.tenant == stats.tenant]
        for one in own[:-MOST_PER_TENANT]:
            del self._over[one.id]

    @property
    def running(self) -> int:
        """Number of requests running or waiting, of all tenants."""
        return len(self._running)

    @property
    def unread(self) -> list[RequestStats]:
        """Those of them whose prompts are not read to their ends, and not shared with others."""
        return [stats for stats in self._running.values() if stats.leads and not stats.runs]

    def reads(self, id: str, read: int, cached: int, seconds: float) -> None:
        """A step has read on in the prompt of a request; unknown ones are no error."""
        if (stats := self._running.get(id)) is not None:
            stats.reads(read, cached, seconds)

    def of(self, tenant: str) -> list[RequestStats]:
        """Running and recent requests, those that came last first."""
        running = [stats for stats in self._running.values() if stats.tenant == tenant]
        over = [stats for stats in self._over.values() if stats.tenant == tenant]
        return sorted([*reversed(running), *reversed(over)], key=lambda stats: stats.began, reverse=True)
