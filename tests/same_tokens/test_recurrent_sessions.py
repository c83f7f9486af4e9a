"""Recurrent targets as they are used: chats that branch, come back and are aborted, with all that ``--draft`` names."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foresay.verifier.model.decoder import Decoder
from tests.same_tokens.runs import SAMPLINGS, assert_same, drafting, plain, replace_params, whole
from tests.same_tokens.witness import Job, Text, run
from tests.verifier.reading import random_tokens


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
