"""A model with latent attention on the simulated device: its pages have keys alone, and steps are captured whole."""

from __future__ import annotations

import pytest
import torch

from foresay.spec.tree import ROOT_ONLY, TreeShape
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.same_tokens.captured import captured_engine, copy, run_freely
from tests.same_tokens.models import Pair, make_pair
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.test_directories import config
from tests.simulated.device import simulated
from tests.simulated.graph import assert_launched, captured
from tests.simulated.test_captured_steps import there
from tests.simulated.test_compilations import ready, serve
from tests.simulated.test_engine import build_there
from tests.simulated.test_waits import ONCE, WORTH, engine_of, steps

TREE = TreeShape.parse("3,2,1")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Pair, Pair]:
    """A pair whose layers are all dense, with queries through a narrower input; and the same on the device."""
    directory = tmp_path_factory.mktemp("latents")
    made = make_pair("deepseek_v3", directory, torch.float32, num_hidden_layers=2, first_k_dense_replace=2)
    return made, there(made)


@pytest.mark.parametrize(("make", "shape"), [(None, ROOT_ONLY), (copy, TREE)])
def test_the_same_tokens(both, make, shape) -> None:
    made, moved = both
    jobs = jobs_of(made.vocab_size, (9, 2, 17, 33), 24)
    with simulated():
        drafter = (lambda pool: None) if make is None else make(moved)
        engine = captured_engine(moved, drafter, shape, max_seqs=3, capture=captured, page_size=8, prefix=True)
        texts = run_freely(engine, jobs, careful=True)
    assert_same(plain(made.target, jobs), texts)
    assert_launched(engine)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_waits_once_and_is_launched_once(both, drafts) -> None:
    moved = both[1]
    with simulated():
        make = moved.draft_model if drafts else lambda pool: None
        engine = engine_of(moved, make, WORTH if drafts else ROOT_ONLY, 2, False)
        found = list(steps(engine, moved.vocab_size, 2))[2:]
    assert {each._replace(copies=1) for each in found} == {ONCE}, found


@pytest.mark.slow
def test_nothing_is_compiled_while_a_server_answers(both, monkeypatch) -> None:
    """The heads' products, joined queries and keys, and attention among what is compiled before."""
    build_there(monkeypatch)
    settings = config(both[0].directory, "none", max_seqs=2, max_model_len=160, kv_tokens=1200)
    kernels = "head_tiles", "join_latent_rows", "tree_partials", "chunk_rows"
    with ready(settings, monkeypatch, *kernels) as (engine, late):
        serve(engine, 2)
        assert not late()
    assert isinstance(engine.runner, GraphStepRunner) and "workspace" in engine.info.memory
