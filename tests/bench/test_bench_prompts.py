"""Prompt files, the statistics that the README's figures rest on, and many replicas, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import prompts
from bench.fleet import CHUNK, PAGE, TOKENS, WAYS, plot, simulate, told, took, turn_of
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


SYSTEM = list(range(320))
#: Two turns; the second repeats the first one's prompt and adds a page.
TALK = [(SYSTEM, 12), ([*SYSTEM, *range(1000, 1000 + PAGE)], 12)]


def test_a_step_takes_what_was_measured_and_in_between_what_lies_between():
    assert [took(rows) for rows in (1, 4, 6, 64)] == [8.0, 9.0, 9.45, 53.0]


def test_one_turn_alone_reads_in_chunks_and_writes_in_steps():
    (turn,) = simulate("router", 1, [turn_of([(SYSTEM, 12)], 1.0)], 0)
    chunks = len(SYSTEM) // CHUNK
    assert 1e3 * (turn.first - turn.arrived) == pytest.approx(chunks * took(CHUNK))
    assert len(turn.gaps) == 12 / TOKENS
    assert turn.cached == 0


def test_the_second_turn_finds_what_the_first_one_left_where_the_router_sends_it():
    first, second = simulate("router", 4, [turn_of(TALK, 0.0)], 0)
    assert second.cached == len(SYSTEM)
    assert second.arrived > first.last


@pytest.mark.parametrize("way", WAYS)
def test_every_turn_ends_whichever_way_it_goes(way):
    turns = simulate(way, 3, [turn_of(TALK, 0.01 * number) for number in range(20)], 0)
    assert len(turns) == 40
    assert all(turn.arrived <= turn.begun < turn.first <= turn.last for turn in turns)


def test_what_is_told_can_be_drawn():
    turns = simulate("router", 1, [turn_of(TALK, 0.0)], 0)
    drawn = plot([{"replicas": 1, "way": way} | told(turns) for way in WAYS])
    assert drawn.startswith("<svg") and drawn.count("<polyline") == 6
