"""The same tokens and logprobs with every option: each pair of options, drafters and company at least once."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from foresay.spec.adjust import Adjustment, edit_logits
from foresay.spec.logits import logprobs_of
from foresay.spec.sampling import SamplingParams
from tests.same_tokens import options
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, drafting, plain, whole
from tests.same_tokens.witness import Text, run
from tests.verifier.reading import Reader, random_tokens

TOKENS = 24


@cache
def expected(pair: Pair) -> dict[str, Text]:
    """Every request alone, drafting nothing, no fork among them."""
    jobs = [job for group in options.jobs(pair.vocab_size, TOKENS).values() for job in group]
    return plain(pair.target, jobs)


@pytest.mark.parametrize("company", ["alone", "together"])
@pytest.mark.parametrize("drafter", options.AXES["drafter"])
@pytest.mark.parametrize("family", ["llama2", "qwen3_5", "falcon_h1"])
def test_every_pair_of_options(pair, family, drafter, company) -> None:
    models = pair(family)
    groups = options.jobs(models.vocab_size, TOKENS)
    jobs = options.arriving([groups[name] for name in options.of(drafter, company)])
    wanted = {job.id: expected(models)[job.id] for job in jobs}
    together = company == "together"
    engine = drafting(
        models,
        drafter,
        whole(jobs, wanted),
        max_seqs=4 if together else 1,
        chunk=11 if together else 256,
        prefix=together,
    )
    texts = run(engine, jobs)
    assert_same(wanted, texts)
    for job in jobs:
        text = texts[job.id]
        # They come with the first token, which a request that may say nothing never has.
        unasked = job.params.prompt_logprobs is None or job.fork_of is not None
        assert (text.prompt_logprobs is None) == (unasked or not text.tokens)
        assert len(text.logprobs) == (0 if job.params.logprobs is None else len(text.tokens))
    statistics = [text.statistics for text in texts.values() if text.statistics]
    # Random texts hardly repeat themselves: what looks three of them up may find nothing that is right.
    unheard = ("none", "garbage", "ngram") if family == "llama2" else ("none", "garbage", "ngram", "suffix tree")
    assert sum(each.accepted for each in statistics) > 0 or drafter in unheard


def test_the_combinations_are_as_described(pair) -> None:
    """Or the test above would show little: the options bite, and hardly any request ends in an error."""
    models = pair("llama2")
    assert 30 <= len(options.ROWS) <= 60
    texts = expected(models)
    reasons = [text.finish_reason for text in texts.values()]
    assert {"stop", "length"} <= set(reasons)
    assert reasons.count("error") <= len(reasons) // 10
    assert sum(len(text.tokens) for text in texts.values()) > 10 * len(texts)


def test_logprobs_are_those_of_a_pass_over_the_final_text(pair) -> None:
    models = pair("llama2")
    reader, compared = Reader(models.target), 0
    for group in options.jobs(models.vocab_size, TOKENS).values():
        for job in group:
            text, count = expected(models)[job.id], job.params.logprobs
            if count is None or not text.tokens:
                continue
            tokens, first = job.prompt + text.tokens, len(job.prompt)
            rows = reader.alone(tokens)
            assert text.logprobs == logprobs_of(rows[first - 1 : -1], text.tokens, count)
            if text.prompt_logprobs is not None and job.params.prompt_logprobs is not None:
                scored = logprobs_of(rows[: first - 1], job.prompt[1:], job.params.prompt_logprobs)
                assert text.prompt_logprobs == [None, *scored]
            compared += len(text.tokens)
    assert compared > 200


@pytest.mark.parametrize(
    ("fields", "processor"),
    [
        ({"repetition_penalty": 1.3}, RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.7}, RepetitionPenaltyLogitsProcessor(0.7)),
        (
            {"bad_words": ((5,), (1, 2), (3, 4, 5))},
            NoBadWordsLogitsProcessor([[5], [1, 2], [3, 4, 5]], eos_token_id=torch.tensor([9])),
        ),
        ({"logit_bias": {3: 2.5, 4: -1.0}}, SequenceBiasLogitsProcessor([[[3], 2.5], [[4], -1.0]])),
    ],
    ids=["repetition", "repetition below 1", "bad words", "bias"],
)
def test_transformers_computes_the_same_text(fields: dict[str, Any], processor) -> None:
    rng = random.Random(1)
    for case in range(20):
        prompt, path = random_tokens(rng, 8, 6), random_tokens(rng, case % 6, 6)
        row = torch.randn(1, 40, generator=torch.Generator().manual_seed(case)) * 3
        wanted = processor(torch.tensor([prompt + path]), row.clone())
        edit_logits(row, Adjustment(SamplingParams(**fields), prompt, 40).edits(prompt, [path]))
        assert torch.equal(row, wanted)
