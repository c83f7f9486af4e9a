"""Models with recurrent layers on the simulated device: states, records and commits never pass through the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

import pytest
import torch

from foresay.kvpaging import StatePages
from foresay.kvpaging.states import recurrent_state
from foresay.server.engine.build import build_engine
from foresay.server.engine.parameters import state_bytes, state_pages
from foresay.spec.engine import EngineCore
from foresay.spec.tree import ROOT_ONLY, TreeShape
from foresay.verifier.graphs.runner import GraphStepRunner
from foresay.verifier.model_runner import ModelRunner
from tests.heads.mtp import Mtp
from tests.poison import parts_of, poison_states
from tests.same_tokens import models
from tests.same_tokens.captured import captured_engine, copy, run_freely
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, jobs_of, maker, plain, replace_params, returning, whole
from tests.same_tokens.test_directories import config
from tests.same_tokens.witness import Job
from tests.simulated.device import Simulated, simulated
from tests.simulated.graph import assert_launched, captured
from tests.simulated.test_captured_steps import there
from tests.simulated.test_compilations import ready, serve
from tests.simulated.test_engine import build_there
from tests.simulated.test_waits import ONCE, WORTH, engine_of, steps

#: Prompts around the ends of pages, and where the convolution begins.
LENGTHS = (9, 1, 17, 33)
TREE = TreeShape.parse("3,2,1")


@pytest.fixture(scope="module")
def both(pair) -> tuple[Pair, Pair]:
    """A pair whose target has a layer that predicts, and the same on the device."""
    made = pair("qwen3_5")
    Mtp().put_beside(made.directory)
    return made, there(made)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [("qwen3_5", "dense"), ("qwen3_5", "recurrent"), ("qwen3_5", "truth"), ("lfm2", "copy"), ("falcon_h1", "copy")],
)
def test_the_same_tokens(pair, family, drafter) -> None:
    """Steps are captured whole, except with drafters on the host, and a draft model with states of its own. Texts come
    back: what was read of them is found."""
    made = pair(family)
    moved, (first, later, wanted) = there(made), returning(made)
    jobs = [*first, *later]
    if drafter == "dense":
        moved = replace(moved, draft=there(pair("llama3", layers=2)).draft)
    kinds = {"dense": "3,2,1", "recurrent": "4,4,2,2,1"}
    make = copy(moved) if drafter == "copy" else maker(moved, kinds.get(drafter, drafter), whole(jobs, wanted))
    shape, graphs = ROOT_ONLY if drafter == "none" else TREE, drafter in ("none", "copy", "dense")
    with simulated():
        engine = captured_engine(
            moved, make, shape, graphs=graphs, max_seqs=3, capture=captured, page_size=8, prefix=True, tokens=2048
        )
        texts = run_freely(engine, jobs)
    assert_same({job.id: wanted[job.id] for job in jobs}, texts)
    assert sum(texts[job.id].cached_tokens > 0 for job in later) >= 9
    if graphs:
        assert_launched(engine)


def states(engine: EngineCore, job: Job) -> dict[int, list[torch.Tensor]]:
    """A text's states, by how many tokens they include; what no row may read is NaN."""
    engine.add(job.request())
    store, found = cast(ModelRunner, engine.runner.verifier).store.states, {}
    assert store is not None
    while engine.has_work:
        engine.check()
        poison_states(store)
        sequence = engine._sequences.get(job.id)
        engine.step()
        if sequence is not None and (state := recurrent_state(sequence.table)) is not None and state.length:
            found[state.length] = [part.cpu() for part in parts_of(store, state)]
    return found


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "falcon_h1"])
def test_after_each_step_the_state_is_that_of_plain_decoding(pair, family) -> None:
    """Up to the products before it, which are torch's here; that commits have its bits, the kernels' tests show."""
    made = pair(family)
    (job,) = jobs_of(made.vocab_size, (13,), 60, ["warm"])
    alone = states(captured_engine(made, lambda pool: None, ROOT_ONLY, graphs=False, max_seqs=1), job)
    with simulated():
        moved = there(made)
        seen = states(captured_engine(moved, copy(moved), TREE, max_seqs=1, capture=captured, page_size=8), job)
    assert 10 < len(seen) < len(alone)
    for at, parts in seen.items():
        for mine, its in zip(parts, alone[at], strict=True):
            assert torch.allclose(mine, its, rtol=1e-4, atol=1e-5), f"after {at} tokens"


def test_a_stop_inside_an_accepted_path(both) -> None:
    """All drafts are right, and a text ends at every token in turn: then the device has advanced further than the text.
    It goes on from where it was, while another runs on alongside it."""
    made, moved = both
    (job, other) = jobs_of(made.vocab_size, (13, 9), 24, ["greedy", "warm"])
    texts = plain(made.target, [job, other])
    ends = [
        replace(job, id=f"{stop}", params=replace_params(job.params, stop_token_ids=(texts[job.id].tokens[stop],)))
        for stop in range(2, 12)
    ]
    wanted = plain(made.target, ends)
    again = [Job(f"{end.id} again", end.prompt + wanted[end.id].tokens + [7], job.params) for end in ends]
    wanted |= texts | plain(made.target, again)
    with simulated():
        copied = replace(moved, draft=moved.target)
        engine = captured_engine(
            copied, copy(copied), TreeShape.chain(4), max_seqs=2, capture=captured, page_size=8, prefix=True
        )
        for number, end in enumerate([*ends, *again]):
            found = run_freely(engine, [end, replace(other, id="other")])
            assert_same({end.id: wanted[end.id], "other": texts[other.id]}, found)
            assert number < len(ends) or found[end.id].cached_tokens


@pytest.mark.parametrize("max_seqs", [2, 3])
def test_texts_run_on_where_state_pages_are_few(pair, max_seqs, monkeypatch) -> None:
    """Then one has a page for the state after its path, but none for a boundary inside; or none, and is preempted. A
    prompt that is one pass needs two, or it waits."""
    made = pair("lfm2")
    moved, jobs = there(made), jobs_of(made.vocab_size, (9, 17, 6), 20)
    monkeypatch.setattr(models, "StatePages", lambda sequences, _, size: StatePages(sequences, 1 + 5, size))
    with simulated():
        engine = captured_engine(moved, copy(moved), TREE, max_seqs=max_seqs, capture=captured, page_size=8)
        assert_same(plain(made.target, jobs), run_freely(engine, jobs, careful=True))


@pytest.mark.parametrize(("drafts", "max_seqs"), [(False, 1), (True, 2)], ids=["plain", "two at once"])
def test_a_step_waits_once_and_launches_no_more(pair, both, drafts, max_seqs) -> None:
    """A graph, and two copies to the device: the state pages of the step, and how far trees may grow."""
    _, moved = both
    moved = replace(moved, draft=there(pair("llama3", layers=2)).draft)
    shape = WORTH if drafts else ROOT_ONLY
    with simulated():
        make = moved.draft_model if drafts else lambda pool: None
        engine = engine_of(moved, make, shape, max_seqs, False)
        found = list(steps(engine, moved.vocab_size, max_seqs))[2:]
    assert Counter(found).most_common(1)[0][0] == ONCE._replace(copies=1 + drafts), found
    assert max(each.waits for each in found) == 1, found


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["mtp", pytest.param("auto", marks=pytest.mark.soak)])
def test_engines_as_a_server_builds_them(both, draft, monkeypatch) -> None:
    made, _ = both
    jobs = [replace(job, arrives=3 * number) for number, job in enumerate(jobs_of(300, (9, 70, 33, 1), 16))]
    texts = plain(made.target, jobs)
    build_there(monkeypatch)
    settings = config(made.directory, draft, max_seqs=2)
    with simulated():
        engine = build_engine(settings)
        for _ in range(2):  # the second time prefixes are there
            assert_same(texts, run_freely(engine, jobs))
        assert engine.prefix is not None and engine.prefix.hits
    assert isinstance(engine.runner, GraphStepRunner)
    kept = cast(ModelRunner, engine.runner.verifier).store.states
    assert kept is not None and "recurrent states" in engine.info.memory
    planned = state_bytes(made.target.config, *state_pages(settings, True))
    assert sum(part.held.nbytes for part in cast(list[Simulated], kept.layers)) == planned


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "sequences"), [("none", 2), pytest.param("mtp", 3, marks=pytest.mark.soak)])
def test_nothing_is_compiled_while_a_server_answers(both, draft, sequences, monkeypatch) -> None:
    build_there(monkeypatch)
    settings = config(both[0].directory, draft, max_seqs=sequences, max_model_len=160, kv_tokens=1200)
    with ready(settings, monkeypatch, "replay_states") as (engine, late):
        serve(engine, sequences)
        assert not late()
