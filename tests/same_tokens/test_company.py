"""The same tokens in any company: others coming and going, prefill in chunks, too few pages, pages already computed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.same_tokens.runs import assert_same, drafting, expected, jobs_of, plain, returning, whole
from tests.same_tokens.witness import run

FAMILIES = ["llama2", "smollm", "mistral", "qwen3"]
DRAFTERS = ["none", "ngram", "chain4", "4,4,2,2,1", "self 3,2,1", "staged chain7", "truth"]
#: Every drafter with one family, every family with the drafter that is accepted at all depths; the rest is slow.
CASES = [
    pytest.param(family, drafter, marks=() if family == FAMILIES[0] or drafter == "truth" else pytest.mark.slow)
    for family in FAMILIES
    for drafter in DRAFTERS
]
everywhere = pytest.mark.parametrize(("family", "drafter"), CASES)


@everywhere
def test_others_come_and_go(pair, family, drafter) -> None:
    """Twelve requests for four slots, arriving and being cancelled at random moments."""
    models, rng = pair(family, layers=2), random.Random(family)
    lengths = (5, 30, 12, 47, 1, 20, 9, 64, 3, 16, 33, 8)
    texts = expected(models, lengths, 16)
    arrivals = [rng.randrange(20) for _ in lengths]
    jobs = [
        replace(job, arrives=arrival, cancelled=arrival + rng.randint(2, 8) if number % 3 == 1 else None)
        for number, (job, arrival) in enumerate(zip(jobs_of(models.vocab_size, lengths, 16), arrivals, strict=True))
    ]
    actual = run(drafting(models, drafter, whole(jobs, texts)), jobs)
    assert_same(texts, actual)
    assert {text.finish_reason for text in actual.values()} >= {"length", "cancelled"}


@pytest.mark.parametrize(
    ("family", "drafter", "chunk"),
    [
        pytest.param(*case.values, chunk, marks=case.marks if (at + at // len(DRAFTERS) + n) % 2 else pytest.mark.soak)
        for at, case in enumerate(CASES)
        for n, chunk in enumerate((7, 48))
    ],
)
def test_prompts_longer_than_a_chunk(pair, family, drafter, chunk) -> None:
    """While others decode, a prompt comes in pieces of as many rows as they have, or of ``chunk`` rows."""
    models = pair(family, layers=2)
    lengths = (3, 150, 20, 97, 65)
    texts = expected(models, lengths, 12)
    jobs = [replace(job, arrives=4 * index) for index, job in enumerate(jobs_of(models.vocab_size, lengths, 12))]
    assert_same(texts, run(drafting(models, drafter, whole(jobs, texts), chunk=chunk), jobs))


@everywhere
def test_preemption(pair, family, drafter) -> None:
    """Four sequences that grow to five pages each, and pages for two of them and a tree."""
    models = pair(family)
    lengths = (30, 33, 31, 20)
    texts = expected(models, lengths, 40)
    jobs = jobs_of(models.vocab_size, lengths, 40)
    actual = run(drafting(models, drafter, whole(jobs, texts), tokens=192), jobs)
    assert_same(texts, actual)
    assert sum(text.statistics.preemptions for text in actual.values() if text.statistics) > 0


@everywhere
def test_over_a_prefix_hit(pair, family, drafter) -> None:
    """The same prompts again, and as the beginnings of longer chats, with pages that earlier requests computed."""
    models = pair(family, layers=2)
    first, later, texts = returning(models)
    jobs = [*first, *later]
    actual = run(drafting(models, drafter, whole(jobs, texts), prefix=True), jobs)
    assert_same(texts, actual)
    assert all(actual[job.id].cached_tokens > 0 for job in later)


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


@pytest.mark.parametrize("drafter", ["none", "4,4,2,2,1", "truth"])
@pytest.mark.parametrize("page_size", [8, 32])
def test_page_sizes(pair, page_size, drafter) -> None:
    """Pages are the blocks of attention, so the bits are those of plain decoding with pages of the same size."""
    models = pair("qwen3", layers=2)
    jobs = jobs_of(models.vocab_size, (20, 70, 33), 20)
    texts = plain(models.target, jobs, page_size=page_size)
    assert_same(texts, run(drafting(models, drafter, whole(jobs, texts), page_size=page_size), jobs))
