"""What is compared: the tokens of each request, and the bits of the logits that each of them was drawn from.

Equal tokens are the promise. Equal bits are what it rests on, and catch a breach long before a tie turns a token over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvpaging import KVStore, PageTable
from spec.accept import accept
from spec.engine import Engine
from spec.protocols import Drafter, FeatureRequest, Forward, Rows, Verifier
from spec.request import Delta, Request
from spec.sampling import SamplingParams
from spec.step import EagerRunner, Ticket, Verdict
from spec.trace import Statistics


class Witness(EagerRunner):
    """The step loop, noting the bits of the row behind each emitted token, by request and position."""

    def __init__(self, verifier: Verifier, drafter: Drafter | None) -> None:
        self.watched = _Watched(verifier)
        super().__init__(self.watched, drafter)
        self.bits: dict[tuple[str, int], int] = {}

    def collect(self, ticket: Ticket) -> list[Verdict]:
        verdicts = super().collect(ticket)
        for index, verdict in enumerate(verdicts):
            if verdict.emitted:
                self._note(verdict, self.watched.forward.of(index), ticket, index)
        return verdicts

    def _note(self, verdict: Verdict, logits: Tensor, ticket: Ticket, index: int) -> None:
        drawn, sequence = ticket.drawn[index], verdict.work.sequence
        assert isinstance(drawn, Tensor)
        path = accept(ticket.trees[index], drawn).path
        first = len(sequence.tokens) - len(verdict.emitted)
        for offset, node in zip(range(len(verdict.emitted)), path, strict=False):
            self.bits[sequence.id, first + offset] = hash(logits[node].numpy().tobytes())


class _Watched:
    """A verifier whose last result is kept."""

    forward: Forward

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.vocab_size, self.max_positions = verifier.vocab_size, verifier.max_positions

    def run(self, rows: Sequence[Rows], features: FeatureRequest | None = None) -> Forward:
        self.forward = self.verifier.run(rows, features)
        return self.forward

    def committed(self, table: PageTable, moves: tuple[Tensor, Tensor] | None) -> None:
        self.verifier.committed(table, moves)

    def missing(self, table: PageTable) -> int:
        return self.verifier.missing(table)


@dataclass(frozen=True)
class Job:
    """A request, the step in which it arrives, and the step in which it is cancelled, if it is."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrives: int = 0
    cancelled: int | None = None
    salt: str = ""


@dataclass
class Text:
    """What came of a job. bits: of the logits behind each token."""

    tokens: list[int] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    statistics: Statistics | None = None
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
        self.statistics = delta.statistics
        self.cached_tokens = delta.cached_tokens


def run(engine: Engine, jobs: Iterable[Job]) -> dict[str, Text]:
    """Run jobs to their end, KV that nobody may read poisoned and the page ledger proven before every step."""
    waiting = sorted(jobs, key=lambda job: job.arrives)
    texts = {job.id: Text() for job in waiting}
    cancels = {job.id: job.cancelled for job in waiting if job.cancelled is not None}
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0].arrives <= step:
            job = waiting.pop(0)
            engine.add(Request(id=job.id, prompt=job.prompt, params=job.params, salt=job.salt))
        for request_id in [name for name, when in cancels.items() if when <= step]:
            engine.cancel(request_id)
            del cancels[request_id]
        poison(engine)
        for delta in engine.step():
            texts[delta.id].add(delta)
        engine.check()
        step += 1
    _read_bits(engine, texts, {job.id: job for job in jobs})
    return texts


def poison(engine: Engine) -> None:
    """NaN in every row of every store that no committed token needs."""
    for store in engine.pool.stores:
        assert isinstance(store, KVStore)
        store.poison()


def _read_bits(engine: Engine, texts: Mapping[str, Text], jobs: Mapping[str, Job]) -> None:
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
            return f"token {index} is the same, but drawn from other bits"
    return None
