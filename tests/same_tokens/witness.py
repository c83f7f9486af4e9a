"""What is compared: the tokens of each request, their logprobs, and the bits of the logits they were sampled from.

Equal tokens are the promise. Equal bits are what it rests on, and catch a breach long before a tie turns a token over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foresay.kvpaging import KVStore
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Drafter, Forward, Verifier
from foresay.spec.request import Delta, Request, TokenLogprobs
from foresay.spec.sampling import SamplingParams
from foresay.spec.step import ScheduledSequence, StepRunner, VerifyResult
from foresay.spec.trace import Statistics, Stopwatch
from tests.poison import poison_store
from tests.spec.grammars import Automaton


class Witness(StepRunner):
    """The step loop, noting the bits of the row behind each emitted token, by request and position."""

    def __init__(self, verifier: Verifier, drafter: Drafter | None) -> None:
        super().__init__(verifier, drafter)
        self.bits: dict[tuple[str, int], int] = {}

    def run(self, batch: list[ScheduledSequence], watch: Stopwatch) -> list[VerifyResult]:
        results = super().run(batch, watch)
        for index, result in enumerate(results):
            if result.emitted and result.tree is not None:
                self._note(result, self._forwarded.of(index)[-len(result.tree) :])
        return results

    def _forward(self, *given: Any) -> tuple[Forward, list[Tensor | None]]:
        self._forwarded, masks = super()._forward(*given)
        return self._forwarded, masks

    def _note(self, result: VerifyResult, logits: Tensor) -> None:
        sequence = result.scheduled.sequence
        first = len(sequence.tokens) - len(result.emitted)
        for offset, node in enumerate(result.rows):
            self.bits[sequence.id, first + offset] = hash(logits[node].numpy().tobytes())


@dataclass(frozen=True)
class Job:
    """A request, the step in which it arrives, and the step in which it is cancelled, if it is.

    grammar: in its first state; every run takes a copy. prediction: of its output. speculate, aside: the request's.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    arrives: int = 0
    cancelled: int | None = None
    salt: str = ""
    fork_of: str | None = None
    grammar: Automaton | None = None
    prediction: list[int] | None = None
    speculate: bool = True
    aside: bool = False

    def request(self) -> Request:
        request = Request(id=self.id, prompt=self.prompt, params=self.params, salt=self.salt, fork_of=self.fork_of)
        request.prediction, request.speculate, request.aside = self.prediction, self.speculate, self.aside
        return request


@dataclass
class Text:
    """What came of a job. bits: of the logits behind each token."""

    tokens: list[int] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    _counts: Statistics = field(default_factory=Statistics)
    statistics: Statistics | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self._counts.take(delta, len(delta.tokens))
        self.statistics = self._counts if delta.finish_reason is not None else None
        self.cached_tokens = delta.cached_tokens


def run(engine: EngineCore, jobs: Iterable[Job]) -> dict[str, Text]:
    """Run jobs to their end; see :func:`stepped`."""
    texts = {job.id: Text() for job in jobs}
    for deltas in stepped(engine, jobs):
        for delta in deltas:
            texts[delta.id].add(delta)
    _read_bits(engine, texts, {job.id: job for job in jobs})
    return texts


def stepped(engine: EngineCore, jobs: Iterable[Job], careful: bool = True) -> Iterator[list[Delta]]:
    """What each step emits until jobs have ended. careful: KV that nobody may read is poisoned and the page ledger
    proven."""
    waiting, step = sorted(jobs, key=lambda job: job.arrives), 0
    cancels = {job.id: job.cancelled for job in waiting if job.cancelled is not None}
    while waiting or engine.has_work:
        while waiting and waiting[0].arrives <= step:
            job = waiting.pop(0)
            engine.add(job.request(), None if job.grammar is None else job.grammar.fork())
        for request_id in [name for name, when in cancels.items() if when <= step]:
            engine.cancel(request_id)
            del cancels[request_id]
        if careful:
            poison(engine)
        deltas = engine.step()
        if careful:
            engine.check()
        yield deltas
        step += 1


def poison(engine: EngineCore) -> None:
    """NaN in every row of every store that no committed token needs."""
    for store in engine.pool.stores:
        if isinstance(store, KVStore):
            poison_store(store)


def _read_bits(engine: EngineCore, texts: Mapping[str, Text], jobs: Mapping[str, Job]) -> None:
    assert isinstance(engine.runner, Witness)
    for name, text in texts.items():
        first = len(jobs[name].prompt)
        text.bits = [engine.runner.bits[name, first + index] for index in range(len(text.tokens))]


def differences(expected: Mapping[str, Text], actual: Mapping[str, Text]) -> list[str]:
    """Where runs differ, in words: the first token of each text, or else the first row of logits; empty if nowhere.

    A cancelled text need only be the beginning of what was expected.
    """
    found = (_difference(expected[name], text) for name, text in actual.items())
    return [f"{name}: {what}" for name, what in zip(actual, found, strict=True) if what]


def _difference(expected: Text, actual: Text) -> str | None:
    cut = actual.finish_reason == "cancelled"
    wanted = expected.tokens[: len(actual.tokens)] if cut else expected.tokens
    for index, (ours, theirs) in enumerate(zip(actual.tokens, wanted, strict=False)):
        if ours != theirs:
            return f"token {index} is {ours}, expected {theirs}"
    if len(actual.tokens) != len(wanted):
        return f"{len(actual.tokens)} tokens, expected {len(wanted)}"
    if not cut and actual.finish_reason != expected.finish_reason:
        return f"finished by {actual.finish_reason}, expected {expected.finish_reason}"
    for index, (ours, theirs) in enumerate(zip(actual.bits, expected.bits, strict=False)):
        if ours != theirs:
            return f"token {index} is the same, but sampled from other bits"
    for index, (mine, wanted_entry) in enumerate(zip(actual.logprobs, expected.logprobs, strict=False)):
        if mine != wanted_entry:
            return f"logprobs {index} are {mine}, expected {wanted_entry}"
    if len(actual.logprobs) != len(expected.logprobs[: len(wanted)]):
        return f"{len(actual.logprobs)} logprobs, expected {len(expected.logprobs)}"
    if actual.prompt_logprobs is not None and actual.prompt_logprobs != expected.prompt_logprobs:
        return "the prompt's logprobs differ"
    return None
