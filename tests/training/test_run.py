"""A training run: it learns, goes on after a kill as if nothing had been, and leaves nothing half-written."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from server.build import build_engine
from server.cli import main
from server.training import files
from server.training.prompts import read_prompts
from server.training.run import Run, Settings, draft_vocabulary, rate_at
from server.training.teacher import Teacher
from spec.errors import ConfigurationError, ForesayError
from tests.same_tokens.runs import assert_same, jobs_of
from tests.same_tokens.test_directories import config, witnessed
from tests.same_tokens.witness import run
from tests.verifier.reading import load_decoder
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.eagle_weights import EagleWeights


@pytest.fixture(scope="module")
def teacher(target) -> Teacher:
    return Teacher(target, "cpu", torch.float32)


@pytest.fixture
def settings(target, prompts) -> Settings:
    return Settings("eagle3", str(target), str(prompts), 40, 24, 12, 4, 5e-3, 3, 0)


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_trained_head_is_found_and_drafts(target, teacher, settings, tmp_path, kind) -> None:
    """Held-out loss falls with more steps; the folder loads by its own config; text stays what it was."""
    short = Run(replace(settings, kind=kind, steps=1), teacher, tmp_path / "short", progress=False)()
    depths = Run(replace(settings, kind=kind, steps=60), teacher, tmp_path / "head", progress=False)()
    assert len(depths) == 3
    assert all(ours.loss < first.loss for ours, first in zip(depths, short, strict=True))
    assert not (tmp_path / "head.work").exists()
    engine = witnessed(build_engine(config(target, str(tmp_path / "head"), draft_tree="3,2,1")))
    assert engine.drafter is not None
    assert engine.drafter.name == kind
    jobs = jobs_of(290, (9, 30, 20), 16)
    plain = witnessed(build_engine(config(target, "none")))
    assert_same(run(plain, jobs), run(engine, jobs))


def test_a_head_is_stored_as_its_target_is(target, settings, tmp_path) -> None:
    """In bf16 for a target in bf16, and read again it is bit for bit what was written."""
    copy = tmp_path / "bf16"
    shutil.copytree(target, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    run = Run(settings, Teacher(copy, "cpu", torch.float32), tmp_path / "head", progress=False)
    run()
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert (tmp_path / "head" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    decoder = load_decoder(target, torch.bfloat16)
    config = EagleConfig.read(tmp_path / "head", decoder.config)
    weights = EagleWeights.read(tmp_path / "head", config, decoder)
    assert weights.fc is not None
    assert torch.equal(weights.fc, stored["fc.weight"])
    assert torch.equal(weights.down, stored["midlayer.mlp.down_proj.weight"])


def killed_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Every step is saved, and the one of this number is the last."""
    monkeypatch.setattr("server.training.run._SAVED_EVERY", -1.0)
    once = Run._step

    def dying(self, model, optimizer, texts, number):
        if number == step:
            raise KeyboardInterrupt
        return once(self, model, optimizer, texts, number)

    monkeypatch.setattr(Run, "_step", dying)


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_run_that_was_killed_ends_with_the_same_weights(teacher, settings, tmp_path, monkeypatch, kind) -> None:
    settings = replace(settings, kind=kind)
    Run(settings, teacher, tmp_path / "whole", progress=False)()
    with monkeypatch.context() as patch:
        killed_at(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            Run(settings, teacher, tmp_path / "killed", progress=False)()
    assert not (tmp_path / "killed").exists()
    (written,) = (tmp_path / "killed.work").glob("text-*.pt")
    age = written.stat().st_mtime_ns
    again = Run(settings, teacher, tmp_path / "killed", progress=False)
    first: list[int] = []
    once = again._step

    def noted(model, optimizer, texts, step) -> float:
        first.append(step)
        return once(model, optimizer, texts, step)

    monkeypatch.setattr(again, "_step", noted)
    again.texts()
    assert written.stat().st_mtime_ns == age, "what the target wrote is kept"
    again()
    assert first == [7, 8, 9, 10, 11]
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    ours, theirs = load_file(tmp_path / "killed" / file), load_file(tmp_path / "whole" / file)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_run_does_not_go_on_with_it(teacher, settings, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        killed_at(patch, 0)
        with pytest.raises(KeyboardInterrupt):
            Run(settings, teacher, tmp_path / "head", progress=False)()
    with pytest.raises(ConfigurationError, match=r"head\.work: belongs to a run with steps 12 instead of 13"):
        Run(replace(settings, steps=13), teacher, tmp_path / "head", progress=False)


def test_a_finished_head_is_not_overwritten(teacher, settings, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="holds a model already"):
        Run(settings, teacher, tmp_path, progress=False)


def test_a_full_disk_leaves_the_last_whole_state(tmp_path, monkeypatch) -> None:
    path = tmp_path / "state.pt"
    files.save(path, {"step": 1})
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 4 vs 8\nat 3")):

        def full(value, partial, error=error) -> None:
            Path(partial).write_bytes(b"half")
            raise error

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(ForesayError, match=r"state\.pt: cannot be written \((No space|unexpected pos 4 vs 8\))"):
            files.save(path, {"step": 2})
        assert torch.load(path, weights_only=True) == {"step": 1}
        assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


def test_the_draft_vocabulary_is_what_the_target_writes_most(monkeypatch) -> None:
    texts = torch.tensor([[5, 5, 9, 2], [9, 5, 2, 5]])
    assert draft_vocabulary(texts, 12).tolist() == list(range(12))
    monkeypatch.setattr("server.training.run._LARGEST_VOCABULARY", 3)
    assert draft_vocabulary(texts, 12).tolist() == [2, 5, 9]


def test_the_rate_rises_then_falls() -> None:
    rates = [rate_at(step, 200) for step in range(200)]
    assert rates[0] < rates[10] < rates[19] == 1.0
    assert all(rates[i] > rates[i + 1] for i in range(20, 199))


def test_prompts_of_like_length_are_written_together(teacher, settings, tmp_path, monkeypatch) -> None:
    """So that a short prompt does not cut the others short. Each prompt comes equally often."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{'the fox ' * count}\n" for count in (1, 9, 3, 5)))
    monkeypatch.setattr("server.training.run._WRITTEN_AT_ONCE", 4)
    run = Run(replace(settings, prompts=str(path), samples=16, length=60), teacher, tmp_path / "head", progress=False)
    written: list[set[tuple[int, ...]]] = []
    heat: list[float] = []
    once = teacher.write

    def noted(prompts, length, temperature, generator):
        written.append({tuple(prompt) for prompt in prompts})
        heat.append(temperature)
        assert max(map(len, prompts)) <= 30
        return once(prompts, length, temperature, generator)

    monkeypatch.setattr(teacher, "write", noted)
    assert len(run.texts()) == 16
    assert heat == [1.0, 0.0, 1.0, 0.0], "temperatures take turns"
    assert [len(batch) for batch in written] == [1, 1, 1, 1]
    assert len(set().union(*written)) == 4


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl, line 2: not valid JSON"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"text": "b"}\n', r'p\.jsonl, line 3: expected {"prompt": "\.\.\."}'),
        ("p.jsonl", "[1]\n", r"p\.jsonl, line 1: expected"),
        ("p.txt", "\n \n", r"p\.txt: holds no prompt"),
        (".", "", r"holds no prompt \(files end in \.txt or \.jsonl\)"),
        ("missing.txt", None, r"missing\.txt: cannot be read \(No such file or directory\)"),
    ],
)
def test_bad_prompts_are_named(tmp_path, name, text, said) -> None:
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read_prompts(tmp_path / name)


def test_prompts_are_read_from_folders_and_chats(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    chat = [{"role": "user", "content": "hi"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"prompt": "three"}))
    assert read_prompts(tmp_path) == ["one", "two", chat, "three"]


def test_the_command_trains_and_says_how_good_the_head_is(target, prompts, tmp_path, capsys) -> None:
    words = f"train medusa --target {target} --prompts {prompts} --out {tmp_path}/head --samples 30 --length 20"
    assert main([*words.split(), "--steps", "3", "--batch", "4", "--depth", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["depth", "accepted", "at", "T=0", "at", "T=1", "cross-entropy"]
    assert [line.split()[0] for line in out[1:]] == ["1", "2"]
    assert (tmp_path / "head" / "config.json").exists()


@pytest.mark.parametrize(
    ("extra", "status", "said"),
    [
        ("--length 600", 2, "--length must be above 12 and at most 512"),
        ("--prompts /nowhere.txt", 2, "/nowhere.txt: cannot be read"),
        ("--target /nowhere", 1, "/nowhere: no such directory"),
        pytest.param(
            "--device cuda",
            2,
            "--device cuda: this machine has no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(target, prompts, tmp_path, capsys, extra, status, said) -> None:
    words = f"train medusa --target {target} --prompts {prompts} --out {tmp_path}/head {extra}"
    assert main(words.split()) == status
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("foresay")]
    assert len(err) == 1
    assert said in err[0]
    assert not (tmp_path / "head").exists()
