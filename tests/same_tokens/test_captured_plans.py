"""The same tokens from captured steps that a budget plans: another drafter, another shape, or none at any step."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from foresay.drafters.combined import CombinedDrafter
from foresay.drafters.levels import TreeDrafter
from foresay.drafters.proposer import by_plan, on_cpu
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.kvpaging import PagePool
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import OPEN, Member
from foresay.spec.budget.plan import NO_PLAN, Plan, Share, Why
from foresay.spec.budget.weigh import DraftOption
from foresay.spec.engine import EngineCore
from foresay.spec.price import Price
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.buckets import buckets, recorded_steps, sizes, widths
from foresay.verifier.graphs.capture import Capture, recorded
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.same_tokens import options
from tests.same_tokens.captured import run_freely
from tests.same_tokens.heads import head_drafter
from tests.same_tokens.models import Pair, info_of, paged
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.witness import Text

LENGTHS = (9, 2, 17, 33, 5, 40)
#: Of a plan that nobody weighed: a budget made it all the same.
_WHY = Why((DraftOption("", (0,), (), 1.0, 1.0, 0, 0.0),), ())


class Changing(Budget):
    """Plans the same for a few steps, then something else: none, a chain, a tree that grows, what was looked up, or the
    last two together. kinds: how often each was planned."""

    def __init__(self, members: Sequence[Member], seed: int) -> None:
        super().__init__(members, CostModel([1, 64], [1.0, 1.5]), timed=False)
        self._rng, self._left = random.Random(seed), 0
        self._kind, self._model, self._levels = "none", "", 0
        self.kinds: Counter[str] = Counter()

    def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        if not self._left:
            self._left = self._rng.randint(1, 8)
            self._kind = self._rng.choice(("none", "chain", "chain", "tree", "tree", "found", "both"))
            self._model = self._rng.choice([name for name, one in self.members.items() if not one.looks])
            self._levels = self._rng.randint(1, 6)
        self._left -= 1
        self.kinds[self._kind] += 1
        return [self._planned(sequence) for sequence in sequences]

    def _planned(self, sequence: SequenceState) -> Plan:
        levels, shares = min(self._levels, sequence.most_levels), []
        if levels <= 0 or not sequence.speculate or self._kind == "none":
            return replace(NO_PLAN, why=_WHY)
        if self._kind == "chain":
            shares.append(Share(self._model, TreeShape.chain(levels)))
        if self._kind in ("tree", "both"):
            price = Price(
                self._rng.choice((0.0, 0.2)), [0.02 * rows for rows in range(32)], self._rng.randint(1, levels)
            )
            shares.append(Share(self._model, replace(OPEN.limited(levels), price=price)))
        if self._kind in ("found", "both"):
            shape = self._rng.choice((TreeShape.chain(levels), OPEN.limited(levels)))
            found = self.members["suffix"].drafter.propose([sequence], [shape])[0]
            if len(found) > 1:
                shares.insert(0, Share("suffix", found.shape, found))
        return Plan.of(shares, _WHY)


def planned_engine(
    pair: Pair,
    models: list[TreeDrafter],
    pool: PagePool,
    max_seqs: int,
    capture: Capture,
    with_copy: bool = False,
    whole: bool = False,
) -> EngineCore:
    """An engine whose budget plans so, with what a device captures for it; or, ``whole``, with what a CPU records."""
    verifier, cost = paged(pair.target, pool), DraftCost(0.05, 0.05, 0.01)
    if with_copy:
        models = [*models, pair.copy(pool)]
    members = [*(Member.model(model, cost) for model in models), Member.looking(SuffixDrafter(slice_seconds=math.inf))]
    budget, shape = Changing(members, max_seqs), TreeShape.chain(6)
    drafter, info = CombinedDrafter(budget), info_of(pair.target, pool, max_seqs, shape)
    tables, most = widths(info.max_model_len + 2 * OPEN.nodes + 1, pool.page_size), [(model, 6) for model in models]
    made = buckets(verifier, by_plan(most, True, verifier), capture, (sizes(max_seqs), tables))
    if whole:
        made = iter([((1, pool.num_pages), list(recorded_steps(verifier, on_cpu(most, verifier.vocab_size))))])
    return EngineCore(
        info=info,
        pool=pool,
        prefix=None,
        verifier=verifier,
        drafter=drafter,
        scheduler=Scheduler(pool, None, shape, CostModel([1], [1.0]), max_seqs, 256, budget),
        runner=GraphStepRunner(verifier, drafter, dict(made), run_ahead=not whole),
    )


def models_of(made: Pair, pool: PagePool, others: str, directory: Path) -> list[TreeDrafter]:
    """A draft model, and heads."""
    models: list[TreeDrafter] = [made.draft_model(pool)]
    for kind in ("eagle3", "medusa") if others == "heads" else ():
        head = head_drafter(kind, directory / kind, made.target, "tree")(pool)
        assert isinstance(head, TreeDrafter)
        models.append(head)
    return models


@pytest.mark.parametrize(("max_seqs", "others", "careful"), [(1, "", False), (3, "heads", False), (3, "copy", True)])
def test_the_same_tokens_whatever_is_planned(pair, tmp_path: Path, max_seqs, others, careful) -> None:
    made, pool = pair("llama2", layers=3), PagePool(65, 16)
    models = models_of(made, pool, others, tmp_path)
    engine = planned_engine(made, models, pool, max_seqs, recorded, with_copy=others == "copy")
    jobs = jobs_of(made.vocab_size, LENGTHS, 60, ("greedy", "cool", "warm"))
    texts = run_freely(engine, jobs, careful)
    assert_same(plain(made.target, jobs), texts)
    runner, budget = engine.runner, engine.scheduler.budget
    assert isinstance(runner, GraphStepRunner) and isinstance(budget, Changing)
    assert all(budget.kinds[kind] for kind in ("none", "chain", "tree", "found", "both"))
    assert runner.counts["launched"] > 2 * runner.counts["parts"]
    assert accepted(texts) > 12


def test_plain_steps_of_a_budget_run_ahead(pair, tmp_path: Path, monkeypatch) -> None:
    """Those that measure what drafts bring are to take as long as without a budget."""
    made, pool = pair("llama2", layers=3), PagePool(65, 16)
    engine = planned_engine(made, models_of(made, pool, "", tmp_path), pool, 1, recorded)
    monkeypatch.setattr(engine.scheduler.budget, "plan", lambda texts: [NO_PLAN] * len(texts))
    runner, ahead = engine.runner, 0
    assert isinstance(runner, GraphStepRunner)
    engine.add(Request(id="one", prompt=[3, 5, 7], params=SamplingParams(max_tokens=30, seed=1, ignore_eos=True)))
    while engine.has_work:
        engine.step()
        ahead += runner._ahead is not None
    assert ahead > 20


@pytest.mark.parametrize(
    ("family", "others", "max_seqs", "careful"), [("llama2", "heads", 3, True), ("qwen2_window", "", 1, True)]
)
def test_whole_steps_and_steps_in_parts_take_turns(pair, tmp_path: Path, family, others, max_seqs, careful) -> None:
    """Only one text's chains of up to four are recorded whole, with exactly as many rows as are planned; all else is
    run in parts, which find the drafter's state as the steps before left it, and the other way round."""
    made, pool = pair(family, layers=3), PagePool(65, 16)
    models = models_of(made, pool, others, tmp_path)
    engine = planned_engine(made, models, pool, max_seqs, recorded, whole=True)
    jobs = jobs_of(made.vocab_size, LENGTHS, 60, ("greedy", "cool", "warm"))
    jobs = [replace(job, arrives=25 * number) for number, job in enumerate(jobs)]
    jobs += [replace(job, arrives=200) for group in options.jobs(made.vocab_size, 14).values() for job in group[::4]]
    texts = run_freely(engine, jobs, careful)
    assert_same(plain(made.target, jobs), texts)
    runner = engine.runner
    assert isinstance(runner, GraphStepRunner)
    assert runner.counts["launched"] > 10 and runner.counts["parts"] > 20 and not runner.counts["dropped"]
    assert accepted(texts) > 12


def test_beside_the_targets_copy_no_step_is_recorded_whole(pair) -> None:
    """A drafter may propose for it, and would not be told what such a step committed."""
    made, pool = pair("llama2", layers=3), PagePool(65, 16)
    models: list[tuple[TreeDrafter, int]] = [(made.draft_model(pool), 6)]
    assert [each.shape.levels for each in on_cpu(models, made.vocab_size)] == [1, 2, 3, 4, 5, 6]
    assert not on_cpu([*models, (made.copy(pool), 6)], made.vocab_size)


def accepted(texts: dict[str, Text]) -> int:
    return sum(text.statistics.accepted for text in texts.values() if text.statistics)
