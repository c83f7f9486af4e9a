"""The engine: requests in, deltas out, one step at a time. Token ids only; synchronous; one thread.

It owns the sequences and their lifecycle. Every request that was added ends in exactly one delta with a finish reason,
and gives all its pages back then.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from kvpaging import PagePool, PageTable, PrefixIndex
from spec.adjust import Adjustment
from spec.constrain import Guarded
from spec.errors import ContextLengthExceeded, InvalidRequest
from spec.names import PREDICTION
from spec.noise import Noise
from spec.observer import Observer, Observers
from spec.protocols import Constraint, Drafter, Verifier
from spec.request import Delta, EngineInfo, FinishReason, Origin, Request
from spec.sampling import SEED_RANGE
from spec.scheduler import Scheduler
from spec.sequence import Sequence
from spec.step import PartsRunner, StepPlan, StepRunner, Verdict
from spec.trace import SequenceTrace, Statistics, StepTrace
from spec.tree import MAX_NODES


class Engine:
    """Generates tokens for up to ``info.max_seqs`` requests at once; more wait in order of arrival.

    crowded: see :class:`~spec.trace.StepTrace`.
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
        observers: Many[Observer] = (),
        runner: StepRunner | None = None,
        crowded: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.info, self.pool, self.prefix = info, pool, prefix
        self.drafter, self.scheduler = drafter, scheduler
        self.runner = runner or PartsRunner(verifier, drafter)
        self._crowded = crowded
        self.steps = 0
        self.trace: StepTrace | None = None
        budget = scheduler.budget
        self._observers = Observers([*([] if budget is None else [budget]), *observers])
        self._sequences: dict[str, Sequence] = {}
        self._ended: list[Delta] = []

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything."""
        return bool(self._sequences or self._ended)

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        """Queue a request. Raises :class:`InvalidRequest` naming the field that cannot be served.

        constraint: the request's grammar, compiled; the sequence's alone from now on. A leader (``fork_of``) that is
        not running any more is no error: the request then computes its prompt itself. One that another engine began
        (``progress``) goes on as a preempted one does: its tokens are there, and their KV is computed again.
        """
        if request.id in self._sequences:
            raise InvalidRequest("request_id", f"request id {request.id!r} is already running")
        if request.grammar is not None and constraint is None:
            raise InvalidRequest(request.grammar.param, f"{request.grammar.param}: this engine compiles no grammars")
        self._sequences[request.id] = sequence = self._sequence(request, constraint)
        sequence.replay()
        self.scheduler.add(sequence)
        self._observers.note(lambda observer: observer.begun(sequence))

    def _leader(self, request: Request) -> Sequence | None:
        """Whose prompt KV the request will share; None if there is nobody."""
        leader = self._sequences.get(request.fork_of) if request.fork_of is not None else None
        if leader is None:
            return None
        if (leader.tokens[: leader.prompt_length], leader.salt) != (request.prompt, request.salt):
            raise InvalidRequest("fork_of", f"request {request.fork_of!r} has another prompt")
        return leader.leader or leader

    def _sequence(self, request: Request, constraint: Constraint | None) -> Sequence:
        params = request.params
        request.validate(self.info.vocab_size)
        seed = secrets.randbits(32) if params.seed is None else params.seed % SEED_RANGE
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.info.eos_token_ids))
        return Sequence(
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
            trace=SequenceTrace() if request.progress is None else request.progress.trace,
            cached_tokens=0 if request.progress is None else request.progress.cached_tokens,
        )

    def _limit(self, request: Request) -> int:
        """The most tokens the sequence may reach."""
        prompt, room = request.prompt, self.info.max_model_len
        if not prompt:
            raise InvalidRequest("prompt", "prompt must hold at least one token")
        wanted = request.params.max_tokens
        if len(prompt) + (wanted or 1) > room:
            asked = f" and max_tokens is {wanted}" if wanted else ""
            raise ContextLengthExceeded(
                "max_tokens" if wanted and len(prompt) < room else "prompt",
                f"the model holds {room} tokens, but the prompt has {len(prompt)}{asked}",
            )
        return len(prompt) + wanted if wanted else room

    def cancel(self, request_id: str) -> None:
        """Stop a request at once; unknown ids (already finished ones) are no error."""
        self.tell()
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, "cancelled")

    def finish(self, request_id: str, at_token: int) -> None:
        """A stop string ended the text with output token number ``at_token``: what came after is discarded.

        The last delta (reason "stop") follows with the next step, unless the request has ended by itself already.
        """
        self.tell()
        sequence = self._sequences.get(request_id)
        if sequence is None:
            self._observers.note(lambda observer: observer.cut(request_id, at_token))
            return
        keep = sequence.prompt_length + min(max(at_token, 0), sequence.output_length)
        sequence.trace.cut(len(sequence.tokens) - keep)
        del sequence.tokens[keep:]
        if sequence.table.length > keep - 1:
            sequence.table.truncate(max(keep - 1, 0))
        self._end(sequence, "stop")

    def keep_warm(self, tokens: list[int], salt: str = "") -> None:
        """Let the KV of this text be the last to make room, as if a request with it had just ended."""
        if self.prefix is not None:
            self.prefix.keep_warm(tokens, salt)

    def tell(self) -> None:
        """Tell the observers what happened. To be called when what a step emitted is on its way; if nobody does, it is
        done before anything else happens."""
        self._observers.tell()

    def step(self) -> list[Delta]:
        """Run one step for all that can run; returns what it emitted. ``trace`` tells about it afterwards."""
        self.tell()
        self.trace = None
        begun = time.perf_counter()
        plan = self.scheduler.plan()
        for sequence in self.scheduler.preempted:
            self._forget_drafts(sequence)
        planned = {"plan": time.perf_counter() - begun}
        deltas, self._ended = self._ended, []
        if not plan.works:
            return deltas
        for work in plan.works:
            work.sequence.trace.started = work.sequence.trace.started or begun
        ticket = self.runner.submit(plan)
        verdicts = self.runner.collect(ticket)
        seconds, place = planned | ticket.watch.seconds, self._observers.noted
        deltas += [delta for verdict in verdicts if (delta := self._settle(verdict, seconds)) is not None]
        self.scheduler.settle(self.runner.ahead)
        self.steps += 1
        self.trace = trace = self._trace(plan, verdicts, seconds)
        self._observers.note(lambda observer: observer.stepped(trace, verdicts), place)
        return deltas

    def _settle(self, verdict: Verdict, seconds: dict[str, float]) -> Delta | None:
        """Count a verdict, publish what is final, and make the delta that goes out."""
        work, sequence = verdict.work, verdict.work.sequence
        sequence.trace.charge({"prefill": sum(seconds.values())} if work.lead else seconds)
        if verdict.emitted:
            sequence.trace.record(verdict.depths, verdict.accepted, len(verdict.emitted))
            sequence.trace.forced += verdict.forced
        if work.lead and verdict.emitted:
            self._publish(sequence)
        if verdict.emitted:
            self.scheduler.share_prompt(sequence)
        if sequence.finished:
            self._remove(sequence)
        elif not verdict.emitted:
            return None
        return self._delta(sequence, verdict, seconds)

    def _delta(
        self, sequence: Sequence, verdict: Verdict | None = None, seconds: dict[str, float] | None = None
    ) -> Delta:
        """What goes out for a sequence; without a verdict only how it ended. seconds: of the step, by phase."""
        tokens = verdict.emitted if verdict is not None else []
        first = bool(tokens) and len(tokens) == sequence.output_length
        return Delta(
            id=sequence.id,
            tokens=tokens,
            finish_reason=sequence.finish_reason,
            stop_token=sequence.stop_token,
            error=None if sequence.error is None else str(sequence.error),
            error_param=sequence.error.param if isinstance(sequence.error, InvalidRequest) else None,
            seed=sequence.noise.seed,
            cached_tokens=sequence.cached_tokens,
            queued=sequence.trace.queued,
            drafted=len(verdict.depths) if verdict is not None else 0,
            accepted=verdict.accepted if verdict is not None else 0,
            logprobs=verdict.logprobs if verdict is not None else None,
            prompt_logprobs=sequence.prompt_logprobs if first else None,
            statistics=self._statistics(sequence) if sequence.finished else None,
            origin=self._origin(verdict, seconds or {}) if verdict is not None and tokens else None,
        )

    def _origin(self, verdict: Verdict, seconds: dict[str, float]) -> Origin:
        """Where the emitted tokens of this step come from. Called before the step is counted."""
        tree = verdict.tree
        assert tree is not None, "whoever emits has a tree"
        return Origin(
            step=self.steps + 1,
            drafter=tree.drafter,
            parents=tree.parents.tolist(),
            forced=verdict.forced,
            path=verdict.path,
            seconds=seconds,
            sources=[tree.sources[node] for node in verdict.path] if tree.sources else [],
            predicted=tree.sources.count(PREDICTION)
            if tree.sources
            else (len(tree) - 1 - verdict.forced) * (tree.drafter == PREDICTION),
        )

    def _statistics(self, sequence: Sequence) -> Statistics:
        levels = self.scheduler.levels_of(sequence)
        return sequence.trace.statistics(sequence.prompt_length, sequence.cached_tokens, sequence.output_length, levels)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._remove(sequence)
        self._ended.append(self._delta(sequence))

    def _remove(self, sequence: Sequence) -> None:
        """Give back everything a finished sequence holds; good text stays findable."""
        del self._sequences[sequence.id]
        if sequence.finish_reason != "error":
            self._publish(sequence)
        self.scheduler.remove(sequence)
        self._forget_drafts(sequence)
        self._observers.note(lambda observer: observer.ended(sequence))

    def _forget_drafts(self, sequence: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.finished(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Index the full pages of final text: the prompt once it is computed, and everything at the end."""
        if self.prefix is not None and not sequence.aside:
            self.prefix.publish(sequence.table, sequence.tokens, sequence.salt)

    def _trace(self, plan: StepPlan, verdicts: list[Verdict], seconds: dict[str, float]) -> StepTrace:
        leads = sum(work.lead for work in plan.works)
        drafted = sum(len(v.depths) for v in verdicts)
        rows = leads + drafted + sum(1 for work in plan.works if work.shape is not None)
        plain = self.scheduler.plain
        return StepTrace(
            number=self.steps,
            rows=rows,
            sequences=len(plan.works),
            prefill_rows=leads,
            drafted=drafted,
            accepted=sum(v.accepted for v in verdicts),
            emitted=sum(len(v.emitted) for v in verdicts),
            seconds=seconds,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages=self.pool.num_pages - 1 - self.pool.available,
            kept_pages=self.pool.idle,
            preemptions=len(self.scheduler.preempted),
            plain=sum(not work.sequence.speculate for work in plan.works),
            aside=sum(work.sequence.aside for work in plan.works),
            root_seconds=0.0 if leads else plain.saw(rows, len(plan.works), drafted, seconds),
            doubt=plain.doubt if drafted else "",
            choice=plan.choice,
            news=plan.news,
            crowded=self._crowded(),
        )

    def check(self) -> None:
        """Prove the page ledger; raises AssertionError if a page is lost or held twice."""
        self.runner.rest()
        self.scheduler.settle(self.runner.ahead)
        self.pool.check([s.table for s in self._sequences.values()], at_rest=True)


def _scores_prompt(request: Request) -> bool:
    """Whether its prompt is to be scored: once, by the leader of its choices, before the first token goes out."""
    return request.params.prompt_logprobs is not None and request.fork_of is None and not request.committed
