"""A request beside the traffic: the same tokens, from no KV that is there, and nothing of it stays."""

from __future__ import annotations

from dataclasses import dataclass

from foresay.spec.request import Request
from tests.same_tokens.runs import assert_same, drafting, jobs_of, plain
from tests.same_tokens.witness import Job, run

TOKENS = 24


@dataclass(frozen=True)
class Aside(Job):
    """A request that runs aside."""

    def request(self) -> Request:
        request = super().request()
        request.aside = True
        return request

    @classmethod
    def of(cls, job: Job) -> Aside:
        return cls(**{name: getattr(job, name) for name in job.__dataclass_fields__})


def test_it_takes_no_kv_and_leaves_none(pair) -> None:
    models = pair("llama2")
    asked = jobs_of(models.vocab_size, (40, 50), TOKENS)
    expected = plain(models.target, asked)
    engine = drafting(models, "chain4", {}, prefix=True)
    assert engine.prefix is not None
    first, other = asked
    assert_same({first.id: expected[first.id]}, run(engine, [first]))
    pages, queries = sorted(engine.prefix), engine.prefix.queries
    again = run(engine, [Aside.of(first), Aside.of(other)])
    assert_same(expected, again)
    assert [text.cached_tokens for text in again.values()] == [0, 0]
    assert (sorted(engine.prefix), engine.prefix.queries) == (pages, queries)
    assert engine.pool.idle == len(pages)
    assert run(engine, [first])[first.id].cached_tokens > 0, "what the traffic left is still there"


def test_the_trace_tells_it_apart(pair) -> None:
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (9, 12, 7), 8)
    engine = drafting(models, "chain2", {}, max_seqs=4)
    for index, job in enumerate(jobs):
        engine.add((Aside.of(job) if index else job).request())
    told = []
    while engine.has_work:
        engine.step()
        if engine.trace is not None:
            told.append((engine.trace.sequences, engine.trace.aside))
    assert max(told) == (3, 2)
    assert all(aside <= sequences for sequences, aside in told)
