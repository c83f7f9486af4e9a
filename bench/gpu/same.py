"""Part g: the same tokens, whoever drafts and however a step is launched, alone or in company, before and after
preemption. Promise number one, asked of the real engine on this device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from bench import record
from bench.gpu.engines import Bench, answers, ask
from bench.gpu.session import Clock
from bench.gpu.speed import pages_for, shape_of
from foresay.kvpaging import PagePool
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams

#: What is compared with plain decoding op by op: who drafts, the tree, captured or not.
WAYS = (
    ("none", "", True),
    ("draft_model", "1,1,1,1", False),
    ("draft_model", "1,1,1,1", True),
    ("draft_model", "3,2,1", False),
    ("draft_model", "3,2,1", True),
    ("eagle3", "1,1,1,1", True),
    ("medusa", "1,1,1,1", True),
    ("ngram", "1,1,1,1", True),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One way beside plain decoding. parts_at: the first output token that differs; None: none does."""

    way: str
    temperature: float
    parts_at: int | None


def compare(bench: Bench, texts: Sequence[list[int]], tokens: int, clock: Clock, needs: float) -> Iterator[Compared]:
    """Every way, at temperature 0 and 1, for the first of the texts; the others are its company."""
    pages = pages_for(bench, texts, tokens)
    asked = [SamplingParams(temperature=t, seed=7, max_tokens=tokens, ignore_eos=True) for t in (0.0, 1.0)]

    def written(engine: Engine, batch: Sequence[list[int]]) -> list[list[int]]:
        return [answers(engine, [ask(text, sampling) for text in batch])[0].tokens for sampling in asked]

    def compared(way: str, found: Sequence[list[int]]) -> Iterator[Compared]:
        for sampling, mine, wanted in zip(asked, found, plain, strict=True):
            yield Compared(way, sampling.temperature, first_difference(mine, wanted))

    plain = written(bench.engine("none", shape_of(""), False, pages), texts[:1])
    for name, tree, graphs in WAYS:
        way = f"{name}{':' + tree if tree else ''}{', captured' if graphs else ''}"
        if clock.fits(f"same tokens, {way}", needs):
            yield from compared(way, written(bench.engine(name, shape_of(tree), graphs, pages), texts[:1]))
    for graphs in (False, True):
        if clock.fits("same tokens in company", 2 * needs):
            engine = bench.engine("draft_model", shape_of("1,1,1,1"), graphs, pages, max_seqs=3)
            yield from compared(f"draft, batch of 3{', captured' if graphs else ''}", written(engine, texts))
    if clock.fits("same tokens after preemption", 2 * needs):
        engine = bench.engine("draft_model", shape_of("1,1,1,1"), True, pages, max_seqs=3)
        yield from compared("draft, after preemption", [_preempted(bench, engine, texts, s) for s in asked])


def _preempted(bench: Bench, engine: Engine, texts: Sequence[list[int]], sampling: SamplingParams) -> list[int]:
    """The tokens of the first text, which comes last and so has to make room. Raises RuntimeError if it had not to."""
    company = [ask(text, sampling) for text in (*texts[1:], texts[0])]
    with Famine(bench.pool) as famine:
        found = answers(engine, company, between=lambda: famine.go_on(bool(engine.scheduler.preempted)))
    if not famine.over:
        raise RuntimeError("nobody was preempted, so nothing was compared")
    return found[-1].tokens


class Famine:
    """Takes what pages there are before each step until somebody was preempted for want of one; then gives all back."""

    def __init__(self, pool: PagePool) -> None:
        self.over = False
        self._pool, self._held = pool, list[int]()

    def __enter__(self) -> Self:
        """Nothing is taken yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give everything back."""
        self._release()

    def go_on(self, preempted: bool) -> None:
        """Another step comes."""
        self.over = self.over or preempted
        if self.over:
            self._release()
        else:
            self._held += self._pool.allocate(self._pool.available)

    def _release(self) -> None:
        while self._held:
            self._pool.release(self._held.pop())


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where two texts part; None if they are equal."""
    if list(found) == list(wanted):
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(map(len, (found, wanted)))
    )


def show(found: Sequence[Compared]) -> None:
    """The table."""
    rows = [[c.way, c.temperature, "yes" if c.parts_at is None else f"parts at {c.parts_at}"] for c in found]
    record.table("same tokens as plain decoding, op by op", ["decoding", "T", "same"], rows)


def as_json(found: Sequence[Compared]) -> list[dict[str, Any]]:
    """For the record."""
    return [asdict(compared) for compared in found]
