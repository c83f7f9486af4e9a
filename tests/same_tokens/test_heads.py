"""The same tokens and logprobs with every kind of head and shape of tree, in any company, under every option."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from foresay.drafters.levels import TreeDrafter
from foresay.spec.engine import Engine
from foresay.spec.tree import TreeShape
from tests.combinations import alternating
from tests.same_tokens import options
from tests.same_tokens.heads import KINDS, SHAPES, Whisper, head_of, target_of, whispered
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import assert_same, expected, jobs_of, plain, returning, whole
from tests.same_tokens.witness import Job, Text, run

LENGTHS = (9, 1, 17, 33, 5, 40)

everywhere = pytest.mark.parametrize("kind", KINDS)

#: Every kind in every shape; in most tests all but these are tried in `make soak`.
QUICK = {*((kind, "tree") for kind in KINDS), *((kind, "chain") for kind in ("eagle3", "assistant", "dflash"))}

growing = pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param(kind, shape, marks=() if (kind, shape) in QUICK else pytest.mark.soak)
        for kind in KINDS
        for shape in SHAPES
    ],
)


def engine_with(pair: Pair, kind: str, shape: str, texts: dict[str, list[int]], **options: int | bool) -> Engine:
    drafter = whispered(head_of(pair, kind, shape), texts)
    return engine_of(pair.target, drafter, SHAPES[shape], **options)  # type: ignore[arg-type]


def accepted_per_step(texts: dict[str, Text]) -> float:
    totals = [text.statistics for text in texts.values() if text.statistics is not None]
    return sum(total.accepted for total in totals) / sum(total.steps for total in totals)


@everywhere
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("family", ["llama2", pytest.param("qwen3", marks=pytest.mark.soak)])
def test_alone(pair, family, kind, shape) -> None:
    models = target_of(pair, kind, family)
    jobs, texts = jobs_of(models.vocab_size, LENGTHS, 18), expected(models, LENGTHS, 18)
    engine = engine_with(models, kind, shape, whole(jobs, texts), max_seqs=1)
    actual = run(engine, jobs)
    assert_same(texts, actual)
    assert 0.4 < accepted_per_step(actual) < 3.0


@everywhere
def test_bf16(pair, kind) -> None:
    models = target_of(pair, kind, "smollm", torch.bfloat16)
    jobs, texts = jobs_of(models.vocab_size, LENGTHS, 18), expected(models, LENGTHS, 18)
    assert_same(texts, run(engine_with(models, kind, "tree", whole(jobs, texts)), jobs))


@growing
@pytest.mark.parametrize("chunk", [7, 48])
def test_in_a_batch_with_prompts_in_chunks(pair, kind, shape, chunk) -> None:
    """Others come, and one in three is cancelled on its way."""
    models, lengths = target_of(pair, kind), (3, 150, 20, 97, 65, 30)
    texts = expected(models, lengths, 12)
    jobs = [
        replace(job, arrives=4 * index, cancelled=4 * index + 6 if index % 3 == 2 else None)
        for index, job in enumerate(jobs_of(models.vocab_size, lengths, 12))
    ]
    assert_same(texts, run(engine_with(models, kind, shape, whole(jobs, texts), chunk=chunk), jobs))


@growing
def test_preemption(pair, kind, shape) -> None:
    models, lengths = target_of(pair, kind), (30, 33, 31, 20)
    jobs, texts = jobs_of(models.vocab_size, lengths, 90), expected(models, lengths, 90)
    actual = run(engine_with(models, kind, shape, whole(jobs, texts), tokens=192), jobs)
    assert_same(texts, actual)
    assert sum(text.statistics.preemptions for text in actual.values() if text.statistics) > 0


@growing
def test_over_a_prefix_hit(pair, kind, shape) -> None:
    """The same prompts again, and as the beginnings of longer chats. Drafts go on from what the pages know."""
    models = target_of(pair, kind)
    first, later, texts = returning(models)
    jobs = [*first, *later]
    actual = run(engine_with(models, kind, shape, whole(jobs, texts), prefix=True), jobs)
    assert_same(texts, actual)
    assert all(actual[job.id].cached_tokens > 0 for job in later)
    assert accepted_per_step({job.id: actual[job.id] for job in later}) > 0.4


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash", "draft_model"])
@pytest.mark.parametrize("shape", ["1,1,1", "8,8"])
def test_without_the_shared_noise_the_tokens_are_the_same_but_later(pair, kind, shape) -> None:
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (20, 21, 22, 23), 60, ["warm"])
    make = models.draft_model if kind == "draft_model" else head_of(models, kind, "tree")
    texts = {}
    for shared in (True, False):
        engine = engine_of(models.target, make, TreeShape.parse(shape))
        engine.drafter.shared_noise = shared  # type: ignore[union-attr]
        texts[shared] = run(engine, jobs)
        assert_same(expected_warm(models), texts[shared])
    assert accepted_per_step(texts[True]) > 1.5 * accepted_per_step(texts[False])


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_noise_is_shared_with_the_draw(pair, monkeypatch, kind) -> None:
    """Even a head that knows nothing is hit at temperature 1, since the noise decides much of the sample."""
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (20, 21, 22, 23), 60, ["warm"])
    engine = engine_of(models.target, head_of(models, kind, "tree"), TreeShape.parse("8,8"))
    texts = run(engine, jobs)
    assert_same(expected_warm(models), texts)
    add_noise_of_its_own(monkeypatch)
    alone = run(engine_of(models.target, head_of(models, kind, "tree"), TreeShape.parse("8,8")), jobs)
    assert accepted_per_step(texts) > 2 * accepted_per_step(alone)


def add_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafters add the noise of a seed of their own."""

    joined = TreeDrafter._joined
    monkeypatch.setattr(TreeDrafter, "_joined", lambda self, *args: replace(joined(self, *args), seed=12345))


@cache
def expected_warm(pair: Pair) -> dict[str, Text]:
    return plain(pair.target, jobs_of(pair.vocab_size, (20, 21, 22, 23), 60, ["warm"]))


def test_a_whisper_is_no_draft(pair) -> None:
    """The wrapped drafter really drafts: the trees are its own."""
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (20,), 30, ["warm"])
    engine = engine_with(models, "eagle3", "tree", whole(jobs, plain(models.target, jobs)))
    run(engine, jobs)
    assert isinstance(engine.drafter, Whisper)
    assert engine.drafter.drafted >= 9 * 8


TOKENS = 24


@cache
def half(pair: Pair, first: int) -> tuple[list[Job], dict[str, Text]]:
    """Every other combination, in one batch, and the texts that each comes to alone."""
    jobs = options.arriving(list(options.jobs(pair.vocab_size, TOKENS).values())[first::2])
    return jobs, plain(pair.target, jobs)


@pytest.mark.parametrize(("kind", "shape"), alternating(KINDS, ["chain", "tree"]))
def test_every_option(pair, kind, shape) -> None:
    """The combinations that the options' own tests give the other drafters, all of them in one batch."""
    models = target_of(pair, kind)
    jobs, wanted = half(models, 0 if shape == "chain" else 1)
    drafter = whispered(head_of(models, kind, shape), whole(jobs, wanted))
    texts = run(engine_of(models.target, drafter, SHAPES[shape], max_seqs=4, chunk=11), jobs)
    assert_same(wanted, texts)
    assert sum(text.statistics.accepted for text in texts.values() if text.statistics) > 0
    assert any(job.fork_of for job in jobs)
    assert any(text.statistics.forced for text in texts.values() if text.statistics)
