"""A request next to the traffic: the same tokens, from no KV that is there, and nothing of it stays."""

from __future__ import annotations

from dataclasses import replace

from tests.same_tokens.runs import assert_same, drafting, jobs_of, plain, whole
from tests.same_tokens.witness import run

TOKENS = 24


def test_it_takes_no_kv_and_leaves_none(pair) -> None:
    models = pair("llama2")
    listed = jobs_of(models.vocab_size, (40, 50), TOKENS)
    expected = plain(models.target, listed)
    engine = drafting(models, "chain4", {}, prefix=True)
    assert engine.prefix is not None
    first = listed[0]
    assert_same({first.id: expected[first.id]}, run(engine, [first]))
    pages, queries = sorted(engine.prefix), engine.prefix.queries
    again = run(engine, [replace(job, aside=True) for job in listed])
    assert_same(expected, again)
    assert [text.cached_tokens for text in again.values()] == [0, 0]
    assert (sorted(engine.prefix), engine.prefix.queries) == (pages, queries)
    assert engine.pool.idle == len(pages)
    assert run(engine, [first])[first.id].cached_tokens > 0, "what the traffic left is still there"


def test_the_trace_counts_it_separately(pair) -> None:
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (9, 12, 7), 8)
    engine = drafting(models, "chain2", {}, max_seqs=4)
    for index, job in enumerate(jobs):
        engine.add(replace(job, aside=index > 0).request())
    counts = []
    while engine.has_work:
        engine.step()
        if engine.trace is not None:
            counts.append((engine.trace.sequences, engine.trace.aside))
    assert max(counts) == (3, 2)
    assert all(aside <= sequences for sequences, aside in counts)


def test_salts_keep_prefixes_apart(pair) -> None:
    models = pair("llama2", layers=2)
    jobs = [
        replace(job, id=f"{job.id}-{index}", salt=salt, arrives=20 * index)
        for index, salt in enumerate(("", "other", "other"))
        for job in jobs_of(models.vocab_size, (40,), 8)
    ]
    texts = plain(models.target, jobs)
    actual = run(drafting(models, "chain2", whole(jobs, texts), prefix=True), jobs)
    assert_same(texts, actual)
    assert [actual[job.id].cached_tokens > 0 for job in jobs] == [False, False, True]
