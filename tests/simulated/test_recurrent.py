"""Models with recurrent layers on the simulated device: states, records and commits never pass through the host."""

from __future__ import annotations

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
from tests.same_tokens.runs import assert_same, jobs_of, plain, replace_params
from tests.same_tokens.test_directories import config
from tests.same_tokens.witness import Job
from tests.simulated.device import Simulated, simulated
from tests.simulated.graph import captured
from tests.simulated.test_captured_steps import there
from tests.simulated.test_engine import build_there

TREE = TreeShape.parse("3,2,1")


@pytest.fixture(scope="module")
def both(pair) -> tuple[Pair, Pair]:
    """A pair whose target has a layer that predicts, and the same on the device."""
    made = pair("qwen3_5")
    Mtp().put_beside(made.directory)
    return made, there(made)


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
