"""How often the host waits for the device in a step, and what it launches: graphs, ops one by one, copies to it.

A draft may be planned by a budget: an open tree, whose levels are drafted as long as they are worth their price; with
with found nodes or without; for several texts at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from foresay.spec.budget.weigh import CandidatePlan
from foresay.spec.engine import Engine
from foresay.spec.price import Price
from foresay.spec.protocols import Drafter
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import ROOT_ONLY, DraftTree, TreeShape
from foresay.verifier.graphs.buckets import buckets, chunks, passes, sizes, widths
from foresay.verifier.graphs.runner import GraphStepRunner
from foresay.verifier.model_runner import ModelRunner
from tests.same_tokens.heads import head_drafter
from tests.same_tokens.models import MakeDrafter, Pair, info_of, paged
from tests.same_tokens.runs import jobs_of
from tests.same_tokens.witness import Job
from tests.simulated.device import CURRENT, DEVICE, is_view, simulated
from tests.simulated.graph import captured
from tests.spec.grammars import Automaton
from tests.verifier.reading import load_decoder

TOKENS, PAGE_SIZE, LEVELS = 2048, 16, 4
#: Of a tree whose levels are all worth drafting, and its rows to be verified.
WORTH = replace(OPEN.limited(LEVELS), price=Price(0.0, [0.0] * OPEN.nodes, LEVELS))


#: Of a plan that was not weighed: a budget made it all the same.
_WHY = Why((CandidatePlan("", (0,), (), 1.0, 1.0, 0, 0.0),), ())


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


def engine_of(moved: Pair, make: MakeDrafter, shape: TreeShape, max_seqs: int, extra: bool) -> Engine:
    """An engine whose steps a budget plans, captured as the server captures it."""
    pool = PagePool(1 + TOKENS // PAGE_SIZE, PAGE_SIZE)
    verifier, model = paged(moved.target, pool), make(pool)
    models = [model] if isinstance(model, TreeDrafter) else []
    members = [Member.looking(NgramDrafter()), *(Member.model(one, DraftCost(0.05, 0.05, 0.01)) for one in models)]
    budget = Always(members, shape, extra)
    drafter = CombinedDrafter(budget)
    capture_all(verifier, drafter, model, shape, max_seqs)
    proposers = by_plan([(one, LEVELS) for one in models], True, verifier)
    made = buckets(verifier, proposers, captured, (sizes(max_seqs), widths(128, PAGE_SIZE)))
    return Engine(
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


def spent(engine: Engine) -> Spent:
    """What a step takes."""
    reads, CURRENT.launched = CURRENT.reads, Counter()
    engine.step()
    launched = {name: count for name, count in CURRENT.launched.items() if not is_view(name)}
    graphs, copies = (launched.pop(name, 0) for name in ("graph", "copy_"))
    return Spent(CURRENT.reads - reads, graphs, sum(launched.values()), copies)


def steps(engine: Engine, vocab_size: int, max_seqs: int, special: Mapping[str, Any] | None = None) -> Iterator[Spent]:
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


def decode(engine: Engine, jobs: Sequence[Job]) -> None:
    """Until all of these are decoding."""
    for job in jobs:
        engine.add(job.request())
    while len(engine.scheduler.running) < len(jobs) or any(s.pending for s in engine.scheduler.running):
        engine.step()


@pytest.fixture(scope="module")
def elsewhere(pair):
    """The pair on the simulated device."""
    made = pair("llama3", layers=2)
    directories = made.directory, made.draft_directory
    with simulated():
        return Pair(*directories, *(load_decoder(path, torch.float32, DEVICE) for path in directories))


@pytest.mark.parametrize(
    ("draft", "shape", "extra", "max_seqs", "usual"),
    [
        ("none", ROOT_ONLY, False, 1, ONCE),
        ("none", ROOT_ONLY, False, 8, ONCE),
        ("draft_model", TreeShape.chain(LEVELS), False, 1, ONCE),
        ("draft_model", WORTH, False, 1, ONCE),
        ("draft_model", WORTH, False, 4, ONCE),
        ("draft_model", TreeShape.chain(LEVELS), False, 8, ONCE),
        ("draft_model", WORTH, False, 16, ONCE._replace(copies=2)),  # some text has a new page
        ("eagle3", WORTH, False, 1, ONCE),
        ("draft_model", WORTH, True, 1, ONCE._replace(copies=2)),  # what was found too
    ],
)
def test_a_step_waits_so_often(pair, elsewhere, tmp_path: Path, draft, shape, extra, max_seqs, usual) -> None:
    if draft == "eagle3":
        head_drafter(draft, tmp_path, pair("llama3", layers=2).target, "dynamic")
    makers: dict[str, MakeDrafter] = {
        "none": lambda pool: None,
        "draft_model": lambda pool: elsewhere.draft_model(pool, dynamic=True),
    }
    with simulated():
        make = makers.get(draft) or head_drafter(draft, tmp_path, elsewhere.target, "dynamic")
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


@pytest.mark.parametrize(("drafts", "max_seqs"), [(False, 1), (True, 1), (True, 2)])
def test_what_requests_ask_is_the_same_step(elsewhere, drafts, max_seqs) -> None:
    """Of one text of several too."""
    with simulated():
        make: MakeDrafter = lambda pool: elsewhere.draft_model(pool, dynamic=True) if drafts else None  # noqa: E731
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
    ("shape", "usual"),
    [(ROOT_ONLY, (1, 2)), (TreeShape.chain(LEVELS), (2, LEVELS + 2)), (WORTH, (2, LEVELS + 2))],
)
def test_a_prompt_with_texts_is_one_pass(elsewhere, shape, usual) -> None:
    """In parts, each a graph: the levels of drafts, which the host reads, the pass, the samples and paths."""
    with simulated():
        make: MakeDrafter = lambda pool: elsewhere.draft_model(pool, dynamic=True) if shape.levels else None  # noqa: E731
        engine = engine_of(elsewhere, make, shape, 3, False)
        decode(engine, jobs_of(elsewhere.vocab_size, (9, 12), 60))
        for _ in range(3):
            engine.step()
        engine.add(replace(jobs_of(elsewhere.vocab_size, (101,), 4)[0], id="late").request())
        found = spent(engine)
    assert (found.waits, found.graphs) == usual
