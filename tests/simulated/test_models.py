"""Models of every kind of layer on the simulated device: latents, embeddings of layers, experts, recurrent states,
windows and rotations never pass through the host, steps are captured whole, and nothing is compiled while a server
answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from foresay.spec.tree import ROOT_ONLY, TreeShape
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.heads.mtp import Mtp
from tests.same_tokens.captured import captured_engine, copy, draft_model, run_freely
from tests.same_tokens.models import Pair, make_pair
from tests.same_tokens.runs import assert_same, jobs_of, maker, plain, returning, whole
from tests.same_tokens.test_directories import config
from tests.simulated.device import simulated
from tests.simulated.graph import assert_launched, captured
from tests.simulated.test_captured_steps import there
from tests.simulated.test_compilations import ready, serve
from tests.simulated.test_engine import build_there
from tests.simulated.test_mixtures import short_of_room
from tests.simulated.test_waits import ONCE, WORTH, engine_of, steps

TREE, LENGTHS = TreeShape.parse("3,2,1"), (9, 1, 17, 33)
LAYERS = {"gemma4_embedded": 4, "llama3": 2}


@pytest.fixture(scope="module")
def both(pair, tmp_path_factory) -> Callable[[str], tuple[Pair, Pair]]:
    """Pairs by family, and the same on the device. "latents": all layers are dense, queries come through a narrower
    input; qwen3_5's target has a layer that predicts."""

    @cache
    def made(family: str) -> tuple[Pair, Pair]:
        if family == "latents":
            shape = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
            here = make_pair("deepseek_v3", tmp_path_factory.mktemp(family), torch.float32, **shape)
        else:
            here = pair(family, layers=LAYERS.get(family, 2 if family in DIFFERENT else 3))
        if family == "qwen3_5":
            Mtp().put_beside(here.directory)
        return here, there(here)

    return made


#: Of two kinds of layers with windows in pages of their own; without positions and with parts of heads that turn.
DIFFERENT = ("gemma3", "smollm3", "phi4_mini", "hunyuan", "gemma2", "granite_swa", "olmo3", "ministral3", "cohere2",
             "nemotron", "muse_glimmer")  # fmt: skip
soak = pytest.mark.soak
#: A family, who drafts, and whether texts come back. Steps are captured whole, except with drafters on the host and a
#: draft model with states of its own.
CASES: list[Any] = [
    ("latents", "none", False), ("latents", "copy", False),
    ("gemma4_embedded", "none", False), ("gemma4_embedded", "copy", False),
    ("qwen3_moe", "copy", False), ("glm4_moe", "none", False), ("gpt_oss", "copy", False),
    *(pytest.param(each, "copy", False, marks=soak) for each in ("qwen3_5_moe", "deepseek_v3", "gemma4_moe")),
    ("qwen3_5", "dense", True), ("qwen3_5", "4,4,2,2,1", True), ("qwen3_5", "truth", True), ("lfm2", "copy", True),
    ("falcon_h1", "copy", True),
    *(pytest.param(each, "draft_model", False, marks=[soak] * (at > 3)) for at, each in enumerate(DIFFERENT)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "drafter", "back"), CASES)
def test_the_same_tokens(both, family, drafter, back) -> None:
    """A mixture's step brings how many experts it woke: one row as many as it chooses, padding none."""
    made, moved = both(family)
    if back:
        first, later, wanted = returning(made)
    else:
        first, later = jobs_of(made.vocab_size, LENGTHS, 24), []
        wanted = plain(made.target, first)
    jobs = [*first, *later]
    if drafter == "dense":
        moved = replace(moved, draft=both("llama3")[1].draft)
    own = {"copy": copy, "dense": draft_model, "draft_model": draft_model}.get(drafter)
    make = maker(moved, drafter, whole(jobs, wanted)) if own is None else own(moved)
    shape, graphs = ROOT_ONLY if drafter == "none" else TREE, own is not None or drafter == "none"
    more: dict[str, Any] = {"graphs": graphs, "windows": 24 if family == "gemma3" else 0, "prefix": back}
    with simulated():
        engine = captured_engine(moved, make, shape, max_seqs=3, capture=captured, page_size=8, tokens=2048, **more)
        texts = run_freely(engine, jobs, careful=family == "latents")
        assert_same({job.id: wanted[job.id] for job in jobs}, texts)
        assert not back or sum(texts[job.id].cached_tokens > 0 for job in later) >= 9
        if graphs:
            assert_launched(engine)
        if (experts := made.target.config.stack.experts) is not None:
            engine.add(replace(jobs[0], id="one").request())
            traces = [engine.trace for _ in iter(lambda: engine.has_work and engine.step(), False)]
            woken = [trace.woken for trace in traces if trace is not None and not trace.prefill_rows]
            assert experts.top_k <= min(woken) and max(woken) <= experts.count
            assert (max(woken) > experts.top_k) == (drafter == "copy")


@pytest.mark.parametrize(
    ("family", "drafts", "max_seqs"),
    [("latents", False, 2), ("qwen3_moe", False, 2), ("qwen3_moe", True, 2), ("qwen3_5", False, 1),
     ("qwen3_5", True, 2)],
)  # fmt: skip
def test_a_step_waits_once_and_launches_no_more(both, family, drafts, max_seqs) -> None:
    """A graph, and copies to the device: where recurrent states of the step are, and how far trees may grow."""
    moved = replace(both(family)[1], draft=both("llama3")[1].draft)
    with simulated():
        make = moved.draft_model if drafts else lambda pool: None
        engine = engine_of(moved, make, WORTH if drafts else ROOT_ONLY, max_seqs, False)
        found = list(steps(engine, moved.vocab_size, max_seqs))[2:]
    assert Counter(found).most_common(1)[0][0] == ONCE._replace(copies=(family == "qwen3_5") + drafts), found
    assert max(each.waits for each in found) == 1, found


#: A family, what a server drafts with, whether the device lacks room, and kernels that are compiled before it is ready.
SERVED: list[Any] = [
    ("latents", "none", False, ("head_tiles", "join_latent_rows", "tree_partials", "chunk_rows")),
    ("qwen3_moe", "none", True, ("expert_tiles",)),
    pytest.param("qwen3_moe", "none", False, ("expert_tiles",), marks=soak),
    ("qwen3_5", "none", False, ("replay_states",)),
    pytest.param("qwen3_5", "mtp", False, ("replay_states",), marks=soak),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "draft", "away", "kernels"), SERVED)
def test_nothing_is_compiled_while_a_server_answers(both, family, draft, away, kernels, monkeypatch) -> None:
    build_there(monkeypatch)
    settings = config(both(family)[0].directory, draft, max_seqs=2, max_model_len=160, kv_tokens=1200)
    if away:
        short_of_room(monkeypatch, settings)
    with ready(settings, monkeypatch, *kernels) as (engine, late):
        serve(engine, 2)
        assert not late()
    assert isinstance(engine.runner, GraphStepRunner) and "workspace" in engine.info.memory
