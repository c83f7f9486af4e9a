"""The drafters, samplings and requests of the suite, and the plain run that everything is compared with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch

from foresay.drafters.combined import RoutedDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.kvpaging import PagePool
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Drafter
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import ROOT_ONLY, TreeShape
from foresay.verifier.model.decoder import Decoder
from tests.same_tokens.models import MakeDrafter, Pair, engine_of
from tests.same_tokens.proposers import RandomTrees
from tests.same_tokens.witness import Job, Text, differences, run
from tests.verifier.reading import random_tokens

#: 63 drafted nodes: as many as a tree may have below its root.
LARGEST = "6,14,18,14,8,3"
CHAINS = [f"chain{k}" for k in range(1, 9)]
TREES = ["3,2,1", "4,4,2,2,1", "1,3,3", "8,8", LARGEST]
#: The target's own weights, blurred, on its own pages; and with a draft model or a lookup before them.
SELF = ["self chain3", "self 3,2,1", "self 4,4,2,2,1", "staged chain7", "found chain7"]
#: ``garbage`` proposes random trees; ``truth`` too, with the right tokens hidden on a path of each.
DRAFTERS = ["ngram", "suffix", "suffix tree", *CHAINS, *TREES, *SELF, "garbage", "truth"]

#: One of each kind, for whatever all of them do alike: `make soak` tries the others there.
ONE_OF_EACH = ("ngram", "suffix tree", "chain4", "3,2,1", "8,8", "self 3,2,1", "garbage", "truth")
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, top_k=3, min_p=0.2),
    "cool": SamplingParams(temperature=0.7),
    "cool_filtered": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "warm": SamplingParams(temperature=1.0),
    "warm_top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "warm_filtered": SamplingParams(temperature=1.0, top_k=50, top_p=0.95, min_p=0.05),
}


def sampled(name: str, seed: int, max_tokens: int) -> SamplingParams:
    """One of the samplings; every other seed lets the text end at the end-of-text token, after a few tokens."""
    stops = {"ignore_eos": True} if seed % 2 else {"min_tokens": 3}
    return replace_params(SAMPLINGS[name], seed=seed, max_tokens=max_tokens, **stops)


def replace_params(params: SamplingParams, **changes: object) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, **changes})


def jobs_of(
    vocab_size: int, lengths: Sequence[int], max_tokens: int, names: Sequence[str] = tuple(SAMPLINGS)
) -> list[Job]:
    """Requests with random prompts of these lengths, the samplings in turn."""
    rng = random.Random(len(lengths) + max_tokens)
    return [
        Job(f"r{index}", random_tokens(rng, length, vocab_size), sampled(names[index % len(names)], index, max_tokens))
        for index, length in enumerate(lengths)
    ]


def plain(
    target: Decoder, jobs: Sequence[Job], *, tokens: int = 1024, page_size: int = 16, kv: torch.dtype | None = None
) -> dict[str, Text]:
    """Each request alone, drafting nothing, its prompt in one pass, no page reused: what the promise is about."""
    engine = engine_of(
        target, lambda pool: None, ROOT_ONLY, max_seqs=1, chunk=tokens, tokens=tokens, page_size=page_size, kv=kv
    )
    return run(engine, [_alone(job) for job in jobs])


@cache
def expected(pair: Pair, lengths: tuple[int, ...], max_tokens: int) -> dict[str, Text]:
    """What :func:`jobs_of` gives when nothing is drafted; one who asks again in the same process has it at once."""
    return plain(pair.target, jobs_of(pair.vocab_size, lengths, max_tokens), kv=pair.kv)


@cache
def returning(pair: Pair, max_tokens: int = 10) -> tuple[list[Job], list[Job], dict[str, Text]]:
    """Requests; later ones, the same again and the beginnings of longer chats; and the texts of all.

    max_tokens: of what follows in the longer chats.
    """
    first = jobs_of(pair.vocab_size, (50, 33, 17), 16, ["warm", "greedy", "cool_filtered"])
    texts = plain(pair.target, first, kv=pair.kv)
    turns = [
        Job(f"{job.id}-{turn}", job.prompt + texts[job.id].tokens + [turn] * 9, sampled(name, turn, max_tokens))
        for job in first
        for turn, name in enumerate(("greedy", "cool", "warm_filtered"), start=7)
    ]
    again = [replace(job, id=f"{job.id}-again") for job in first]
    later = [replace(job, arrives=60 + index) for index, job in enumerate([*again, *turns])]
    return first, later, texts | plain(pair.target, later, kv=pair.kv)


def _alone(job: Job) -> Job:
    """There at once, to its end, no fork of another; its grammar does not report what is forced."""
    grammar = None if job.grammar is None else job.grammar.silent()
    return replace(job, arrives=0, cancelled=None, fork_of=None, grammar=grammar, prediction=None)


def shape_of(drafter: str) -> TreeShape:
    drafter = drafter.removeprefix("predicted ").removeprefix("self ").removeprefix("staged ").removeprefix("found ")
    if drafter.startswith("chain"):
        return TreeShape.chain(int(drafter.removeprefix("chain")))
    if drafter in TREES:
        return TreeShape.parse(drafter)
    fixed = {"none": ROOT_ONLY, "ngram": TreeShape.chain(5), "suffix": TreeShape.chain(7)}
    return fixed.get(drafter, TreeShape.parse("2,4,4,3,3,2,1"))


def drafting(pair: Pair, drafter: str, texts: Mapping[str, list[int]], **options: int | bool) -> EngineCore:
    """An engine with one of the drafters. texts: prompt and output by request, for the one that knows them."""
    making, shape = maker(pair, drafter, texts), shape_of(drafter)
    return engine_of(pair.target, making, shape, kv=pair.kv, **options)  # type: ignore[arg-type]


def maker(pair: Pair, drafter: str, texts: Mapping[str, list[int]]) -> MakeDrafter:
    """Makes one of the drafters; behind a prediction, if the name begins with "predicted"."""

    def made(pool: PagePool) -> Drafter | None:
        if (other := drafter.removeprefix("predicted ")) != drafter:
            return RoutedDrafter(PredictionDrafter(), maker(pair, other, texts)(pool), shape_of(other))
        if drafter == "none":
            return None
        if drafter == "ngram":
            return NgramDrafter(shortest=1)
        if drafter.startswith("suffix"):
            return SuffixDrafter()
        if drafter in ("garbage", "truth"):
            return RandomTrees(pair.vocab_size, known=texts if drafter == "truth" else None)
        if drafter in SELF:
            kind = drafter.partition(" ")[0]
            before = pair.draft_model(pool) if kind == "staged" else NgramDrafter(1) if kind == "found" else None
            return pair.copy(pool, before)
        return pair.draft_model(pool)

    return made


def cut_short(engine: EngineCore, job: Job, text: list[int], cut: int) -> Job:
    """What goes on with a text that was ended, as a stop string does it, ``cut`` tokens before its last one."""
    engine.add(job.request())
    count = 0
    while count < 40:
        count += sum(len(delta.tokens) for delta in engine.step())
    engine.finish(job.id, count - cut)
    engine.step()
    kept = text[: len(job.prompt) + count - cut]
    return replace(job, id="rest", prompt=kept, params=replace_params(job.params, max_tokens=9))


def whole(jobs: Sequence[Job], texts: Mapping[str, Text]) -> dict[str, list[int]]:
    return {job.id: job.prompt + texts[job.id].tokens for job in jobs}


def assert_same(expected: Mapping[str, Text], actual: Mapping[str, Text]) -> None:
    found = differences(expected, actual)
    assert not found, "\n".join(found)
