"""The same tokens in any company: others coming and going, prefill in chunks, too few pages, pages already computed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.combinations import pairwise
from tests.same_tokens.runs import assert_same, drafting, jobs_of, plain, whole
from tests.same_tokens.situations import assert_same_in
from tests.same_tokens.witness import run


@pytest.mark.parametrize(
    ("family", "drafter", "situation"),
    pairwise(
        ["llama2", "smollm", "mistral", "qwen3"],
        ["none", "ngram", "chain4", "4,4,2,2,1", "self 3,2,1", "staged chain7", "truth"],
        ["in a batch", "preempted", "back", "crowded", "forked"],
    ),
)
def test_in_every_situation(pair, family, drafter, situation) -> None:
    models = pair(family, layers=2)
    assert_same_in(situation, models, partial(drafting, models, drafter))


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
