"""The texts of ``bench budget``, and how it judges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import BadOption
from bench.budget import judged, requests_of
from bench.texts import BEFORE, SHORTEST, TURNS, dialogues, renamed, workloads
from foresay.server.settings.resolved import BUNDLED


def test_names_are_alike_everywhere_and_no_two_tokens_get_one() -> None:
    requested = [([900, 5], [900, 70_000]), ([5], [5, 5])]
    assert renamed(requested, 64) == [([16, 17], [16, 18]), ([17], [17, 17])]
    with pytest.raises(BadOption, match="3 different tokens, the target has 18"):
        renamed(requested, 18)


def test_turns_in_a_row_share_the_beginning_of_their_prompts() -> None:
    long, short = [1] * SHORTEST, [2]
    texts = list(range(5000))
    first = [(texts[:length], answer) for length, answer in ((1200, long), (1300, short), (1400, long), (1500, long))]
    second = [(texts[:50], long), (texts[:90], short)]
    third = [(texts[: 1000 * turn], long) for turn in range(1, 5)]
    found = dialogues([*first, *second, *third])
    assert len(found) == 2
    assert all(len(turns) == TURNS for turns in found)
    assert [len(prompt) for prompt, _ in found[0]] == [BEFORE, BEFORE + 200, BEFORE + 300]
    assert found[0][2][0][:BEFORE] == found[0][0][0]


def test_texts_that_are_too_short_are_no_workload(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    (tmp_path / "dialogues.json").write_text(json.dumps([{"traj": messages}]))
    (tmp_path / "answers.jsonl").write_text(json.dumps({"input_token_ids": [1], "output_token_ids": [2, 3]}))
    assert set(workloads(tmp_path, BUNDLED / "target", 8, 0, 4096, 1024)) == {"fresh", "edits", "drawn", "again"}


def test_a_repeated_request_is_the_same(tmp_path: Path) -> None:
    """Both prompts, and then both once more; a round has one seed, so the answers are the same."""
    requested = next(workloads(tmp_path, BUNDLED / "target", 8, 0, 4096, 1024)["again"])
    assert len(requested) == 4
    assert requested[:2] == requested[2:]
    assert requested[0] != requested[1]
    assert {request.params.seed for request in requests_of(requested, 8, "salt", 3)} == {3}


def rates(auto: list[float], **fixed: list[float]) -> dict[str, list[float]]:
    return {"none": [10.0] * len(auto), **fixed, "auto": auto}


def test_the_best_fixed_choice_is_made_on_one_half_and_scored_on_the_other() -> None:
    """The first is better in the even rounds, which choose; the odd ones score."""
    verdicts = judged("edits", rates([30.0, 20.0] * 4, early=[31.0, 25.0] * 4, late=[12.0, 40.0] * 4))
    assert [verdict.what for verdict in verdicts] == ["auto / none", "auto / early"]
    assert (verdicts[0].ratio, verdicts[0].holds) == (2.5, True)
    assert verdicts[1].ratio == pytest.approx(0.8)
    assert not verdicts[1].holds


def test_no_draft_is_one_of_the_fixed_choices() -> None:
    verdicts = judged("fresh", rates([9.9] * 6, bad=[5.0] * 6))
    assert [(verdict.what, verdict.holds) for verdict in verdicts] == [("auto / none", True), ("auto / none", True)]


def test_a_median_that_holds_with_an_interval_that_does_not_fails() -> None:
    verdicts = judged("fresh", rates([10.0, 10.0, 10.0, 10.0, 5.0, 5.0, 5.0]))
    assert verdicts[0].ratio == 1.0
    assert not verdicts[0].holds
