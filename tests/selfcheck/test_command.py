"""``foresay selfcheck``: the comparison, the table, the exit status, and that it can fail."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foresay import Engine, SamplingParams
from foresay.drafters.training.prompts import Prompt
from foresay.server.cli.bench import prompts_of
from foresay.server.cli.main import main
from foresay.server.cli.selfcheck_prompts import check, rows, sentence
from foresay.spec.errors import ConfigurationError
from tests.selfcheck.inprocess import take_first_children

SMALL = ("--threads", "1", "--max-model-len", "256", "--kv-tokens", "1024")
PROMPTS = [
    Prompt("Once upon a time there was a little girl who", "first"),
    Prompt("The king said", "second"),
    Prompt([{"role": "user", "content": "Tell me a story."}], "third"),
]
GREEDY, WARM = SamplingParams(temperature=0.0, max_tokens=12, seed=1), SamplingParams(max_tokens=12, seed=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings: dict[str, Any] = {
        "draft": "bundled",
        "draft_tree": "3,2,1",
        "dtype": "float32",
        "max_seqs": 2,
        "max_model_len": 256,
        "kv_tokens": 1024,
    }
    with Engine("bundled", threads=1, **settings) as engine:
        yield engine


def test_every_prompt_is_written_twice_with_each_sampling_and_compared(engine: Engine) -> None:
    counts: list[int] = []
    report = check(engine, PROMPTS, [GREEDY, WARM], done=counts.append)
    assert counts == [1, 2, 3, 4, 5, 6]
    assert [(one.where, one.temperature) for one in report.answers] == [
        (prompt.where, temperature) for temperature in (0.0, 1.0) for prompt in PROMPTS
    ]
    assert report.mismatches == 0 and all(one.difference is None for one in report.answers)
    assert report.tokens == sum(one.tokens for one in report.answers) > 40
    assert any(one.steps < one.tokens for one in report.answers), "the drafter was at work"
    table = list(rows(report))
    assert len(table) == 7 and all(line.endswith("the same") for line in table[1:])
    assert sentence(report) == f"Plain decoding writes the same: 6 answers, {report.tokens} tokens."


def test_a_stop_text_cuts_both(engine: Engine) -> None:
    text = PROMPTS[0].content
    assert isinstance(text, str)
    whole = engine.generate(text, WARM)
    report = check(engine, PROMPTS[:1], [WARM], stop=[whole.text[10:14]])
    assert 0 < report.tokens < len(whole.token_ids)
    assert report.mismatches == 0


def test_a_broken_accept_rule_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    take_first_children(monkeypatch)
    report = check(engine, PROMPTS, [WARM])
    assert report.mismatches >= 2
    found = next(one.difference for one in report.answers if one.difference is not None)
    assert f"writes {found.plain} where output token {found.position} is {found.written}" in "\n".join(rows(report))
    assert "although this engine claims to be exact" in sentence(report)
    report.exact, report.exact_reason = False, "rows differ by how many there are"
    assert sentence(report).endswith("did not claim to be exact: rows differ by how many there are")
    report.mismatches = 0
    assert sentence(report).endswith("does not promise it, though: rows differ by how many there are")


def test_a_prompt_that_does_not_fit_is_named(engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match=r"^second: the model holds 256 tokens, but"):
        check(engine, PROMPTS[1:2], [msgspec.structs.replace(WARM, max_tokens=255)])


def test_the_command_reads_a_file_and_reports_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "The king said"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n')
    flags = ["selfcheck", *SMALL, "--prompts", str(file), "--max-tokens", "12", "--temperature", "0.8", "--json"]
    assert main(flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(one["prompt"], one["temperature"]) for one in report["answers"]] == [
        (1, 0.0),
        (2, 0.0),
        (1, 0.8),
        (2, 0.8),
    ]
    assert report["mismatches"] == 0 and report["exact"] is True
    assert report["answers"][1]["where"] == f"{file}, line 2"


def test_the_command_fails_when_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_first_children(monkeypatch)
    assert main(["selfcheck", *SMALL, "--max-tokens", "10"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 4 * 2 + 1
    assert "although this engine claims to be exact" in lines[-1]


def test_standard_input_is_a_file_of_prompts() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"The fox\nThe owl\n")
    os.close(writing)
    kept = os.dup(0)
    try:
        os.dup2(reading, 0)
        assert [prompt.content for prompt in prompts_of("-")] == ["The fox", "The owl"]
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(reading)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("\n\n", "holds no prompt"), ('{"text": "x"}', 'expected {"prompt"')],
)
def test_a_file_of_no_use_is_refused_in_a_sentence(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["selfcheck", "--prompts", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"foresay selfcheck: --prompts {file}") and message in error and error.count("\n") == 1
