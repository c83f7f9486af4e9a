"""The same tokens while drafters take turns within a sequence, and a rested one proposes as if it had never rested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from bench.drive import LOOKUPS
from foresay.kvpaging import PagePool
from foresay.spec.engine import Engine
from foresay.spec.protocols import Drafter
from foresay.spec.tree import TreeShape
from tests.same_tokens import options
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import assert_same, expected, jobs_of, plain, returning, whole
from tests.same_tokens.switching import Compared, Switching, makers, switching
from tests.same_tokens.test_heads import accepted_per_step
from tests.same_tokens.witness import run

#: The most that is drafted; each turn samples a shape within it.
MOST = TreeShape.parse("4,6,4,2")
seeds = pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])


def engine_with(pair: Pair, texts: Mapping[str, list[int]], seed: int = 0, **changes: int | bool) -> Engine:
    return engine_of(pair.target, switching(pair, texts, seed), MOST, **changes)  # type: ignore[arg-type]


def assert_all_took_part(engine: Engine) -> None:
    """Every member drafted, and something that each proposed was kept; in random texts nothing repeats itself."""
    drafter = engine.drafter
    assert isinstance(drafter, Switching)
    assert all(drafter.requested[name] for name in drafter.members), drafter.requested
    assert all(drafter.accepted[name] for name in drafter.members if name not in LOOKUPS), drafter.accepted


@seeds
@pytest.mark.parametrize("family", ["llama2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_alone(pair, family, seed) -> None:
    """All samplings, temperature 0 and 1 among them."""
    models, lengths = pair(family), (9, 1, 17, 33, 5, 40)
    jobs, texts = jobs_of(models.vocab_size, lengths, 40), expected(models, lengths, 40)
    engine = engine_with(models, whole(jobs, texts), seed, max_seqs=1)
    actual = run(engine, jobs)
    assert_same(texts, actual)
    assert accepted_per_step(actual) > 0.3
    assert_all_took_part(engine)


def test_bf16(pair) -> None:
    models, lengths = pair("smollm", torch.bfloat16), (9, 1, 17, 33)
    jobs, texts = jobs_of(models.vocab_size, lengths, 30), expected(models, lengths, 30)
    assert_same(texts, run(engine_with(models, whole(jobs, texts)), jobs))


@seeds
@pytest.mark.parametrize("chunk", [7, 48])
def test_in_a_batch_with_prompts_in_chunks(pair, seed, chunk) -> None:
    """Others come, and one in three is cancelled on its way."""
    models, lengths = pair("llama2"), (3, 150, 20, 97, 65, 30)
    texts = expected(models, lengths, 30)
    jobs = [
        replace(job, arrives=4 * index, cancelled=4 * index + 6 if index % 3 == 2 else None)
        for index, job in enumerate(jobs_of(models.vocab_size, lengths, 30))
    ]
    assert_same(texts, run(engine_with(models, whole(jobs, texts), seed, chunk=chunk), jobs))


@seeds
def test_preemption(pair, seed) -> None:
    models, lengths = pair("llama2"), (30, 33, 31, 20)
    jobs, texts = jobs_of(models.vocab_size, lengths, 90), expected(models, lengths, 90)
    engine = engine_with(models, whole(jobs, texts), seed, tokens=192)
    actual = run(engine, jobs)
    assert_same(texts, actual)
    assert sum(text.statistics.preemptions for text in actual.values() if text.statistics) > 0
    assert_all_took_part(engine)


@seeds
def test_over_a_prefix_hit(pair, seed) -> None:
    """Pages that one drafter filled and another did not are shared."""
    models = pair("llama2")
    first, later, texts = returning(models, 16)
    jobs = [*first, *later]
    actual = run(engine_with(models, whole(jobs, texts), seed, prefix=True), jobs)
    assert_same(texts, actual)
    assert all(actual[job.id].cached_tokens > 0 for job in later)


def test_every_option(pair) -> None:
    """Grammars, forks, penalties and all else, in one batch."""
    models = pair("llama2")
    jobs = options.arriving(list(options.jobs(models.vocab_size, 24).values())[::3])
    wanted = plain(models.target, jobs)
    texts = run(engine_with(models, whole(jobs, wanted), chunk=11), jobs)
    assert_same(wanted, texts)
    assert any(job.fork_of for job in jobs)
    assert any(text.statistics.forced for text in texts.values() if text.statistics)


#: Changes to the engine, and the tokens that each text has.
CONDITIONS: dict[str, tuple[dict[str, int | bool], int]] = {
    "alone": ({"max_seqs": 1}, 30),
    "in a batch": ({"chunk": 7}, 30),
    "preempted": ({"tokens": 192}, 90),
    "with prefix hits": ({"prefix": True, "chunk": 48}, 0),
}


@pytest.mark.parametrize(
    "condition",
    [
        "in a batch",
        *(pytest.param(name, marks=pytest.mark.soak) for name in CONDITIONS if name != "in a batch"),
    ],
)
def test_a_rested_drafter_has_caught_up(pair, condition) -> None:
    """Nobody whispers here: what is proposed is the drafters' own."""
    models, (changes, max_tokens) = pair("llama2"), CONDITIONS[condition]
    lengths = (30, 33, 31, 20)
    if max_tokens:
        jobs, texts = jobs_of(models.vocab_size, lengths, max_tokens), expected(models, lengths, max_tokens)
    else:
        first, later, texts = returning(models, 16)
        jobs = [*first, *later]

    def made(pool: PagePool) -> Drafter:
        rested, restless = ({name: make(pool) for name, make in makers(models).items()} for _ in range(2))
        return Compared(rested, restless)  # type: ignore[arg-type]

    engine = engine_of(models.target, made, MOST, **changes)  # type: ignore[arg-type]
    assert_same(texts, run(engine, jobs))
    drafter = engine.drafter
    assert isinstance(drafter, Compared)
    assert all(drafter.compared[name] > 3 for name in makers(models) if name not in LOOKUPS), drafter.compared
    # A draft model that reads the text as it is agrees with most of the target's samples.
    assert drafter.accepted["draft_model"] > drafter.requested["draft_model"] / 2
