"""A training run: it learns, goes on after a kill as if nothing had been, and leaves nothing half-written."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foresay.drafters.training.run import Run, rate_at
from foresay.drafters.training.run_folder import RunFolder
from foresay.drafters.training.settings import Settings
from foresay.drafters.training.shapes import draft_vocabulary
from foresay.drafters.training.teacher import Teacher
from foresay.server.engine.build import build_engine
from foresay.spec.errors import ForesayError
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.reader import read_weights
from tests.same_tokens.runs import assert_same, jobs_of
from tests.same_tokens.test_directories import config, witnessed
from tests.same_tokens.witness import run as run_jobs
from tests.verifier.reading import load_decoder


@pytest.fixture(scope="module")
def teacher(target) -> Teacher:
    return Teacher(target, "cpu", torch.float32)


@pytest.fixture
def settings(target, prompts) -> Settings:
    return Settings("eagle3", str(target), str(prompts), 40, 24, 12, 4, 5e-3, 3, 0)


def of_kind(settings: Settings, kind: str) -> Settings:
    return replace(settings, kind=kind, layers=1 if kind == "dflash" else None)


def begun(settings: Settings, teacher: Teacher, out: Path) -> Run:
    return Run(settings, teacher, RunFolder(out, settings), progress=False)


@pytest.mark.parametrize("kind", ["medusa", "peagle"])
def test_a_trained_head_is_found_and_drafts(target, teacher, settings, tmp_path, kind) -> None:
    """Held-out loss falls with more steps; the folder loads by its own config; text stays what it was."""
    settings = of_kind(settings, kind)
    short = begun(replace(settings, steps=1), teacher, tmp_path / "short")().depths
    judged = begun(replace(settings, steps=24), teacher, tmp_path / "head")()
    depths = judged.depths
    assert judged.texts == 2 and 0 < judged.tokens <= 2 * 24
    assert len(depths) == 3
    assert all(ours.loss < first.loss for ours, first in zip(depths, short, strict=True))
    assert not (tmp_path / "head.work").exists()
    engine = witnessed(build_engine(config(target, str(tmp_path / "head"), draft_tree="3,2,1")))
    assert engine.drafter is not None
    assert engine.drafter.name == kind
    jobs = jobs_of(290, (9, 30, 20), 16)
    plain = witnessed(build_engine(config(target, "none")))
    assert_same(run_jobs(plain, jobs), run_jobs(engine, jobs))


def test_a_head_is_stored_as_its_target_is(target, settings, tmp_path) -> None:
    """In bf16 for a target in bf16, and read again it is bit for bit what was written."""
    copy = tmp_path / "bf16"
    shutil.copytree(target, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    run = begun(settings, Teacher(copy, "cpu", torch.float32), tmp_path / "head")
    run()
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert (tmp_path / "head" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    decoder = load_decoder(target, torch.bfloat16)
    config = HeadConfig.read(tmp_path / "head", decoder.config)
    weights = read_weights(tmp_path / "head", config, decoder)
    fused = weights.outside.matrices["fc"]
    assert isinstance(fused, torch.Tensor) and torch.equal(fused, stored["fc.weight"])
    assert torch.equal(weights.outside.vectors["model.norm.weight"], stored["norm.weight"])


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_of_few_tokens_drafts_those(target, teacher, settings, tmp_path, kind) -> None:
    few = replace(of_kind(settings, kind), vocabulary=60, steps=2)
    run = begun(few, teacher, tmp_path / "head")
    wrote = {token for text in run.texts() for token in text.tokens[text.start :].tolist()}
    run()
    stored = load_file(tmp_path / "head" / "model.safetensors")
    ids = torch.arange(60) + stored["d2t"]
    assert stored["lm_head.weight"].shape == (60, 64) and set(ids.tolist()) & wrote
    engine = witnessed(build_engine(config(target, str(tmp_path / "head"), draft_tree="3,2,1")))
    jobs = jobs_of(290, (9, 30), 16)
    assert_same(run_jobs(witnessed(build_engine(config(target, "none"))), jobs), run_jobs(engine, jobs))


def killed_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Every step is saved, and the one of this number is the last."""
    monkeypatch.setattr("foresay.drafters.training.run._SAVED_EVERY", -1.0)
    once = Run._step

    def dying(self, model, optimizer, batches, number):
        if number == step:
            raise KeyboardInterrupt
        return once(self, model, optimizer, batches, number)

    monkeypatch.setattr(Run, "_step", dying)


@pytest.mark.parametrize(
    "kind", ["medusa", *(pytest.param(each, marks=pytest.mark.soak) for each in ("eagle3", "dflash"))]
)
def test_a_run_that_was_killed_ends_with_the_same_weights(teacher, settings, tmp_path, monkeypatch, kind) -> None:
    settings = of_kind(settings, kind)
    begun(settings, teacher, tmp_path / "whole")()
    with monkeypatch.context() as patch:
        killed_at(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            begun(settings, teacher, tmp_path / "killed")()
    assert not (tmp_path / "killed").exists()
    (written,) = (tmp_path / "killed.work").glob("text-*.pt")
    age = written.stat().st_mtime_ns
    again = begun(settings, teacher, tmp_path / "killed")
    first: list[int] = []
    once = again._step

    def noted(model, optimizer, batches, step) -> float:
        first.append(step)
        return once(model, optimizer, batches, step)

    monkeypatch.setattr(again, "_step", noted)
    again.texts()
    assert written.stat().st_mtime_ns == age, "what the target wrote is kept"
    again()
    assert first == [7, 8, 9, 10, 11]
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    ours, theirs = load_file(tmp_path / "killed" / file), load_file(tmp_path / "whole" / file)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_draft_vocabulary_is_what_the_target_writes_most() -> None:
    written = torch.tensor([5, 5, 9, 2, 9, 5, 2, 5, 7])
    assert draft_vocabulary(written, 12, 12).tolist() == list(range(12))
    assert draft_vocabulary(written, 12, 3).tolist() == [2, 5, 9]


def test_the_rate_rises_then_falls() -> None:
    rates = [rate_at(step, 200) for step in range(200)]
    assert rates[0] < rates[10] < rates[19] == 1.0
    assert all(rates[i] > rates[i + 1] for i in range(20, 199))


def test_prompts_of_like_length_are_written_together(teacher, settings, tmp_path, monkeypatch) -> None:
    """So that little is filled up. Each prompt comes equally often."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{'the fox ' * count}\n" for count in (1, 9, 3, 5)))
    run = begun(replace(settings, prompts=str(path), samples=16, length=60, together=4), teacher, tmp_path / "head")
    written: list[set[tuple[int, ...]]] = []
    heat: list[float] = []
    once = teacher.write

    def noted(prompts, length, temperature, generator, notify):
        written.append({tuple(prompt) for prompt in prompts})
        heat.append(temperature)
        assert max(map(len, prompts)) <= 30
        return once(prompts, length, temperature, generator, notify)

    monkeypatch.setattr(teacher, "write", noted)
    assert len(run.texts()) == 16
    assert heat == [1.0, 0.0, 1.0, 0.0], "temperatures take turns"
    assert [len(batch) for batch in written] == [1, 1, 1, 1]
    assert len(set().union(*written)) == 4


def test_a_rate_that_is_too_high_is_named(teacher, settings, tmp_path, monkeypatch) -> None:
    run = begun(settings, teacher, tmp_path / "head")
    monkeypatch.setattr(run, "_step", lambda model, optimizer, batches, step: math.nan)
    with pytest.raises(ForesayError, match="step 1: the loss is nan; start again with a lower --rate"):
        run()
    assert not (tmp_path / "head").exists()


def test_a_state_that_does_not_fit_is_named(teacher, settings, tmp_path, monkeypatch) -> None:
    """Of whatever is wrong with it: the texts are kept, and it is made anew once it is removed."""
    with monkeypatch.context() as patch:
        killed_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            begun(settings, teacher, tmp_path / "head")()
    state = tmp_path / "head.work" / "state.pt"
    for value in ({"step": 3}, {"model": {}, "optimizer": {}, "step": 3}, [1]):
        torch.save(value, state)
        with pytest.raises(ForesayError, match=r"state\.pt: is damaged or cannot be read; remove it"):
            begun(settings, teacher, tmp_path / "head")()
    state.unlink()
    assert len(begun(settings, teacher, tmp_path / "head")().depths) == 3


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "draft_model"])
def test_two_texts_that_end_at_once_are_enough(teacher, settings, tmp_path, monkeypatch, kind) -> None:
    """One is held out, one learned from, each again and again until a row is full."""
    monkeypatch.setattr(Teacher, "_end_tokens", list(range(teacher.config.vocab_size)))
    (tmp_path / "p.txt").write_text("t\n")
    few = replace(settings, kind=kind, prompts=str(tmp_path / "p.txt"), samples=2, steps=2, layers=1, width=32)
    run = begun(few, teacher, tmp_path / "head")
    assert [len(text.tokens) for text in run.texts()] == [2, 2]
    assert all(math.isfinite(depth.loss) for depth in run().depths)
