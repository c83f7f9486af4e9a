"""Recurrent targets as they are used: chats that branch, come back and are aborted, with all that ``--draft`` names."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foresay.drafters.eagle import MtpDrafter
from foresay.kvpaging import PagePool
from foresay.server.engine.build import build_engine
from foresay.spec.tree import TreeShape
from foresay.verifier.heads.paged import EagleHead
from foresay.verifier.heads.reader import read_mtp
from foresay.verifier.model.decoder import Decoder
from tests.heads.mtp import Mtp
from tests.same_tokens import options
from tests.same_tokens.heads import whispered
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import SAMPLINGS, assert_same, drafting, jobs_of, plain, replace_params, whole
from tests.same_tokens.test_directories import config, witnessed
from tests.same_tokens.witness import Job, Text, run
from tests.verifier.reading import random_tokens


@pytest.fixture(scope="module")
def models(pair) -> Pair:
    """A target with a layer that predicts, and a draft model."""
    found: Pair = pair("qwen3_5")
    Mtp().put_beside(found.directory)
    return found


def chats(target: Decoder, seed: int, rounds: int = 4, each: int = 6) -> tuple[list[Job], dict[str, Text]]:
    """Turns at random: new texts, and earlier ones, to their end or cut somewhere, gone on with; some with
    another choice, some aborted. And the texts that they come to alone."""
    rng, jobs, texts = random.Random(seed), list[Job](), dict[str, Text]()
    for turn in range(rounds):
        begins = [job.prompt + texts[job.id].tokens for job in jobs if job.id in texts] or [[]]
        fresh = []
        for number in range(each):
            begin = rng.choice([*begins, []])
            begin = begin[: rng.choice((len(begin), rng.randint(0, len(begin)), len(begin) // 8 * 8))]
            prompt = begin + random_tokens(rng, rng.choice((1, 2, 9, 40)), 300)
            params = replace_params(
                rng.choice(list(SAMPLINGS.values())), seed=rng.randrange(99), max_tokens=rng.choice((1, 8, 30)),
                stop_token_ids=tuple(rng.sample(range(300), 5)),
            )  # fmt: skip
            job = Job(f"{turn}.{number}", prompt, params, arrives=30 * turn + rng.randrange(25))
            fresh.append(replace(job, cancelled=job.arrives + rng.randint(1, 5) if rng.random() < 0.25 else None))
            if rng.random() < 0.3:
                fork = replace(job, id=f"{job.id} fork", fork_of=job.id, arrives=job.arrives + rng.choice((0, 0, 3)))
                fresh.append(replace(fork, params=replace_params(params, seed=100)))
        texts |= plain(target, fresh)
        jobs += fresh
    return jobs, texts


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 30))])
def test_chats_that_branch_and_are_aborted(pair, family, seed) -> None:
    """In so few pages that some have to go, in pages and pieces of several sizes."""
    models = pair(family)
    jobs, texts = chats(models.target, seed)
    for drafter, page_size, chunk, tokens in (("truth", 8, 20, 400), ("chain4", 8, 256, 2048), ("garbage", 8, 7, 640)):
        engine = drafting(
            models, drafter, whole(jobs, texts), page_size=page_size, chunk=chunk, prefix=True, tokens=tokens
        )
        found = run(engine, jobs)
        assert_same(texts, found)
        assert any(text.cached_tokens for text in found.values())
        assert {text.finish_reason for text in found.values()} >= {"stop", "length", "cancelled"}


@pytest.mark.parametrize(
    "draft", ["auto", "mtp", "draft_model,mtp,suffix,ngram", "tests.same_tokens.customs:Meddling,mtp"]
)
def test_drafters_as_a_server_builds_them(models, draft) -> None:
    """Of a directory; all texts twice, the second time with prefixes that are there."""
    jobs = [replace(job, arrives=3 * number) for number, job in enumerate(jobs_of(300, (9, 70, 33, 1, 20, 40), 24))]
    where = draft.replace("draft_model", str(models.draft_directory))
    engine = witnessed(build_engine(config(models.directory, where)))
    assert engine.info.exact and engine.prefix is not None
    texts = plain(models.target, jobs)
    assert_same(texts, run(engine, jobs))
    assert_same(texts, run(engine, jobs))
    assert engine.prefix.hits


@pytest.mark.parametrize("half", [0, 1])
def test_mtp_under_every_option(models, half) -> None:
    """Grammars, penalties, bans, other choices; the truth is whispered into its trees."""
    jobs = options.arriving(list(options.jobs(models.vocab_size, 24).values())[half::2])
    texts, head = plain(models.target, jobs), EagleHead(*read_mtp(models.directory, models.target), 576)

    def make(pool: PagePool) -> MtpDrafter:
        return MtpDrafter(head, pool, "mtp")

    shape = (TreeShape.chain(4), TreeShape((3, 4, 2)))[half]
    engine = engine_of(models.target, whispered(make, whole(jobs, texts)), shape, chunk=11, prefix=True)
    found = run(engine, jobs)
    assert_same(texts, found)
    assert sum(text.statistics.accepted for text in found.values() if text.statistics) > 0
