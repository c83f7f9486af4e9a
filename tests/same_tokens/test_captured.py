"""The same tokens from captured steps: with graphs and without, ahead of the host and not, plain and with any tree."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from foresay.drafters.draft_model import DraftModelDrafter
from foresay.kvpaging import PagePool
from foresay.spec.protocols import Drafter
from foresay.spec.tree import ROOT_ONLY, TreeShape
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.same_tokens import options
from tests.same_tokens.captured import captured_engine, copy, draft_model, run_freely
from tests.same_tokens.models import Pair, paged
from tests.same_tokens.runs import assert_same, jobs_of
from tests.same_tokens.witness import Job, Text

LENGTHS = (9, 2, 17, 33, 5, 40)
SHAPES = {
    "": ROOT_ONLY,
    "chain1": TreeShape.chain(1),
    "chain4": TreeShape.chain(4),
    "chain5": TreeShape.chain(5),
    "3,2,1": TreeShape.parse("3,2,1"),
    "1,3,3": TreeShape.parse("1,3,3"),
    "largest": TreeShape.parse("6,14,18,14,8,3"),
}


@cache
def expected(pair: Pair, max_tokens: int = 14) -> dict[str, Text]:
    """Each request alone, plain, op by op."""
    engine = captured_engine(pair, lambda pool: None, ROOT_ONLY, graphs=False, max_seqs=1)
    return run_freely(engine, jobs_of(pair.vocab_size, LENGTHS, max_tokens), careful=True)


def check(pair: Pair, drafter, shape: TreeShape, careful: bool = False, max_tokens: int = 14, **how):
    """Run the requests; returns the engine's runner and the texts."""
    engine = captured_engine(pair, drafter, shape, **how)
    texts = run_freely(engine, jobs_of(pair.vocab_size, LENGTHS, max_tokens), careful)
    assert_same(expected(pair, max_tokens), texts)
    return engine.runner, texts


def accepted(texts: dict[str, Text]) -> int:
    return sum(text.statistics.accepted for text in texts.values() if text.statistics is not None)


def nobody(pair: Pair):
    return lambda pool: None


#: Who drafts, for which target, in which shape, and what the engine is like. In few pages sequences are preempted and
#: come back; steps do without running ahead where there is no page for it.
CASES: list[tuple[Any, str, str, dict[str, Any]]] = [
    (draft_model, "llama3", "chain1", {"max_seqs": 3}),
    (draft_model, "qwen2_window", "chain5", {"max_seqs": 1, "careful": True}),
    (draft_model, "llama3", "3,2,1", {"max_seqs": 3, "careful": True}),
    (draft_model, "qwen2_window", "1,3,3", {"max_seqs": 3, "careful": True}),
    (draft_model, "llama3", "largest", {"max_seqs": 1}),
    (copy, "llama3", "chain5", {"max_seqs": 3, "careful": True}),
    (copy, "qwen2_window", "3,2,1", {"max_seqs": 3, "careful": True}),
    (copy, "llama3", "largest", {"max_seqs": 1}),
    (nobody, "llama3", "", {"max_seqs": 1}),
    (nobody, "llama3", "", {"max_seqs": 4}),
    (draft_model, "llama3", "chain4", {"graphs": False}),
    (draft_model, "llama3 in bf16", "chain4", {}),
    (draft_model, "llama3", "3,2,1", {"page_size": 8}),
    (draft_model, "llama3", "3,2,1", {"page_size": 32}),
    (draft_model, "llama3", "chain4", {"tokens": 176, "page_size": 8, "prefix": True}),
    (copy, "llama3", "chain4", {"tokens": 176, "page_size": 8, "prefix": True}),
]


@pytest.mark.parametrize(
    ("drafter", "target", "shape", "how"), CASES, ids=lambda case: getattr(case, "__name__", str(case))
)
def test_every_shape_in_every_engine(pair, drafter, target, shape, how) -> None:
    family, _, narrow = target.partition(" in ")
    made = pair(family, torch.bfloat16 if narrow else torch.float32, layers=2)
    runner, texts = check(made, drafter(made), SHAPES[shape], max_tokens=24, **how)
    assert how.get("graphs") is False or runner.counts["launched"] >= (1 if "tokens" in how else 5)
    assert drafter is nobody or accepted(texts) > 10


@pytest.mark.parametrize("shape", ["chain4", "3,2,1"])
@pytest.mark.parametrize("right", [True, False])
def test_a_draft_model_of_another_vocabulary(pair, shape, right) -> None:
    """Its ids are its own; if the maps are wrong, so are the drafts, and the text is the same."""
    made = pair("llama3", layers=2)
    ids = torch.arange(made.vocab_size)
    own = ids if right else ids.flip(0)

    def translated(pool: PagePool) -> Drafter:
        return DraftModelDrafter(paged(made.draft, pool), read=ids, token_ids=own)

    _, texts = check(made, translated, SHAPES[shape])
    assert (accepted(texts) > 10) == right


def test_a_step_runs_ahead_and_few_are_dropped(pair) -> None:
    """One for each text at its end, and one where a prompt comes in between."""
    made = pair("llama3", layers=2)
    runner, texts = check(made, draft_model(made), TreeShape.chain(4), max_seqs=1, max_tokens=30)
    assert runner.counts["dropped"] <= 2 * len(texts)
    assert runner.counts["launched"] > 4 * runner.counts["dropped"]


def test_a_step_runs_ahead_where_a_request_wants_shorter_drafts(pair) -> None:
    made = pair("llama3", layers=2)
    engine, request = captured_engine(made, draft_model(made), TreeShape.chain(4)), jobs_of(300, (9,), 30)[0].request()
    request.most_drafted, ahead = 2, list[int]()
    engine.add(request)
    while engine.has_work:
        engine.step()
        ahead += map(engine.runner.ahead, engine.scheduler.running)
    assert any(ahead)


def test_cancelled_and_new_requests_while_a_step_runs_ahead(pair) -> None:
    made = pair("llama3", layers=2)
    engine = captured_engine(made, draft_model(made), TreeShape.chain(4))
    jobs = jobs_of(made.vocab_size, LENGTHS, 30)
    texts = {job.id: Text() for job in jobs}
    for job in jobs[:3]:
        engine.add(job.request())
    for step in range(200):
        if step == 6:
            engine.cancel(jobs[0].id)
        if step == 8:
            for job in jobs[3:]:
                engine.add(job.request())
        for delta in engine.step():
            texts[delta.id].add(delta)
        if not engine.has_work:
            break
    engine.check()
    assert texts[jobs[0].id].finish_reason == "cancelled"
    assert_same(expected(made, 30), texts)


@cache
def jobs_and_texts(pair: Pair) -> tuple[list[Job], dict[str, Text]]:
    """Requests with every pair of options, and what they come to step by step."""
    jobs = [job for group in options.jobs(pair.vocab_size, 14).values() for job in group]
    return jobs, run_freely(captured_engine(pair, lambda pool: None, ROOT_ONLY, graphs=False, max_seqs=1), jobs)


@pytest.mark.parametrize(("shape", "drafter", "max_seqs"), [("", nobody, 3), ("3,2,1", draft_model, 1)])
def test_what_requests_ask_of_logits(pair, shape, drafter, max_seqs) -> None:
    """The host edits them, and reads them, between the two parts of a step: of one text, and of several plain ones."""
    made = pair("llama3", layers=2)
    engine = captured_engine(made, drafter(made), SHAPES[shape], max_seqs=max_seqs)
    jobs, wanted = jobs_and_texts(made)
    assert_same(wanted, run_freely(engine, jobs))
    assert isinstance(engine.runner, GraphStepRunner)
    assert engine.runner.counts["launched"] > 50


@pytest.mark.parametrize(("shape", "max_seqs"), [("3,2,1", 3), ("largest", 1)])
def test_trees_that_grow_by_their_chances(pair, shape, max_seqs) -> None:
    """Their nodes are cut from all candidates on the device; the host learns from one copy of what was looked at."""
    made = pair("llama3", layers=2)
    drafters = list[DraftModelDrafter]()

    def growing(pool: PagePool) -> Drafter:
        drafters.append(made.draft_model(pool))
        return drafters[0]

    runner, texts = check(made, growing, SHAPES[shape], careful=True, max_seqs=max_seqs, max_tokens=24)
    assert isinstance(runner, GraphStepRunner) and runner.counts["launched"] >= 5
    assert accepted(texts) > 10
    assert any(counts.shift for counts in drafters[0].calibration._firsts), "it has seen what came"
