"""The engine: requests in, deltas out, one step at a time. Token ids only; synchronous; one thread.

It owns the sequences and their lifecycle. Every added request ends with exactly one delta with a finish reason, and
frees all its pages then.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from foresay.kvpaging import PagePool, PageTable, PrefixIndex
from foresay.spec.adjust import Adjustment
from foresay.spec.constrain import Constraint, Guarded
from foresay.spec.errors import ContextLengthExceeded, InvalidRequest
from foresay.spec.names import PREDICTION
from foresay.spec.observer import Observer, Observers
from foresay.spec.protocols import Drafter, Verifier
from foresay.spec.request import Delta, EngineInfo, FinishReason, Origin, Request, RequestEnd
from foresay.spec.sample import Noise
from foresay.spec.sampling import SEED_RANGE
from foresay.spec.scheduler import Scheduler
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence, StepRunner, VerifyResult
from foresay.spec.trace import StepTrace, Stopwatch
from foresay.spec.tree import MAX_NODES


class EngineCore:
    """Generates tokens for up to ``info.max_seqs`` requests at once; more wait in order of arrival.

    crowded: see :class:`~foresay.spec.trace.StepTrace`. ahead: what is done before it is needed, piece by piece.
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        pool: PagePool,
        prefix: PrefixIndex | None,
        verifier: Verifier,
        drafter: Drafter | None,
        scheduler: Scheduler,
        runner: StepRunner | None = None,
        crowded: Callable[[], float] = lambda: 0.0,
        ahead: Iterable[object] = (),
    ) -> None:
        self.info, self.pool, self.prefix = info, pool, prefix
        self.drafter, self.scheduler = drafter, scheduler
        self.runner = runner or StepRunner(verifier, drafter)
        self._crowded, self._ahead = crowded, iter(ahead)
        self.steps = 0
        self.trace: StepTrace | None = None
        self._observers = Observers()
        if scheduler.budget is not None:
            self.observe(scheduler.budget)
        self._sequences: dict[str, SequenceState] = {}
        self._ended: list[Delta] = []

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return bool(self._sequences or self._ended)

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        """Queue a request. Raises :class:`InvalidRequest`, which names the field that cannot be served.

        constraint: the request's compiled grammar, owned by the sequence from now on. A leader (``fork_of``) that no
        longer runs is no error: the request then computes its prompt itself. A request that another engine began
        (``progress``) goes on as after preemption: its tokens are kept, and their KV is computed again.
        """
        if request.id in self._sequences:
            raise InvalidRequest("request_id", f"request id {request.id!r} is already running")
        if request.grammar is not None and constraint is None:
            raise InvalidRequest(request.grammar.param, ": this engine compiles no grammars")
        self._sequences[request.id] = sequence = self._sequence(request, constraint)
        sequence.replay()
        self.scheduler.add(sequence)

    def _leader(self, request: Request) -> SequenceState | None:
        """The sequence whose prompt KV the request will share, or None."""
        leader = self._sequences.get(request.fork_of) if request.fork_of is not None else None
        if leader is None:
            return None
        if (leader.tokens[: leader.prompt_length], leader.salt) != (request.prompt, request.salt):
            raise InvalidRequest("fork_of", f"request {request.fork_of!r} has another prompt")
        return leader.leader or leader

    def _sequence(self, request: Request, constraint: Constraint | None) -> SequenceState:
        params = request.params
        request.validate(self.info.vocab_size)
        seed = secrets.randbits(32) if params.seed is None else params.seed % SEED_RANGE
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.info.eos_token_ids))
        return SequenceState(
            id=request.id,
            tokens=[*request.prompt, *request.committed],
            prompt_length=len(request.prompt),
            sampling=params,
            table=PageTable(self.pool),
            noise=Noise(seed, self.info.vocab_size),
            limit=self._limit(request),
            stop_ids=frozenset(stops),
            salt=request.salt,
            forced=request.forced,
            prediction=request.prediction,
            adjustment=Adjustment.of(params, request.prompt, self.info.vocab_size),
            constraint=None
            if constraint is None
            else Guarded(constraint, self.info.vocab_size, request.grammar.param if request.grammar else ""),
            leader=self._leader(request),
            prompt_logprobs=[None] if _scores_prompt(request) else None,
            resumed_at=len(request.committed),
            speculate=request.speculate,
            draft_method=request.draft_method,
            most_drafted=MAX_NODES if request.most_drafted is None else request.most_drafted,
            aside=request.aside,
            private=request.private,
            cached_tokens=0 if request.progress is None else request.progress.cached_tokens,
            arrived=time.perf_counter() if request.progress is None else request.progress.arrived,
        )

    def _limit(self, request: Request) -> int:
        """The most tokens the sequence may reach."""
        prompt, room = request.prompt, self.info.max_model_len
        if not prompt:
            raise InvalidRequest("prompt", " must hold at least one token")
        wanted = request.params.max_tokens
        if len(prompt) + (wanted or 1) > room:
            limit = f" and max_tokens is {wanted}" if wanted else ""
            raise ContextLengthExceeded(
                "max_tokens" if wanted and len(prompt) < room else "prompt",
                f"the model holds {room} tokens, but the prompt has {len(prompt)}{limit}",
            )
        return len(prompt) + wanted if wanted else room

    def cancel(self, request_id: str) -> None:
        """Stop a request at once; unknown ids (already finished ones) are no error."""
        self.notify()
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, "cancelled")

    def finish(self, request_id: str, at_token: int) -> None:
        """A stop string ended the text at output token number ``at_token``: later tokens are discarded.

        The last delta (reason "stop") is returned by the next step, unless the request has already ended.
        """
        self.notify()
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        keep = sequence.prompt_length + min(max(at_token, 0), sequence.output_length)
        del sequence.tokens[keep:]
        if sequence.table.length > keep - 1:
            sequence.table.truncate(max(keep - 1, 0))
        self._end(sequence, "stop")

    def keep_one(self) -> bool:
        """Write a page of KV to disk, if that is switched on and there is a new one; returns whether there are more."""
        return self.prefix is not None and self.prefix.write_one()

    def prepare_one(self) -> bool:
        """Do a piece of what later texts would wait for, at most some tenths of a second; False if nothing is left."""
        return next(self._ahead, self) is not self

    def observe(self, observer: Observer) -> None:
        """Notify one more observer from now on."""
        self._observers.add(observer)

    def notify(self) -> None:
        """Notify the observers of what happened. Call it once the step's deltas have been sent; otherwise it is done
        before anything else happens."""
        self._observers.notify()

    def step(self) -> list[Delta]:
        """Run one step for all sequences that can run; returns the deltas. ``trace`` describes the step afterwards."""
        self.notify()
        self.trace = None
        begun, watch = time.perf_counter(), Stopwatch()
        batch = self.scheduler.plan()
        for sequence in self.scheduler.preempted:
            self._forget_drafts(sequence)
        watch.lap("plan")
        deltas, self._ended = self._ended, []
        if not batch:
            return deltas
        for scheduled in batch:
            scheduled.sequence.started = scheduled.sequence.started or begun
        results = self.runner.run(batch, watch)
        seconds, first = watch.seconds, self._observers.noted
        deltas += [delta for result in results if (delta := self._finalize(result, seconds)) is not None]
        self.scheduler.trim(self.runner.ahead)
        self.steps += 1
        self.trace = trace = self._trace(batch, results, seconds)
        self._observers.note(lambda observer: observer.stepped(trace, results), first)
        return deltas

    def _finalize(self, result: VerifyResult, seconds: dict[str, float]) -> Delta | None:
        """Publish final KV, and make the delta."""
        scheduled, sequence = result.scheduled, result.scheduled.sequence
        if scheduled.prefill and result.emitted:
            self._publish(sequence)
        if result.emitted:
            self.scheduler.share_prompt(sequence)
        if sequence.finished:
            self._remove(sequence)
        elif not result.emitted:
            return None
        return self._delta(sequence, result, seconds)

    def _delta(
        self, sequence: SequenceState, result: VerifyResult | None = None, seconds: dict[str, float] | None = None
    ) -> Delta:
        """The delta of a sequence; without a result, only how it ended. seconds: of the step, by phase."""
        tokens = result.emitted if result is not None else []
        first = bool(tokens) and len(tokens) == sequence.output_length
        return Delta(
            id=sequence.id,
            tokens=tokens,
            finish_reason=sequence.finish_reason,
            stop_token=sequence.stop_token,
            error=None if sequence.error is None else str(sequence.error),
            fault=sequence.error.fault if isinstance(sequence.error, InvalidRequest) else None,
            seed=sequence.noise.seed,
            cached_tokens=sequence.cached_tokens,
            queued=sequence.queued,
            elapsed=time.perf_counter() - sequence.arrived,
            logprobs=result.logprobs if result is not None else None,
            prompt_logprobs=sequence.prompt_logprobs if first else None,
            ending=RequestEnd(self.scheduler.levels_of(sequence), sequence.preemptions) if sequence.finished else None,
            origin=self._origin(result, seconds or {}) if result is not None and tokens else None,
        )

    def _origin(self, result: VerifyResult, seconds: dict[str, float]) -> Origin:
        """Where the emitted tokens of this step come from. Called before the step is counted."""
        tree = result.tree
        assert tree is not None, "tokens are emitted from a tree"
        return Origin(
            step=self.steps + 1,
            drafter=tree.drafter,
            parents=tree.parents,
            forced=result.forced,
            path=list(result.path),
            seconds=seconds,
            sources=[tree.sources[node] for node in result.path] if tree.sources else [],
            predicted=tree.sources.count(PREDICTION)
            if tree.sources
            else (len(tree) - 1 - result.forced) * (tree.drafter == PREDICTION),
        )

    def _end(self, sequence: SequenceState, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._remove(sequence)
        self._ended.append(self._delta(sequence))

    def _remove(self, sequence: SequenceState) -> None:
        """Free everything a finished sequence holds; its KV stays in the prefix cache unless it failed."""
        del self._sequences[sequence.id]
        if sequence.finish_reason != "error":
            self._publish(sequence)
        self._forget_drafts(sequence)
        self.scheduler.remove(sequence)
        self._observers.note(lambda observer: observer.ended(sequence))

    def _forget_drafts(self, sequence: SequenceState) -> None:
        if self.drafter is not None:
            self.drafter.finished(sequence)

    def _publish(self, sequence: SequenceState) -> None:
        """Publish the full pages of final text in the prefix cache: the prompt once it is computed, and everything at
        the end."""
        if self.prefix is not None and not sequence.aside:
            self.prefix.publish(sequence.table, sequence.tokens, sequence.salt, sequence.private)

    def _trace(
        self, batch: list[ScheduledSequence], results: list[VerifyResult], seconds: dict[str, float]
    ) -> StepTrace:
        prefills = sum(scheduled.prefill for scheduled in batch)
        verified = sum(len(result.tree) for result in results if result.tree is not None)
        drafted = verified - sum(result.tree is not None for result in results)
        rows = prefills + verified
        cost, context, root_seconds = self.scheduler.cost, sum([len(v.scheduled.sequence.tokens) for v in results]), 0.0
        reading = [v.scheduled.sequence for v in results if v.scheduled.prefill and not v.emitted]
        guard = None if self.scheduler.budget is None else self.scheduler.budget.guard
        measured = 0.0 if guard is None or prefills else guard.plain_seconds(len(batch))
        if not prefills:
            estimated = cost.saw(rows, len(batch), context, seconds)
            root_seconds = measured or estimated
        return StepTrace(
            number=self.steps,
            rows=rows,
            sequences=len(batch),
            prefill_rows=prefills,
            drafted=drafted,
            accepted=sum(v.accepted for v in results),
            emitted=sum(len(v.emitted) for v in results),
            seconds=seconds,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages=self.pool.num_pages - 1 - self.pool.available,
            kept_pages=self.pool.idle,
            preemptions=len(self.scheduler.preempted),
            plain=sum(not scheduled.sequence.speculate for scheduled in batch),
            aside=sum(scheduled.sequence.aside for scheduled in batch),
            root_seconds=root_seconds,
            unsure=bool(drafted) and not measured and cost.unsure,
            spread=0.0 if guard is None else guard.spread,
            choice=self.scheduler.choice,
            news=self.scheduler.news,
            unable=self._unable(results),
            crowded=self._crowded(),
            woken=self.runner.woken,
            reading={v.id: (v.table.length, v.cached_tokens) for v in reading},
            disk={} if self.prefix is None or self.prefix.disk is None else self.prefix.disk.take_counts(),
        )

    def _unable(self, results: Sequence[VerifyResult]) -> str:
        """Why a drafter that was to draft in this step could not; "" if none."""
        budget, sequences = self.scheduler.budget, [result.scheduled.sequence for result in results]
        found = next((sequence.unable for sequence in sequences if sequence.unable), "")
        for sequence in sequences:
            sequence.unable = ""
        return found if budget is None else budget.failed or found

    def check(self) -> None:
        """Check the page accounting; raises AssertionError if a page is leaked or held twice."""
        self.runner.rest()
        self.scheduler.trim(self.runner.ahead)
        self.pool.check([s.table for s in self._sequences.values()], at_rest=True)


def _scores_prompt(request: Request) -> bool:
    """Whether its prompt's logprobs are computed: once, by the leader of its choices, before the first token is
    emitted."""
    return request.params.prompt_logprobs is not None and request.fork_of is None and not request.committed
