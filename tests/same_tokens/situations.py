"""What may happen to texts that are drafted for, as a table, and its runner: they are what each comes to alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from foresay.spec.engine import EngineCore
from tests.same_tokens import options
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, cut_short, jobs_of, plain, replace_params, returning, whole
from tests.same_tokens.witness import Job, Text, run

#: What the engine is like. In a batch twelve come and go at random, preempted ones outgrow the pages; some come back.
SITUATIONS: dict[str, dict[str, int | bool]] = {
    "alone": {"max_seqs": 1},
    "short": {"max_seqs": 1},
    "at once": {},
    "long": {"page_size": 8, "chunk": 16},
    "in a batch": {"chunk": 7},
    "preempted": {"tokens": 192},
    "back": {"prefix": True},
    "crowded": {"page_size": 8, "chunk": 16, "prefix": True, "tokens": 176},
    "forked": {"page_size": 8, "chunk": 24},
    "with options": {"chunk": 11},
    "with other options": {"chunk": 11},
}
#: Lengths of prompts, and how many tokens follow each, of those that are nothing but that.
LENGTHS = {
    "alone": ((9, 1, 17, 33, 5, 40), 40), "short": ((9, 1, 17, 33, 5, 40), 12), "at once": ((9, 17, 33, 5), 12),
    "crowded": ((9, 60, 17, 1, 33, 3), 40), "long": ((9, 60, 17, 90, 33, 40), 40),
}  # fmt: skip
#: Makes an engine that drafts for these texts (prompt and output by request), with such options.
MakeEngine = Callable[..., EngineCore]


@cache
def requests(pair: Pair, situation: str, page_size: int = 16) -> tuple[list[Job], dict[str, Text]]:
    """The requests of a situation, and what each comes to alone."""
    if situation == "back":
        first, later, texts = returning(pair, 16)
        return [*first, *later], texts
    if "options" in situation:
        groups = list(options.jobs(pair.vocab_size, 24).values())
        jobs = options.arriving(groups["other" in situation :: 2])
    elif situation == "forked":  # when the prompt is computed, and later, when what its end sees may be gone
        (first_job,) = jobs_of(pair.vocab_size, (70,), 40, ["warm"])
        forks = [replace(first_job, id=f"fork{at}", fork_of=first_job.id, arrives=at) for at in (0, 1, 12, 20)]
        jobs = [first_job, *(replace(fork, params=replace_params(fork.params, seed=fork.arrives)) for fork in forks)]
    elif situation == "in a batch":
        rng = random.Random(3)
        listed = jobs_of(pair.vocab_size, (5, 30, 12, 150, 1, 20, 97, 64, 3, 16, 33, 8), 14)
        jobs = [replace(job, arrives=rng.randrange(20)) for job in listed]
        jobs[1::3] = [replace(job, cancelled=job.arrives + rng.randint(2, 8)) for job in jobs[1::3]]
    elif situation == "preempted":
        to_the_end = {"ignore_eos": True, "min_tokens": 0}
        listed = jobs_of(pair.vocab_size, (30, 33, 31, 20), 90)
        jobs = [replace(job, params=replace_params(job.params, **to_the_end)) for job in listed]
    else:
        jobs = jobs_of(pair.vocab_size, *LENGTHS[situation])
    return jobs, plain(pair.target, jobs, kv=pair.kv, page_size=page_size)


def assert_same_in(
    situation: str,
    pair: Pair,
    make: MakeEngine,
    change: Callable[[Sequence[Job], dict[str, Text]], list[Job]] = lambda jobs, texts: list(jobs),
    found: int = 12,
    plain_size: int = 16,
    **more: int | bool,
) -> tuple[EngineCore, dict[str, Text]]:
    """Run a situation's requests, prove the texts, and that what it is about took place; the engine and the texts.
    change: the requests, by the texts that they come to. found: how many of those that come back must be. plain_size:
    of a page in plain decoding. more: options of the engine."""
    jobs, wanted = requests(pair, situation, plain_size)
    jobs = change(jobs, wanted)
    engine = make(whole(jobs, wanted), **{**SITUATIONS[situation], **more})
    texts = run(engine, jobs)
    assert_same(wanted, texts)
    statistics = [text.statistics for text in texts.values() if text.statistics is not None]
    if situation == "back":
        assert sum(text.cached_tokens > 0 for text in texts.values()) >= found
    if situation == "in a batch":
        assert {text.finish_reason for text in texts.values()} >= {"length", "cancelled"}
    if situation == "preempted":
        assert sum(each.ending.preemptions for each in statistics) > 0
    if "options" in situation:
        assert any(job.fork_of for job in jobs) and any(each.forced for each in statistics)
    return engine, texts


def assert_goes_on(pair: Pair, make: MakeEngine, cut: int, **more: int | bool) -> tuple[int, int]:
    """A text that was cut short, as a stop string does it, a token or many before what was written last, goes on; how
    long its prompt is then, and how much of that was there."""
    (job,) = jobs_of(pair.vocab_size, (50,), 80, ["greedy"])
    text = job.prompt + plain(pair.target, [job])[job.id].tokens
    engine = make({job.id: text, "rest": text}, page_size=8, prefix=True, **more)
    rest = cut_short(engine, job, text, cut)
    found = run(engine, [rest])
    assert_same(plain(pair.target, [rest]), found)
    return len(rest.prompt), found["rest"].cached_tokens


def accepted_per_step(texts: dict[str, Text]) -> float:
    totals = [text.statistics for text in texts.values() if text.statistics is not None]
    return sum(total.accepted for total in totals) / sum(total.steps for total in totals)
