"""Prompt files, and the statistics that the README's figures rest on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import prompts
from bench.prompts import BadPrompts, Prompt
from bench.stats import Spread, distinct_trigrams, paired_ratio, pooled_ratio, spread


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


def test_spread() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(2.0, 3.0, 4.0, 5)


def test_ratio_is_paired_and_geometric() -> None:
    ratio = paired_ratio({"a": [(2.0, 1.0), (200.0, 100.0)], "b": [(8.0, 1.0), (0.8, 0.1)]})
    assert ratio.ratio == pytest.approx(4.0)
    assert [ratio.low, ratio.high] == pytest.approx([2.0, 8.0])


def test_interval_narrows_with_prompts_not_with_rounds() -> None:
    few = paired_ratio({str(i): [(1.0 + i % 2, 1.0)] * 50 for i in range(4)})
    many = paired_ratio({str(i): [(1.0 + i % 2, 1.0)] for i in range(200)})
    assert few.high - few.low > 3 * (many.high - many.low)
    assert few.low <= few.ratio <= few.high


def test_pooled_ratio_weighs_by_size() -> None:
    ratio = pooled_ratio({"a": (30.0, 10.0), "b": (1.0, 1.0)})
    assert ratio.ratio == pytest.approx(31 / 11)
    assert [ratio.low, ratio.high] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("tokens", "share"), [([1, 2, 3, 4, 5], 1.0), ([7] * 12, 0.1), ([1, 2, 3, 1, 2, 3], 0.75), ([1, 2], 1.0)]
)
def test_distinct_trigrams(tokens: list[int], share: float) -> None:
    assert distinct_trigrams(tokens) == pytest.approx(share)
