"""What replay says would have happened is what happens."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest

from bench import BadOption, __main__, replay
from bench.drive import LOOKUPS
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.spec.protocols import Drafter
from foresay.spec.sampling import SamplingParams
from tests.spec.harness import Answer, Harness
from tests.spec.tables import Guesser, TableModel

MODEL = TableModel(3, vocab_size=4)


def ran(drafter: Drafter, shape: tuple[int, ...]) -> dict[str, Answer]:
    """Some requests, one after the other, since some drafters look at earlier answers."""
    harness = Harness(MODEL, drafter, shape, max_model_len=400, pages=400, max_seqs=1, max_chunk=replay.CHUNK)
    for number in range(4):
        harness.add(str(number), [number, 1, 2, 3] * 75, SamplingParams(max_tokens=70, seed=number))
    return dict(sorted(harness.run().items()))


@pytest.mark.parametrize("levels", [3])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_in_a_text_do_what_they_do_when_they_draft(
    name: str, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOOKUPS, "suffix", partial(SuffixDrafter, slice_seconds=math.inf))
    written = ran(Guesser(MODEL, 0.7, full=True), (3, 2, 1))
    drafted = [answer.statistics for answer in ran(LOOKUPS[name](), (1,) * levels).values()]
    texts = [([int(id), 1, 2, 3] * 75, answer.tokens) for id, answer in written.items()]
    assert replay.looked_up(f"{name}:{levels}", texts) == (
        sum(one.steps - 1 for one in drafted),
        sum(one.drafted for one in drafted),
        accepted := sum(one.accepted for one in drafted),
    )
    assert accepted > 50


def test_texts_are_recorded_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "texts.jsonl"
    size = ["--limit", "2", "--max-tokens", "40", "--temperature", "0", "--draft", "none", "--no-save"]
    assert __main__.main(["replay", "--record", str(file), *size]) == 0
    capsys.readouterr()
    assert [len(json.loads(line)["output_token_ids"]) for line in file.read_text("utf-8").splitlines()] == [40, 40]
    assert __main__.main(["replay", str(file), "--modes", "ngram:4", "--no-save"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    steps, drafted, accepted = said["steps, drafted, accepted"]["ngram:4"]
    assert steps + accepted == 2 * 39 and 0 < accepted < drafted


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="'draft_model:4': expected a drafter that needs no model"):
        replay.looked_up("draft_model:4", [])
    with pytest.raises(SystemExit):
        __main__.main(["replay", "--no-save"])
