"""What a CPU records is in the memory plan, and is recorded before the first request."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foresay.drafters import eagle, hidden_states, levels
from foresay.drafters.combined import members_of
from foresay.drafters.proposer import on_device
from foresay.server.engine import memory
from foresay.server.engine.build import build_engine
from foresay.server.engine.memory import recorded_bytes
from foresay.server.engine.parameters import state_bytes
from foresay.server.settings.config import EngineConfig
from foresay.spec.budget import cost
from foresay.spec.protocols import FeatureRequest
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier import model_runner
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.kernels.cpu.launch import Recording
from tests.heads.mtp import Mtp
from tests.verifier.families import make
from tests.verifier.reading import Reader, load_decoder


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of recurrent layers and one that predicts, which can draft for itself."""
    made = tmp_path_factory.mktemp("qwen3_5")
    make("qwen3_5", made, max_position_embeddings=1024)
    Mtp().put_beside(made)
    return made


def held(before: Sequence[Recording] = ()) -> list[Recording]:
    """All recordings that there are, except these."""
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, Recording) and all(one is not each for each in before)]


def noted(of: Callable[..., int], to: list[int], *asked: Any) -> int:
    """What a function returns, also appended to a list."""
    to.append(of(*asked))
    return to[-1]


@pytest.mark.parametrize(
    ("draft", "tree"),
    [
        ("auto", None),
        ("eagle3", "3,2,1"),
        ("none", None),
        ("itself,mtp", None),
        ("draft_model > self:int8", None),
        *(
            pytest.param(each, None, marks=pytest.mark.soak)
            for each in ("self:int8,itself", "eagle3,eagle3 > self:int8")
        ),
    ],
)
def test_what_a_busy_engine_records_was_planned(recurrent, draft, tree, monkeypatch) -> None:
    """Recurrent states, those of a draft model too, are as large as planned."""
    planned, states = list[int](), list[int]()
    monkeypatch.setattr(memory, "recorded_bytes", partial(noted, recorded_bytes, planned))
    monkeypatch.setattr(memory, "state_bytes", partial(noted, state_bytes, states))
    sizes: dict[str, Any] = {"max_seqs": 6, "max_model_len": 512, "kv_tokens": 4096, "prefix_cache": False}
    if "itself" in draft:
        sizes["target"] = str(recurrent)
    config = EngineConfig(draft=draft.replace("itself", str(recurrent)), draft_tree=tree, device="cpu", **sizes)
    before = held()
    engine = build_engine(config)
    assert engine.info.footprint is not None and "recordings" in engine.info.memory
    for number in range(6):
        params = SamplingParams(max_tokens=12 + 2 * number, seed=number, prompt_logprobs=0 if number == 3 else None)
        engine.add(Request(id=str(number), prompt=[n % 300 for n in range(5, 300 + number)], params=params))
    while engine.has_work:
        engine.step()
    while engine.prepare_one():
        pass
    verifier = engine.runner.verifier
    assert isinstance(verifier, ModelRunner)
    drafting = [made for made in map(on_device, members_of(engine.drafter).values()) if made is not None]
    own = [model for made in drafting if isinstance(model := getattr(made, "model", None), ModelRunner)]
    recorded = sum(room.size for one in held(before) for room in one._arenas)
    assert 0 < recorded <= planned[-1] < 8 * recorded
    stores = {store for model in (verifier, *own) if (store := model.store.states) is not None}
    assert sum(states) == sum(part.nbytes for store in stores for part in store.layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_are_planned_by_their_dtype(dtype, tmp_path, monkeypatch) -> None:
    """What attention adds up is fp32, all else as wide as the engine computes: of heads as DeepSeek-V2-Lite's."""
    planned = list[int]()
    heads: dict[str, Any] = {"num_attention_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    make("deepseek_v2", tmp_path, **heads, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=3)
    monkeypatch.setattr(memory, "recorded_bytes", partial(noted, recorded_bytes, planned))
    limits: dict[str, Any] = {"max_seqs": 2, "max_model_len": 512, "kv_tokens": 1024}
    before = held()
    engine = build_engine(EngineConfig(target=str(tmp_path), draft="none", device="cpu", dtype=dtype, **limits))
    while engine.prepare_one():
        pass
    engine.add(Request(id="", prompt=[token % 300 for token in range(400)], params=SamplingParams(max_tokens=2)))
    while engine.has_work:
        engine.step()
    recorded = sum(room.size for one in held(before) for room in one._arenas)
    assert recorded <= planned[-1] < 1.3 * recorded, (recorded, planned)


def test_a_pass_that_returns_features_does_where_none_are_wanted(recurrent) -> None:
    """It is not recorded again without them."""
    reader = Reader(load_decoder(recurrent))
    for features in (FeatureRequest(final=True), None):
        reader.model.run([reader.rows(reader.open(), [1, 2, 3])], features)
    assert len([made for made in reader.model._replayed.values() if made]) == 1


@pytest.mark.parametrize(("draft", "tree"), [("auto", None), ("draft_model", "3,2,1"), ("eagle3", "3,2,1")])
def test_nothing_is_recorded_in_mid_stream(draft, tree, monkeypatch) -> None:
    """In batches of 1 to 16, a text as long as may be, and a prompt that is read while others are written: once a
    request was served and nobody asked for a while."""
    limits: dict[str, Any] = {"max_seqs": 16, "max_model_len": 1024, "kv_tokens": 4096}
    engine = build_engine(EngineConfig(draft=draft, draft_tree=tree, device="cpu", **limits))
    while engine.prepare_one():
        pass
    for module in (model_runner, levels, eagle):
        monkeypatch.setattr(module, "recorded", lambda work: pytest.fail(f"{work} was recorded"))
    for count, length in ((1, 900), (2, 9), (4, 9), (8, 9), (16, 9)):
        for number in range(count):
            params = SamplingParams(max_tokens=24, seed=number, ignore_eos=True)
            engine.add(Request(id=f"{count} {number}", prompt=list(range(5, 5 + length)), params=params))
        for step in itertools.count():
            if step == 6:
                engine.add(Request(id=f"late {count}", prompt=list(range(5, 905)), params=SamplingParams(max_tokens=2)))
            if not engine.has_work:
                break
            engine.step()
        monkeypatch.setattr(hidden_states, "recorded", lambda work: pytest.fail(f"{work} was recorded"))


def test_the_first_request_records_no_drafts(monkeypatch) -> None:
    engine = build_engine(EngineConfig(draft="auto", device="cpu", max_model_len=1024, kv_tokens=4096))
    assert engine.scheduler.budget is not None
    engine.scheduler.budget.timed = False  # a busy machine's steps may say that no draft pays
    monkeypatch.setattr(cost.Pace, "learn", lambda *taken: None)
    monkeypatch.setattr(levels, "recorded", lambda work: pytest.fail("levels were recorded"))
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=60, seed=1, temperature=temperature, ignore_eos=True)
        engine.add(Request(id=str(temperature), prompt=list(range(5, 30)), params=params))
        drafted = 0
        while engine.has_work:
            engine.step()
            drafted += engine.trace.drafted if engine.trace else 0
        assert drafted
