"""Speculation switched off by a request: the same tokens, one a step, whatever its neighbours do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.same_tokens.models import Pair
from tests.same_tokens.options import jobs as option_jobs
from tests.same_tokens.runs import assert_same, drafting, jobs_of, plain, whole
from tests.same_tokens.witness import Text, run

LENGTHS = (5, 30, 12, 47, 20, 9)
TOKENS = 24


def drafted(text: Text) -> int:
    assert text.statistics is not None
    return text.statistics.drafted


@cache
def expected(pair: Pair) -> dict[str, Text]:
    return plain(pair.target, jobs_of(pair.vocab_size, LENGTHS, TOKENS))


@pytest.mark.parametrize("max_seqs", [1, 4], ids=["alone", "together"])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "chain4", "4,4,2,2,1", "truth"])
def test_every_other_request_switches_it_off(pair, drafter, max_seqs) -> None:
    models = pair("llama2")
    listed = jobs_of(models.vocab_size, LENGTHS, TOKENS)
    wanted = expected(models)
    jobs = [replace(job, speculate=index % 2 == 0) for index, job in enumerate(listed)]
    texts = run(drafting(models, drafter, whole(jobs, wanted), max_seqs=max_seqs), jobs)
    assert_same(wanted, texts)
    for job in jobs:
        text = texts[job.id]
        if not job.speculate:
            assert text.statistics is not None
            assert drafted(text) == 0
            assert text.statistics.steps == len(text.tokens)
    assert sum(drafted(texts[job.id]) for job in jobs if job.speculate) > 0


def test_a_conversation_may_switch_back_and_forth(pair) -> None:
    """The drafter's KV catches up with what was written without it."""
    models = pair("llama2")
    (first,) = jobs_of(models.vocab_size, (40,), TOKENS, ["warm"])
    written = plain(models.target, [first])[first.id].tokens
    second = replace(first, id="second", prompt=first.prompt + written, arrives=100)
    third = replace(second, id="third", prompt=[*second.prompt, 7, 8, 9], arrives=200)
    wanted = plain(models.target, [first, second, third])
    engine = drafting(models, "chain4", {}, prefix=True)
    texts = run(engine, [replace(first, speculate=False), second, replace(third, speculate=False)])
    assert_same(wanted, texts)
    assert drafted(texts["second"]) > 0
    assert texts["second"].cached_tokens > 0


def test_what_a_grammar_forces_is_not_put_in_front_either(pair) -> None:
    models = pair("llama2")
    jobs = [
        job for group in option_jobs(models.vocab_size, TOKENS).values() for job in group if job.grammar is not None
    ]
    wanted = plain(models.target, jobs)
    texts = run(drafting(models, "chain4", {}), [replace(job, fork_of=None, speculate=False) for job in jobs])
    assert_same(wanted, texts)
    assert texts
    assert all(drafted(text) == 0 for text in texts.values() if text.statistics)


def test_the_trace_counts_those_who_switched_it_off(pair) -> None:
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (9, 12, 7), 8)
    engine = drafting(models, "chain2", {}, max_seqs=4)
    for index, job in enumerate(jobs):
        engine.add(replace(job, speculate=index == 0).request())
    counts = []
    while engine.has_work:
        engine.step()
        if engine.trace is not None and not engine.trace.prefill_rows:
            counts.append((engine.trace.sequences, engine.trace.plain))
    assert max(counts) == (3, 2)
    assert all(plain <= sequences for sequences, plain in counts)
