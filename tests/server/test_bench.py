"""``foresay bench``: what is measured, in which words a model gets it, and the verdict on several ways of drafting. On
an engine whose times are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foresay import Engine
from foresay.drafters.training.prompts import Prompt
from foresay.server.cli.bench import measure
from foresay.server.cli.main import main
from foresay.server.engine_process.local import TextStream
from foresay.server.settings.config import BenchConfig
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.request import Request
from foresay.spec.tree import DraftTree
from tests.dashboard.timed import Clock, Knowing, Script, engine

SPEEDS = {
    "none": Script(plain=0.010, drafting=0.0, verifying=0.010, right=0),
    "suffix": Script(plain=0.010, drafting=0.004, verifying=0.016, right=2),
    "ngram": Script(plain=0.010, drafting=0.004, verifying=0.011, right=2),
    "ngram,suffix": Script(plain=0.010, drafting=0.020, verifying=0.020, right=1),
}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Each way of drafting takes the time of its script."""
    clock = Clock()
    clock.give(monkeypatch)

    def build(config: BenchConfig, *rest: Any, **kept: Any) -> Any:
        return engine(SPEEDS[config.draft], clock, config.draft != "none")

    monkeypatch.setattr("foresay.server.engine_process.local.build_engine", build)
    monkeypatch.setattr(Tokenizer, "has_template", False)
    return clock


NONE_GAINS = "no drafter is certain to gain, so keep the default, auto: it drafts only where it pays"


def run(capsys: pytest.CaptureFixture[str], *flags: str, max_tokens: int = 60) -> list[str]:
    assert main(["bench", "--max-tokens", str(max_tokens), "--rounds", "2", *flags]) == 0
    return capsys.readouterr().out.splitlines()


def test_ways_of_drafting_are_compared_in_one_run(ways: Clock, capsys) -> None:
    flags = ["--prompt", "a", "--prompt", "b", "--compare", "suffix", "none", "ngram", "ngram,suffix"]
    head, titles, *lines, last = run(capsys, *flags)
    assert head.startswith("script, float32, temperature 1, 2 prompts of 60 tokens (written: 60, 60), 2 rounds")
    assert titles.split("  ")[-1] == "times as fast"
    reported = {row.split()[0]: float(row.split()[-1]) for row in lines[:4]}
    assert list(reported) == ["suffix", "ngram", "ngram,suffix", "none"]
    for name, factor in reported.items():
        assert factor == pytest.approx(SPEEDS[name].speed_up if name != "none" else 1.0, rel=0.06)
    assert last == "the fastest: foresay serve bundled --draft ngram"
    assert [line.split(":")[:2] for line in lines[4:]] == [[name, " accepted by depth"] for name in list(reported)[:3]]
    report = json.loads(run(capsys, *flags, "--json")[-1])
    assert report["winner"] == "ngram"
    assert [way["draft"] for way in report["ways"]] == ["suffix", "ngram", "ngram,suffix"]
    assert report["off"]["tokens_per_step"] == 1.0


def test_the_command_for_the_winner_keeps_the_shape(ways: Clock, capsys) -> None:
    *_, last = run(capsys, "--prompt", "a", "--compare", "ngram", "--draft-tokens", "3")
    assert last == "the fastest: foresay serve bundled --draft ngram --draft-tokens 3"


def test_no_drafter_is_named_where_none_gains(ways: Clock, capsys) -> None:
    *_, last = run(capsys, "--prompt", "a", "--compare", "ngram,suffix")
    assert last == NONE_GAINS


def test_where_nothing_is_drafted_a_difference_is_noise(ways: Clock, capsys, monkeypatch) -> None:
    monkeypatch.setattr(Knowing, "_tree", lambda drafter, root, shape: DraftTree.chain([root], drafter.name))
    why = "nothing was drafted, so a difference is noise"
    *_, row, _none, output, last = run(capsys, "--prompt", "a", "--draft", "ngram")
    assert row.endswith("(cannot tell)") and output == f"ngram: cannot tell how much it gains: {why}"
    assert last == NONE_GAINS


@pytest.mark.parametrize("flags", [["--compare", "none"], ["--draft", "none"]])
def test_there_must_be_something_to_compare(flags: list[str], capsys) -> None:
    assert main(["bench", *flags]) == 2
    assert f"there is nothing to compare: choose a drafter with {flags[0]}" in capsys.readouterr().err


def test_a_drafter_that_does_not_exist_is_refused_before_anything_is_loaded(ways: Clock, capsys, monkeypatch) -> None:
    monkeypatch.setattr("foresay.server.engine_process.local.build_engine", None)
    assert main(["bench", "--compare", "ngram", "./missing"]) != 0
    assert "--draft ./missing" in capsys.readouterr().err


def test_prompts_are_read_from_a_file(ways: Clock, capsys, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in "abcdefghij"))
    head, *_ = run(capsys, "--prompts", str(file), "--draft", "ngram", "--prompt", "k")
    assert "11 prompts of 60 tokens (written: 60.0 on average)" in head


def test_a_model_that_ends_at_once_leaves_nothing_to_measure(ways: Clock, capsys) -> None:
    flags = ["--prompt", "a", "--draft", "ngram"]
    head, output = run(capsys, *flags, max_tokens=1)
    assert head.endswith("1 prompt of 1 token (written: 1), 2 rounds")
    assert output == "the model ended after 1 token: nothing to measure"
    report = json.loads(run(capsys, *flags, "--json", max_tokens=1)[-1])
    (way,) = report["ways"]
    assert way["cannot_tell"] == output
    assert [way["speedup"], way["on"]["tokens_per_second"], way["on"]["tokens_per_step"]] == [None] * 3


def test_a_prompt_is_sent_as_a_person_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model's chat template, if it has one."""
    prompt, config = Prompt("How many is 3 times 12?", "--prompt 1"), BenchConfig(rounds=1, max_tokens=4, temperature=0)
    with Engine("bundled", "none", max_model_len=128, dtype="float32") as one:
        requested: list[list[int]] = []
        run = one.run

        def kept(request: Request, stop: Sequence[str] = (), provenance: bool = False) -> TextStream:
            requested.append(request.prompt)
            return run(request, stop, provenance)

        monkeypatch.setattr(one, "run", kept)
        measure({"ngram": one, "none": one}, config, [prompt])
        expected = one.chat(str(prompt.content), max_tokens=1).prompt_token_ids
    assert requested[0] == expected != one.tokenizer.encode(str(prompt.content))
