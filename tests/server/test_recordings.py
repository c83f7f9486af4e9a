"""What a CPU records is in the memory plan, and is recorded before the first request."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from foresay.drafters import levels
from foresay.drafters.combined import members_of
from foresay.drafters.proposer import on_device
from foresay.server.engine import memory
from foresay.server.engine.build import build_engine
from foresay.server.engine.memory import recorded_bytes
from foresay.server.settings.config import EngineConfig
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier import model_runner
from foresay.verifier.model_runner import ModelRunner


@pytest.mark.parametrize(("draft", "tree"), [("auto", None), ("eagle3", "3,2,1"), ("none", None)])
def test_what_a_busy_engine_records_was_planned(draft, tree, monkeypatch) -> None:
    planned: list[int] = []

    def noted(*asked: Any) -> int:
        planned.append(recorded_bytes(*asked))
        return planned[-1]

    monkeypatch.setattr(memory, "recorded_bytes", noted)
    config = EngineConfig(
        draft=draft, draft_tree=tree, device="cpu", max_seqs=6, max_model_len=512, kv_tokens=4096, prefix_cache=False
    )
    engine = build_engine(config)
    assert engine.info.footprint is not None and "recordings" in engine.info.memory
    for number in range(6):
        params = SamplingParams(max_tokens=12 + 2 * number, seed=number, prompt_logprobs=0 if number == 3 else None)
        engine.add(Request(id=str(number), prompt=list(range(5, 300 + number)), params=params))
    while engine.has_work:
        engine.step()
    verifier = engine.runner.verifier
    assert isinstance(verifier, ModelRunner)
    drafting = [made for made in map(on_device, members_of(engine.drafter).values()) if made is not None]
    own = [model for made in drafting if isinstance(model := getattr(made, "model", None), ModelRunner)]
    held = verifier.recorded_bytes + sum(made.recorded_bytes for made in drafting) + sum(m.recorded_bytes for m in own)
    assert 0 < held <= planned[-1] < 8 * held


@pytest.mark.parametrize("draft", ["none", "auto"])
def test_no_pass_of_a_model_is_recorded_in_mid_stream(draft, monkeypatch) -> None:
    """In batches of 1 to 16, a text as long as may be, and a prompt that is read while others are written."""
    engine = build_engine(EngineConfig(draft=draft, device="cpu", max_seqs=16, max_model_len=1024, kv_tokens=4096))
    monkeypatch.setattr(model_runner, "recorded", lambda work: pytest.fail("a pass was recorded"))
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


def test_the_first_request_records_no_drafts(monkeypatch) -> None:
    engine = build_engine(EngineConfig(draft="auto", device="cpu", max_model_len=1024, kv_tokens=4096))
    monkeypatch.setattr(levels, "recorded", lambda work: pytest.fail("levels were recorded"))
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=60, seed=1, temperature=temperature, ignore_eos=True)
        engine.add(Request(id=str(temperature), prompt=list(range(5, 30)), params=params))
        drafted = 0
        while engine.has_work:
            engine.step()
            drafted += engine.trace.drafted if engine.trace else 0
        assert drafted
