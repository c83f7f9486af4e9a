"""``foresay train``: what it prints, and the one line that names what it cannot do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.drafters.training.teacher import Teacher
from foresay.server.cli.main import main


@pytest.mark.parametrize(
    ("kind", "extra", "rows"), [("medusa", "--depth 2", ["1", "2"]), ("draft", "--width 32", ["any"])]
)
def test_the_command_trains_and_prints_how_good_it_is(target, prompts, tmp_path, capsys, kind, extra, rows) -> None:
    words = f"train {kind} --target {target} --prompts {prompts} --out {tmp_path}/my-own --samples 30 --length 20"
    assert main([*words.split(), "--steps", "3", "--batch", "4", *extra.split()]) == 0
    shown = capsys.readouterr()
    out = shown.out.splitlines()
    assert re.fullmatch(r"judged on 2 texts \(\d+ tokens\) that it did not learn from", out[0])
    assert out[1].split() == ["depth", "accepted", "at", "T=0", "at", "T=1", "cross-entropy"]
    assert [line.split()[0] for line in out[2:]] == rows
    config = json.loads((tmp_path / "my-own" / "config.json").read_text())
    if kind != "draft":
        both = zip(config["acceptance"]["greedy"], config["acceptance"]["sampled"], strict=True)
        assert [[f"{share:.1%}" for share in shares] for shares in both] == [line.split()[1:3] for line in out[2:]]
    draft = f"{tmp_path}/my-own" if kind == "draft" else f"{kind}:{tmp_path}/my-own"
    assert shown.err.splitlines() == [
        f"saved in {tmp_path}/my-own",
        f"use it:      foresay serve {target} --draft {draft}",
        f"measure it:  foresay bench {target} --draft {draft}",
    ]


def test_threads_sleep_while_they_wait_for_each_other(target, prompts, tmp_path) -> None:
    """With other programs running, spinning takes most of the time. OpenMP reads the variable as torch is imported."""
    words = f"train draft --target {target} --prompts {prompts} --out {tmp_path}/d --depth 3"  # refused, after torch
    code = (
        f"import os, sys; from foresay.server.cli.main import main; assert 'torch' not in sys.modules; "
        f"main({words.split()}); assert 'torch' in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "passive\n", done.stderr


def test_a_run_stopped_while_it_writes_keeps_the_texts_that_are_complete(target, prompts, tmp_path, capsys) -> None:
    words = (
        f"train medusa --target {target} --prompts {prompts} --out {tmp_path}/head --samples 70 --length 20 --steps 2"
    )

    def stopped_in(batch: int) -> str:
        write, calls = Teacher.write, iter(range(batch))

        def stopping(*given):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return write(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Teacher, "write", stopping)
            assert main(words.split()) == 130
        return str(capsys.readouterr().err.splitlines()[-1])

    nothing = "foresay train: stopped before the first 32 texts were complete, so there is nothing to keep"
    assert stopped_in(0) == nothing
    assert list(tmp_path.iterdir()) == []
    kept = f"{tmp_path}/head.work keeps the work so far; run the same command to continue"
    assert stopped_in(1) == f"foresay train: stopped; {kept}"
    assert stopped_in(1) == f"foresay train: stopped; {kept}"
    assert [path.name for path in sorted((tmp_path / "head.work").glob("text-*"))] == ["text-0000.pt", "text-0001.pt"]


def one_line(capsys, words: str, status: int) -> str:
    """What a command that fails prints on stderr."""
    assert main(words.split()) == status
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("foresay train: ")
    return str(line)


@pytest.mark.parametrize(
    ("extra", "status", "printed"),
    [
        ("--length 600", 2, "--length must be above 12 and at most 512"),
        ("--prompts /nowhere.txt", 2, "--prompts /nowhere.txt: no such file or directory"),
        ("--target /nowhere", 1, "/nowhere: no such file or directory"),
        ("--width 64", 2, "--width is for draft_model only, not for medusa"),
        ("--out /dev/null/heads", 2, "--out /dev/null/heads: /dev/null/heads.work cannot be made (Not a directory)"),
        pytest.param(
            "--device cuda",
            2,
            "--device cuda: this machine has no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    target, prompts, tmp_path, capsys, extra, status, printed
) -> None:
    words = f"train medusa --target {target} --prompts {prompts} --out {tmp_path}/head {extra}"
    assert printed in one_line(capsys, words, status)
    assert list(tmp_path.iterdir()) == [], "nothing was begun, so nothing is left"


def test_a_draft_model_has_no_depth(target, prompts, tmp_path, capsys) -> None:
    words = f"train draft --target {target} --prompts {prompts} --out {tmp_path}/d --depth 3"
    assert "--depth is for dflash, eagle3, medusa, peagle only, not for draft" in one_line(capsys, words, 2)


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        ("--samples 1", "--samples: must be a whole number of at least 2, one of them to be held out"),
        ("--width 12", "--width: must be a multiple of 8, got '12'"),
        ("--steps 0", "--steps: must be a whole number of at least 1, got '0'"),
        ("--seed -1", "--seed: must be"),
        ("--temperatures 1,x", "--temperatures: must be temperatures from 0 to 2"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path, capsys, flags, printed) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(f"train draft --prompts p.txt --out {tmp_path}/d {flags}".split())
    (line,) = capsys.readouterr().err.splitlines()
    assert printed in line


def damaged(directory: Path, how: str) -> None:
    """Spoil a target in one of several ways."""
    weights, config = directory / "model.safetensors", directory / "config.json"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-5000])
    elif how == "no weights":
        weights.unlink()
    elif how == "no tokenizer":
        (directory / "tokenizer.json").unlink()
    elif how == "bad tokenizer":
        (directory / "tokenizer.json").write_text("{")
    elif how == "a tensor less":
        tensors = load_file(weights)
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "no numbers":
        save_file({name: tensor * torch.nan for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    elif how == "no causal model":
        config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["BertModel"]}))
    else:
        config.write_text("{")


@pytest.mark.parametrize(
    ("how", "printed"),
    [
        ("cut", "the model cannot be loaded ("),
        ("no weights", "the model cannot be loaded ("),
        ("no tokenizer", "the tokenizer (tokenizer.json, tokenizer_config.json) cannot be loaded ("),
        ("bad tokenizer", "the tokenizer (tokenizer.json, tokenizer_config.json) cannot be loaded ("),
        ("a tensor less", "model.layers.2.mlp.up_proj.weight is missing from its weights (1 are)"),
        ("no numbers", "computes NaN"),
        ("no causal model", "config.json: architecture BertModel is not supported"),
        ("bad config", "config.json"),
    ],
)
def test_a_broken_target_is_named(target, prompts, tmp_path, capsys, how, printed) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    damaged(broken, how)
    words = f"train eagle3 --target {broken} --prompts {prompts} --out {tmp_path}/head --samples 4 --length 20"
    assert main(words.split()) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert str(broken) in line
    assert printed in line
    assert list(tmp_path.iterdir()) == [broken]
