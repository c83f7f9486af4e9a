"""Prompt files in all the formats that ``--prompts`` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import prompts
from bench.prompts import BadPrompts, Prompt


def test_own_prompts() -> None:
    own = prompts.load()
    assert len(own) == 24
    assert sum(p.chat for p in own) == 12
    assert len({p.name for p in own}) == len({p.text for p in own}) == 24


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
            Prompt("mt_bench-81", "Write.", True),
        ),
        ({"prompt": ["Write.", "Again."], "category": "x"}, Prompt("mt_bench-1", "Write.", True)),
        ({"question": "1+1?", "answer": "2"}, Prompt("gsm8k-1", "1+1?", True)),
        ({"task_id": "HumanEval/0", "prompt": "def f", "test": ""}, Prompt("HumanEval/0", "def f", False)),
        ({"id": "mine", "text": "Once"}, Prompt("mine", "Once", False)),
    ],
)
def test_formats(row: dict[str, object], prompt: Prompt, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row) + "\n\n")
    assert prompts.load(file) == [prompt]


@pytest.mark.parametrize("content", ["", '{"body": "x"}\n', '{"turns": []}\n'])
def test_bad_files(content: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(BadPrompts):
        prompts.load(file)
