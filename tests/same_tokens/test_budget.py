"""The same tokens while a budget chooses: drafters alone, several in one tree, none, another choice at any step."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest

from foresay.drafters.combined import CombinedDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.kvpaging import PagePool, PrefixIndex
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import RESTING, Member
from foresay.spec.budget.plan import NO_PLAN, Plan, Share
from foresay.spec.engine import EngineCore
from foresay.spec.price import Price
from foresay.spec.protocols import Drafter
from foresay.spec.scheduler import Scheduler
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from tests.combinations import alternating
from tests.same_tokens.edits import predicted
from tests.same_tokens.heads import head_of, whispered
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import assert_same, jobs_of, plain, whole
from tests.same_tokens.situations import accepted_per_step, assert_same_in
from tests.same_tokens.witness import run

MOST = TreeShape.parse("4,6,4,2")
#: Weights of fp32, and of bf16, which a CPU in fp32 keeps in fp16; and recurrent layers.
FAMILIES = ["llama2", "qwen3", "qwen3_5"]


class Reckless(Budget):
    """Chooses at random, by the seed and the state of the sequence: nobody, one, or several into one tree, chains and
    trees, of models also such as grow by their price. made: how often each mix drafted."""

    def __init__(self, members: Sequence[Member], seed: int) -> None:
        super().__init__(members, CostModel([1, 64], [1.0, 1.5]), timed=False)
        self._seed, self._planned = seed, 0
        self.made: Counter[str] = Counter()

    def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        super().plan(sequences)
        self._planned += 1
        for name, member in self.members.items():  # at random too: a prompt is shown to it, or left for later
            member.idle = random.Random(f"{self._seed}/{self._planned}/{name}").choice((0, 2 * RESTING))
        return [self._random(sequence) for sequence in sequences]

    def _random(self, sequence: SequenceState) -> Plan:
        rng = random.Random(f"{self._seed}/{sequence.id}/{len(sequence.tokens)}")
        levels = min(MOST.levels, sequence.most_levels)
        if levels <= 0 or not sequence.speculate:
            return NO_PLAN
        chosen = rng.sample(list(self.members), rng.choice((0, 1, 1, 2, 3)))
        self.made["+".join(sorted(chosen))] += 1
        return Plan.of([self._share(rng, sequence, self.members[name], levels) for name in chosen])

    def _share(self, rng: random.Random, sequence: SequenceState, member: Member, levels: int) -> Share:
        depth = rng.randint(1, levels)
        shape = TreeShape.chain(depth)
        if rng.random() < 0.7:
            shape = TreeShape(tuple(rng.randint(1, width) for width in MOST.widths[:depth]))
        if not member.looks and not shape.is_chain and rng.random() < 0.5:
            rows = [rng.choice((0.0, 0.02, 0.1)) * node for node in range(shape.nodes)]
            shape = replace(shape, price=Price(rng.choice((0.0, 0.1)), rows))
        if member.checks and shape.is_chain:
            (found,) = self.members["ngram"].find([sequence])
            return Share(member.name, shape, first=found and found.beginning(1 + depth, ()))
        if not member.looks:
            return Share(member.name, shape)
        tree = member.drafter.propose([sequence], [shape])[0]
        return Share(member.name, tree.shape, tree)


def members_of(pair: Pair, known: Mapping[str, list[int]], pool: PagePool) -> list[Member]:
    """A draft model, the target's copy, heads that get the truth, lookups, and what a request
    predicts."""
    cost = DraftCost(0.05, 0.05, 0.01)
    heads = [whispered(head_of(pair, name, "tree"), known)(pool) for name in ("medusa", "eagle3")]
    models: list[Drafter | None] = [pair.draft_model(pool), pair.copy(pool), *heads]
    looking: list[Drafter] = [PredictionDrafter(), NgramDrafter(shortest=1), SuffixDrafter(slice_seconds=math.inf)]
    return [Member.model(one, cost) for one in models if one is not None] + [Member.looking(one) for one in looking]


def engine_with(pair: Pair, texts: Mapping[str, list[int]], seed: int | None, **changes: int | bool) -> EngineCore:
    """An engine whose budget chooses at random, or by what it costs and brings (seed None)."""
    made: list[Budget] = []

    def drafter(pool: PagePool) -> Drafter:
        members = members_of(pair, texts, pool)
        curve = CostModel([1, 64], [1.0, 1.5])
        made.append(Budget(members, curve, timed=False) if seed is None else Reckless(members, seed))
        return CombinedDrafter(made[0])

    engine = engine_of(pair.target, drafter, MOST, **changes)  # type: ignore[arg-type]
    old = engine.scheduler
    scheduler = Scheduler(old.pool, old.prefix, MOST, old.cost, old.max_seqs, old.max_chunk, budget=made[0])
    rebuilt = EngineCore(
        info=engine.info,
        pool=engine.pool,
        prefix=engine.prefix,
        verifier=engine.runner.verifier,
        drafter=engine.drafter,
        scheduler=scheduler,
    )
    rebuilt.runner = engine.runner
    assert old.prefix is None or isinstance(old.prefix, PrefixIndex)
    return rebuilt


def assert_mixed(engine: EngineCore) -> None:
    """No drafter, each alone, and several together drafted, and more than one of them had something accepted."""
    budget = engine.scheduler.budget
    assert isinstance(budget, Reckless)
    assert budget.made[""]
    assert all(budget.made[name] for name in budget.members), budget.made
    assert sum(count for names, count in budget.made.items() if "+" in names) > 20


@pytest.mark.parametrize(("family", "situation"), alternating(FAMILIES, ["alone", "preempted", "back", "with options"]))
def test_in_every_situation(pair, family, situation) -> None:
    """Grammars, forks, penalties and all else, too few pages, and pages that one drafter filled and another did not."""
    models = pair(family)
    change = predicted if situation != "with options" else lambda jobs, texts: list(jobs)
    engine, texts = assert_same_in(situation, models, partial(engine_with, models, seed=3), change)
    if situation == "alone":
        assert_mixed(engine)
        assert accepted_per_step(texts) > 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_as_it_chooses_itself(pair, family) -> None:
    """By costs and chances, in a batch; the drafters, who know the text, draft and pay."""
    models, lengths = pair(family), (9, 20, 17, 33)
    jobs = [replace(job, arrives=3 * at) for at, job in enumerate(jobs_of(models.vocab_size, lengths, 60))]
    texts = plain(models.target, jobs)
    engine = engine_with(models, whole(jobs, texts), None, chunk=16)
    actual = run(engine, predicted(jobs, texts))
    assert_same(texts, actual)
    assert accepted_per_step(actual) > 0.5
