"""How often the host waits for the device in a step, and what it launches: graphs, ops one by one, copies to it.

A draft may be planned by a budget: an open tree, whose levels are drafted as long as they are worth their price; with
with found nodes or without; for several texts at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from foresay.drafters.combined import CombinedDrafter
from foresay.drafters.levels import TreeDrafter, rooms
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.proposer import by_plan
from foresay.kvpaging import PagePool
from foresay.spec.budget import CostModel
from foresay.spec.budget.budget import Budget
from foresay.spec.budget.cost import DraftCost
from foresay.spec.budget.members import OPEN, Member
from foresay.spec.budget.plan import Plan, Share, Why
from foresay.spec.budget.weigh import DraftOption
from foresay.spec.engine import EngineCore
from foresay.spec.price import Price
from foresay.spec.protocols import Drafter
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.sequence import SequenceState
from foresay.spec.step import ScheduledSequence, VerifyResult
from foresay.spec.trace import Stopwatch
from foresay.spec.tree import ROOT_ONLY, DraftTree, TreeShape
from foresay.verifier.graphs.buckets import buckets, chunks, mixed, passes, sizes, widths
from foresay.verifier.graphs.runner import GraphStepRunner
from foresay.verifier.model_runner import ModelRunner
from tests.same_tokens.captured import run_freely
from tests.same_tokens.heads import head_drafter, target_of
from tests.same_tokens.models import MakeDrafter, Pair, info_of, paged
from tests.same_tokens.runs import assert_same, jobs_of, plain, replace_params
from tests.same_tokens.witness import Job, Text
from tests.simulated.device import CURRENT, DEVICE, is_view, simulated
from tests.simulated.graph import captured
from tests.spec.grammars import Automaton
from tests.verifier.reading import load_decoder

soak = pytest.mark.soak
TOKENS, PAGE_SIZE, LEVELS = 2048, 16, 4
#: Of a tree whose levels are all worth drafting, and its rows to be verified.
WORTH = replace(OPEN.limited(LEVELS), price=Price(0.0, [0.0] * OPEN.nodes, LEVELS))


#: Of a plan that was not weighed: a budget made it all the same.
_WHY = Why((DraftOption("", (0,), (), 1.0, 1.0, 0, 0.0),), ())


class Spent(NamedTuple):
    """Of one step: how often the host waited, and what it launched."""

    waits: int
    graphs: int
    ops: int
    copies: int


#: A step that is launched whole: what it copies to the device is how far trees are to grow.
ONCE = Spent(waits=1, graphs=1, ops=0, copies=1)


class Always(Budget):
    """Plans the same for every sequence. extra: whether it has two found nodes too, which never come."""

    def __init__(self, members: Sequence[Member], shape: TreeShape, extra: bool) -> None:
        super().__init__(members, CostModel([1, 64], [1.0, 1.5]), timed=False)
        self._shape, self._extra = shape, extra

    def plan(self, sequences: Sequence[SequenceState]) -> list[Plan]:
        return [self._planned(sequence) for sequence in sequences]

    def _planned(self, sequence: SequenceState) -> Plan:
        levels = min(self._shape.levels, sequence.most_levels)
        if levels <= 0:
            return Plan(why=_WHY)
        model = next(member.name for member in self.members.values() if not member.looks)
        shares = [Share(model, self._shape.limited(levels))]
        if self._extra:
            found = DraftTree.chain([sequence.tokens[-1], 1, 2], "ngram", (1.0, 0.5, 0.25))
            shares.append(Share("ngram", found.shape, found))
        return Plan.of(shares, _WHY)


def engine_of(
    moved: Pair, make: MakeDrafter, shape: TreeShape, max_seqs: int, extra: bool, prompts: bool = False
) -> EngineCore:
    """An engine whose steps a budget plans, captured as the server captures it; those with rows of prompts, if they are
    wanted."""
    pool = PagePool(1 + TOKENS // PAGE_SIZE, PAGE_SIZE)
    verifier, model = paged(moved.target, pool), make(pool)
    models = [model] if isinstance(model, TreeDrafter) else []
    members = [Member.looking(NgramDrafter()), *(Member.model(one, DraftCost(0.05, 0.05, 0.01)) for one in models)]
    budget = Always(members, shape, extra)
    drafter = CombinedDrafter(budget)
    capture_all(verifier, drafter, model, shape, max_seqs)
    proposers = by_plan([(one, LEVELS) for one in models], True, verifier)
    shapes = sizes(max_seqs), widths(128, PAGE_SIZE)
    made = buckets(verifier, proposers, captured, shapes, mixed(max_seqs, 128) if prompts else None)
    return EngineCore(
        info=info_of(moved.target, pool, max_seqs, shape),
        pool=pool,
        prefix=None,
        verifier=verifier,
        drafter=drafter,
        scheduler=Scheduler(pool, None, shape, CostModel([1], [1.0]), max_seqs, 256, budget),
        runner=GraphStepRunner(verifier, drafter, dict(made)),
    )


def capture_all(
    verifier: ModelRunner, drafter: Drafter, model: Drafter | None, shape: TreeShape, max_seqs: int
) -> None:
    for _ in verifier.capture(
        drafter.needs, [*passes(max_seqs, 128, PAGE_SIZE), *chunks(max_seqs, 128, 128, PAGE_SIZE)], captured
    ):
        pass
    if isinstance(model, TreeDrafter):
        for _ in model.capture_ahead(shape, verifier.vocab_size, rooms(max_seqs, 128, PAGE_SIZE), captured):
            pass


def spent(engine: EngineCore) -> Spent:
    """What a step takes."""
    reads, CURRENT.launched = CURRENT.reads, Counter()
    engine.step()
    launched = {name: count for name, count in CURRENT.launched.items() if not is_view(name)}
    graphs, copies = (launched.pop(name, 0) for name in ("graph", "copy_"))
    return Spent(CURRENT.reads - reads, graphs, sum(launched.values()), copies)


def steps(engine: EngineCore, vocab_size: int, max_seqs: int, special: dict[str, Any] | None = None) -> Iterator[Spent]:
    """Steps that decode all of the texts. special: fields of the first request and of how it is sampled."""
    for number, job in enumerate(jobs_of(vocab_size, (2 * (9, 12, 17, 33, 8, 10, 11, 13))[:max_seqs], 24)):
        params: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 24, "ignore_eos": True}
        params |= {} if number or special is None else special
        extra = {name: params.pop(name) for name in ("grammar", "prediction", "forced") if name in params}
        grammar = extra.pop("grammar", None)
        request = replace(job, params=SamplingParams(**params)).request()
        for name, value in extra.items():
            setattr(request, name, value)
        engine.add(request, grammar and grammar.fork())
    while engine.has_work:
        decoding = len(engine.scheduler.running) == max_seqs and not any(s.pending for s in engine.scheduler.running)
        full = all(s.most_levels > LEVELS for s in engine.scheduler.running)
        made = spent(engine)
        if decoding and full:
            yield made


@pytest.fixture(scope="module")
def moved(pair) -> Callable[[str], Pair]:
    """The pair that a drafter is for, on the simulated device."""

    @cache
    def made(draft: str) -> Pair:
        here = target_of(pair, draft, "llama3", layers=2)
        directories = here.directory, here.draft_directory
        with simulated():
            return Pair(*directories, *(load_decoder(path, torch.float32, DEVICE) for path in directories))

    return made


@pytest.fixture(scope="module")
def elsewhere(moved: Callable[[str], Pair]) -> Pair:
    """The pair on the simulated device, if it matters to nobody which."""
    return moved("")


@pytest.mark.parametrize(
    ("draft", "shape", "extra", "max_seqs", "usual"),
    [
        ("none", ROOT_ONLY, False, 1, ONCE),
        ("none", ROOT_ONLY, False, 8, ONCE),
        ("draft_model", TreeShape.chain(LEVELS), False, 1, ONCE),
        ("draft_model", WORTH, False, 4, ONCE),
        pytest.param("draft_model", WORTH, False, 16, ONCE._replace(copies=2), marks=soak),  # some text has a new page
        ("eagle3", WORTH, False, 1, ONCE),
        ("assistant", TreeShape.chain(LEVELS), False, 2, ONCE),
        ("draft_model", WORTH, True, 1, ONCE._replace(copies=2)),  # what was found too
    ],
)
def test_a_step_waits_so_often(pair, moved, tmp_path: Path, draft, shape, extra, max_seqs, usual) -> None:
    elsewhere = moved(draft)
    make = maker_of(draft, target_of(pair, draft, "llama3", layers=2), elsewhere, tmp_path)
    with simulated():
        engine = engine_of(elsewhere, make, shape, max_seqs, extra)
        found = list(steps(engine, elsewhere.vocab_size, max_seqs))[2:]  # the second launches the next one too
    assert max(each.waits for each in found) == usual.waits
    assert Counter(each._replace(copies=usual.copies) for each in found).most_common(1)[0][0] == usual, found
    assert min(each.copies for each in found) <= usual.copies


#: What requests may ask, how often the host waits in a step and how many graphs it launches: where nothing is drafted,
#: and where a tree is, which is looked at before logits are edited. Rows of log-probabilities are read at the end.
ASKED: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[int, int]]] = {
    "penalties": ({"frequency_penalty": 0.5, "repetition_penalty": 1.2}, (1, 2), (2, 2)),
    "bias": ({"logit_bias": {3: 2.0}, "bad_words": ((5,), (7, 9))}, (1, 2), (2, 2)),
    "early": ({"min_tokens": 24, "ignore_eos": False, "stop_token_ids": (4, 5)}, (1, 2), (2, 2)),
    "forced": ({"forced": tuple(range(5, 60))}, (1, 2), (2, 2)),
    "grammar": ({"grammar": Automaton(3, 300, forcing=0.0)}, (1, 2), (2, 2)),
    "logprobs": ({"logprobs": 3}, (2, 2), (2, 2)),
    "prediction": ({"prediction": tuple(range(30))}, (1, 1), (1, 1)),
}


@pytest.mark.parametrize(("drafts", "max_seqs"), [(False, 1), pytest.param(True, 1, marks=soak), (True, 2)])
def test_what_requests_ask_is_the_same_step(elsewhere, drafts, max_seqs) -> None:
    """Of one text of several too."""
    with simulated():
        make: MakeDrafter = lambda pool: elsewhere.draft_model(pool) if drafts else None  # noqa: E731
        engine = engine_of(elsewhere, make, WORTH if drafts else ROOT_ONLY, max_seqs, False)
        found = {
            name: [(each.waits, each.graphs) for each in steps(engine, elsewhere.vocab_size, max_seqs, row[0])]
            for name, row in ASKED.items()
        }
    assert {name: Counter(row).most_common(1)[0][0] for name, row in found.items()} == {
        name: row[1 + drafts] for name, row in ASKED.items()
    }
    assert max(waits for row in found.values() for waits, _ in row) == 2


@pytest.mark.parametrize(
    ("draft", "shape", "extra"),
    [
        ("none", ROOT_ONLY, False),
        ("draft_model", WORTH, True),
        ("draft_model", TreeShape.chain(LEVELS), False),
        *(pytest.param(each, TreeShape.chain(LEVELS), False, marks=soak) for each in ("eagle3", "assistant")),
    ],
)
def test_prompts_with_texts_are_the_same_step(pair, moved, tmp_path: Path, draft, shape, extra) -> None:
    """One launch and one wait, be it that more of a prompt follows or that it ends there. Texts are those of plain
    decoding, and chains, which no calibration changes, those of steps in parts."""
    here, elsewhere, lengths = target_of(pair, draft, "llama3", layers=2), moved(draft), (9, 12, 30, 79)
    jobs = [
        replace(job, arrives=4 * max(0, number - 1), params=replace_params(job.params, min_tokens=0))
        for number, job in enumerate(jobs_of(here.vocab_size, lengths, 24, ("warm", "cool")))
    ]
    make = maker_of(draft, here, elsewhere, tmp_path)
    with simulated():
        engine = engine_of(elsewhere, make, shape, len(jobs), extra, prompts=True)
        whole, drafts, found = run_with_prompts(engine, jobs)
        assert isinstance(engine.runner, GraphStepRunner)
        for key, bucket in engine.runner.buckets.items():
            engine.runner.buckets[key] = [step for step in bucket if step.prompt is None]
        _, in_parts, slower = run_with_prompts(engine, jobs)
    assert_same(plain(here.target, jobs), whole)
    assert found == [(29, 1, 1), (70, 1, 1), (8, 1, 1)] and found < slower
    if shape.is_chain:
        assert drafts == in_parts and max(waits for _, waits, _ in slower) <= 3  # two depths, and the end


def run_with_prompts(
    engine: EngineCore, jobs: Sequence[Job]
) -> tuple[dict[str, Text], dict[tuple[str, int], list[int]], list[tuple[int, int, int]]]:
    """Texts; what was drafted, by request and length of its text; and of each step that reads a prompt while texts are
    decoding the prompt's rows, waits (copies to the device that block too), and graphs."""
    run, drafts, found = partial(type(engine.runner).run, engine.runner), {}, []
    engine.scheduler.max_chunk = 70
    engine.scheduler.chunk = lambda decode_rows, most: most  # type: ignore[method-assign]

    def counted(batch: list[ScheduledSequence], watch: Stopwatch) -> list[VerifyResult]:
        reads, CURRENT.launched, rows = CURRENT.reads, Counter(), sum(each.prefill for each in batch)
        results, launched = run(batch, watch), CURRENT.launched
        for sequence, tree, emitted in ((one.scheduled.sequence, one.tree, one.emitted) for one in results):
            if tree is not None:
                drafts[sequence.id, len(sequence.tokens) - len(emitted)] = tree.tokens
        if rows and any(not each.prefill for each in batch):
            found.append((rows, CURRENT.reads - reads + launched["to"], launched["graph"]))
        return results

    engine.runner.run = counted  # type: ignore[method-assign]
    return run_freely(engine, jobs), drafts, found


def maker_of(draft: str, here: Pair, moved: Pair, directory: Path) -> MakeDrafter:
    if draft == "none":
        return lambda pool: None
    if draft == "draft_model":
        return moved.draft_model
    head_drafter(draft, directory, here.target, "tree")  # written by the CPU
    with simulated():
        return head_drafter(draft, directory, moved.target, "tree")
