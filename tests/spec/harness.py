"""An engine around a table, checked after every step, and what came of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foresay.kvpaging import PagePool, PrefixIndex
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.constrain import Constraint
from foresay.spec.engine import EngineCore
from foresay.spec.observer import Observer
from foresay.spec.protocols import Drafter
from foresay.spec.request import Delta, EngineInfo, Progress, Request, TokenLogprobs
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.step import VerifyResult
from foresay.spec.trace import Statistics, StepTrace
from foresay.spec.tree import TreeShape
from tests.spec.tables import Plain, TableModel, TableVerifier


@dataclass
class Answer:
    """All deltas of one request."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """What was streamed."""
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """An entry for each streamed token; there must be as many."""
        entries = [entry for delta in self.deltas for entry in delta.logprobs or []]
        assert [entry.token for entry in entries] == self.tokens
        return entries

    @property
    def runs(self) -> list[int]:
        """How many tokens came at once."""
        return [len(delta.tokens) for delta in self.deltas if delta.tokens]

    @property
    def last(self) -> Delta:
        """The delta with the finish reason."""
        assert self.deltas[-1].finish_reason is not None
        assert all(delta.finish_reason is None and delta.ending is None for delta in self.deltas[:-1])
        return self.deltas[-1]

    @property
    def statistics(self) -> Statistics:
        """The counts of all deltas, of which each token is in the text."""
        assert self.last.ending is not None
        counts = Statistics()
        for delta in self.deltas:
            counts.take(delta, len(delta.tokens))
        return counts

    @property
    def plain(self) -> Plain:
        """To be compared with what plain decoding answers."""
        return Plain(self.tokens, self.last.finish_reason or "error", self.last.stop_token)


class Traces(Observer):
    """Keeps the traces of all steps."""

    def __init__(self, traces: list[StepTrace]) -> None:
        self.traces = traces

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        self.traces.append(trace)


class Harness:
    """An engine around a table, that is checked after every step."""

    def __init__(
        self,
        model: TableModel,
        drafter: Drafter | None = None,
        shape: Sequence[int] = (),
        *,
        pages: int = 200,
        page_size: int = 4,
        max_seqs: int = 4,
        max_model_len: int = 128,
        prefix: bool = True,
        eos: Sequence[int] = (),
        cost: CostModel | None = None,
        max_chunk: int = 256,
        observers: Sequence[Observer] = (),
        budget: Budget | None = None,
    ) -> None:
        self.model, self.pool = model, PagePool(pages, page_size)
        self.prefix = PrefixIndex(self.pool) if prefix else None
        self.verifier = TableVerifier(model, self.pool, max_model_len)
        cost = cost or CostModel([1, 1000], [1.0, 1.0])
        widths = TreeShape(tuple(shape))
        self.scheduler = Scheduler(self.pool, self.prefix, widths, cost, max_seqs, max_chunk, budget=budget)
        self.traces: list[StepTrace] = []
        self.answers: dict[str, Answer] = {}
        self.engine = EngineCore(
            info=_info(self.pool, self.scheduler, model, max_model_len, eos),
            pool=self.pool,
            prefix=self.prefix,
            verifier=self.verifier,
            drafter=drafter,
            scheduler=self.scheduler,
        )
        for observer in (Traces(self.traces), *observers):
            self.engine.observe(observer)

    def add(
        self,
        id: str,
        prompt: list[int],
        sampling: SamplingParams,
        salt: str = "",
        forced: list[int] | None = None,
        *,
        fork_of: str | None = None,
        grammar: Constraint | None = None,
        speculate: bool = True,
        prediction: list[int] | None = None,
        progress: Progress | None = None,
        private: bool = False,
    ) -> None:
        """Queue a request."""
        request = Request(
            id=id,
            prompt=prompt,
            params=sampling,
            salt=salt,
            forced=forced,
            fork_of=fork_of,
            speculate=speculate,
            prediction=prediction,
            progress=progress,
            private=private,
        )
        self.engine.add(request, grammar)
        self.answers[id] = Answer()

    def step(self) -> list[Delta]:
        """One step, with the ledger proved and the deltas sorted to their answers."""
        deltas = self.engine.step()
        self.engine.notify()
        self.engine.check()
        for delta in deltas:
            self.answers[delta.id].deltas.append(delta)
        return deltas

    def run(self) -> dict[str, Answer]:
        """Step until nothing is left to do; then every page must be back."""
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < 5000, "no end in sight"
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.pool.available == self.pool.num_pages - 1
        return self.answers

    def answer(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: str = "",
        forced: list[int] | None = None,
        grammar: Constraint | None = None,
    ) -> Answer:
        """Run one request alone to its end."""
        self.add("only", prompt, sampling, salt, forced, grammar=grammar)
        return self.run()["only"]


def _info(
    pool: PagePool, scheduler: Scheduler, model: TableModel, max_model_len: int, eos: Sequence[int]
) -> EngineInfo:
    return EngineInfo(
        target="table",
        drafter="guesser",
        drafter_reason="",
        dtype="float32",
        dtype_reason="",
        device="cpu",
        exact=True,
        exact_reason="",
        kv_tokens=(pool.num_pages - 1) * pool.page_size,
        page_size=pool.page_size,
        max_model_len=max_model_len,
        max_seqs=scheduler.max_seqs,
        draft_shape=scheduler.shape.widths,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(eos),
    )
