"""The same tokens with predictions, right, edited and wrong, with any drafter where they end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foresay.drafters.combined import RoutedDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.kvpaging import PagePool
from foresay.spec.engine import Engine
from foresay.spec.tree import TreeShape
from tests.same_tokens import options
from tests.same_tokens.edits import predicted
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import assert_same, expected, jobs_of, maker, plain, returning, shape_of, whole
from tests.same_tokens.switching import switching
from tests.same_tokens.witness import Job, Text, run

LENGTHS = (9, 1, 17, 33, 5, 40)
MOST = TreeShape.parse("4,6,4,2")
CONFIGURED = ["none", "ngram", "suffix tree", "chain4", "4,4,2,2,1", "garbage", "truth"]


def engine_with(pair: Pair, configured: str, jobs: Sequence[Job], texts: dict[str, Text], **changes: int) -> Engine:
    """Predictions first, then one of the other drafters."""
    make, shape = maker(pair, configured, whole(jobs, texts)), shape_of(configured)

    def routed(pool: PagePool) -> RoutedDrafter:
        return RoutedDrafter(PredictionDrafter(), make(pool), shape)

    return engine_of(pair.target, routed, shape, **changes)  # type: ignore[arg-type]


def accepted_of(texts: dict[str, Text], job: Job) -> int:
    statistics = texts[job.id].statistics
    assert statistics is not None
    return statistics.accepted


@pytest.mark.parametrize("company", [{"max_seqs": 1}, {"chunk": 7}], ids=["alone", "together"])
@pytest.mark.parametrize("configured", CONFIGURED)
def test_together_with_every_drafter(pair, configured, company) -> None:
    """All samplings, temperature 0 and 1 among them; chains far beyond the configured shape."""
    models = pair("llama2", layers=2)
    texts = expected(models, LENGTHS, 40)
    jobs = predicted(jobs_of(models.vocab_size, LENGTHS, 40), texts)
    actual = run(engine_with(models, configured, jobs, texts, **company), jobs)
    assert_same(texts, actual)
    # The first one's prediction is its text: all but the tokens of the targets own samples come from it.
    assert accepted_of(actual, jobs[0]) >= 0.8 * len(actual[jobs[0].id].tokens)
    assert accepted_of(actual, jobs[1]) >= 0.4 * len(actual[jobs[1].id].tokens)


@pytest.mark.parametrize("family", ["smollm", "qwen2_window"])
def test_bf16(pair, family) -> None:
    models = pair(family, torch.bfloat16, layers=2)
    texts = expected(models, LENGTHS, 30)
    jobs = predicted(jobs_of(models.vocab_size, LENGTHS, 30), texts)
    assert_same(texts, run(engine_with(models, "3,2,1", jobs, texts), jobs))


@pytest.mark.parametrize("configured", ["none", "chain4", "4,4,2,2,1"])
def test_preemption(pair, configured) -> None:
    models, lengths = pair("llama2"), (30, 33, 31, 20)
    texts = expected(models, lengths, 90)
    jobs = predicted(jobs_of(models.vocab_size, lengths, 90), texts)
    actual = run(engine_with(models, configured, jobs, texts, tokens=224), jobs)
    assert_same(texts, actual)
    assert sum(text.statistics.preemptions for text in actual.values() if text.statistics) > 0


@pytest.mark.parametrize("configured", ["none", "chain4"])
def test_over_a_prefix_hit(pair, configured) -> None:
    models = pair("llama2")
    first, later, texts = returning(models, 16)
    jobs = predicted([*first, *later], texts)
    actual = run(engine_with(models, configured, jobs, texts, prefix=True), jobs)
    assert_same(texts, actual)
    assert all(actual[job.id].cached_tokens > 0 for job in later)


@pytest.mark.parametrize("configured", ["none", "suffix tree", "chain4"])
def test_every_option(pair, configured) -> None:
    """Grammars that prune and force, forks, penalties, stop tokens and all else, in one batch."""
    models = pair("llama2")
    jobs = options.arriving(list(options.jobs(models.vocab_size, 24).values())[::2])
    texts = plain(models.target, jobs)
    jobs = predicted(jobs, texts)
    actual = run(engine_with(models, configured, jobs, texts, chunk=11), jobs)
    assert_same(texts, actual)
    assert any(job.fork_of and job.prediction for job in jobs)
    assert any(job.grammar and job.prediction for job in jobs)


def test_drafters_that_rest_and_take_turns_below_it(pair) -> None:
    """Heads, draft models and lookups draft only where the prediction has nothing, and stay up to date."""
    models, lengths = pair("llama2"), (9, 20, 33, 14)
    texts = expected(models, lengths, 60)
    jobs = predicted(jobs_of(models.vocab_size, lengths, 60), texts)
    make = switching(models, whole(jobs, texts))

    def routed(pool: PagePool) -> RoutedDrafter:
        return RoutedDrafter(PredictionDrafter(), make(pool), MOST)

    assert_same(texts, run(engine_of(models.target, routed, MOST), jobs))
