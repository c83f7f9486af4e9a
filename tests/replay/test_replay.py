"""What replay says would have happened is what happens."""

from __future__ import annotations

import contextlib
import json
import math
from functools import partial
from pathlib import Path

import pytest

from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.server.cli.main import main
from foresay.server.cli.replay import looked_up, recorded
from foresay.server.engine.drafters.registry import LOOKUPS
from foresay.server.engine.observers import Lines, TraceWriter
from foresay.server.engine.trace import Begin, Part, TracedRequest, drafting, read
from foresay.spec.budget import CostModel
from foresay.spec.protocols import Drafter
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics
from tests.spec.harness import Harness
from tests.spec.tables import Guesser, TableModel

MODEL = TableModel(3, vocab_size=4)
COST = CostModel([1, 8, 64], [0.010, 0.010, 0.030])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def ran(
    drafter: Drafter,
    shape: tuple[int, ...],
    file: Path | None = None,
    text: bool = True,
    max_seqs: int = 4,
    tokens: int = 250,
) -> list[Statistics]:
    """Statistics of some requests, traced if a file is given."""
    with contextlib.ExitStack() as closing:
        observers = []
        if file is not None:
            observers = [TraceWriter(Lines(str(file)), text)]
            closing.callback(observers[0].close)
        harness = Harness(MODEL, drafter, shape, max_model_len=400, pages=400, max_seqs=max_seqs, observers=observers)
        if observers:
            observers[0].started(harness.engine.info, COST)
        for number in range(4):
            harness.add(str(number), [number, 1, 2, 3], SamplingParams(max_tokens=tokens, seed=number))
        return [answer.statistics for _, answer in sorted(harness.run().items())]


def requests(file: Path) -> list[TracedRequest]:
    return [reported for session in read(file).sessions for reported in drafting(session)]


def guesser() -> Guesser:
    return Guesser(MODEL, 0.7, full=True)


def per_step(statistics: list[Statistics]) -> float:
    """Tokens of a step behind the ones that computed the prompts."""
    accepted = sum(one.accepted for one in statistics)
    return 1 + accepted / sum(one.steps - 1 for one in statistics)


def test_the_recorded_row_is_what_happened(file: Path) -> None:
    statistics = ran(guesser(), (3, 2, 1), file)
    row = recorded(requests(file))
    assert row.steps == sum(one.steps - 1 for one in statistics)
    assert row.drafted == sum(one.drafted for one in statistics)
    assert row.accepted == sum(one.accepted for one in statistics)


def test_a_text_cut_in_the_run_counts_as_far_as_it_goes() -> None:
    begin = Begin(id="a", at=0.0, prompt=5, limit=100, temperature=1.0)
    part = Part(id="a", root=5, parents=[-1, 0, 1, 2], drawn=[1, 2, 3, -1], accepted=3, emitted=4)
    assert recorded([TracedRequest(begin, [part], text=2)]).accepted == 2


@pytest.mark.parametrize("levels", [2, 5])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_on_a_trace_do_what_they_do_when_they_draft(
    file: Path, name: str, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request after the other, since some look at earlier answers, and over before a step drafts nothing at all."""
    monkeypatch.setitem(LOOKUPS, "suffix", partial(SuffixDrafter, slice_seconds=math.inf))
    ran(guesser(), (3, 2, 1), file, max_seqs=1, tokens=70)
    statistics = ran(LOOKUPS[name](), (1,) * levels, max_seqs=1, tokens=70)
    outcome = looked_up(name, levels, requests(file))
    assert outcome.steps == sum(one.steps - 1 for one in statistics)
    assert (outcome.drafted, outcome.accepted) == (
        sum(one.drafted for one in statistics),
        sum(one.accepted for one in statistics),
    )
    assert outcome.accepted > 50


def test_the_command_prints_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statistics = ran(guesser(), (3, 2, 1), file)
    assert main(["replay", str(file)]) == 0
    out = capsys.readouterr().out
    assert "4 requests" in out
    assert f"recorded     {per_step(statistics):>11.2f}" in out
    assert "ngram:4" in out
    assert main(["replay", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["draft"] for row in rows[:2]] == ["recorded", "ngram:2"]
    assert rows[0]["accepted"] == sum(one.accepted for one in statistics)


def test_lookups_need_the_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(guesser(), (3, 2, 1), file, text=False)
    assert main(["replay", str(file)]) == 2
    assert "--trace-text" in capsys.readouterr().err


def test_only_the_pair_that_ran_last_is_evaluated(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(guesser(), (1,), file)
    file.write_text(file.read_text().replace('"drafter":"guesser"', '"drafter":"another"'))
    ran(guesser(), (2, 1), file)
    assert main(["replay", str(file)]) == 0
    shown = capsys.readouterr()
    assert "4 requests" in shown.out
    assert "left out 1 of 2 runs" in shown.err


def test_a_trace_without_requests(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = TraceWriter(Lines(str(file)), text=False)
    writer.started(Harness(MODEL).engine.info, COST)
    writer.close()
    assert main(["replay", str(file)]) == 2
    assert "contains no request" in capsys.readouterr().err


def test_a_trace_of_plain_decoding_can_be_looked_up_in(file: Path) -> None:
    ran(guesser(), (), file)
    assert recorded(requests(file)).tokens_per_step == 1.0
    looked = looked_up("ngram", 4, requests(file))
    assert looked.tokens_per_step == pytest.approx(per_step(ran(NgramDrafter(), (1,) * 4)))
