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
from foresay.server.engine.drafters.registry import LOOKUPS
from foresay.server.engine.observers import Lines, TraceWriter
from foresay.server.engine.trace import Begin, Part, Session, Start, Step, Told, drafting, read
from foresay.server.observe.replay.evaluate import Cost, evaluate, largest
from foresay.server.observe.replay.ways import judge_lookups, judge_recorded, parse, usual
from foresay.spec.budget import CostModel
from foresay.spec.errors import ConfigurationError
from foresay.spec.protocols import Drafter
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics
from tests.spec.house import House
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
        house = House(MODEL, drafter, shape, max_model_len=400, pages=400, max_seqs=max_seqs, observers=observers)
        if observers:
            observers[0].started(house.engine.info, COST)
        for number in range(4):
            house.add(str(number), [number, 1, 2, 3], SamplingParams(max_tokens=tokens, seed=number))
        return [answer.statistics for _, answer in sorted(house.run().items())]


def requests(file: Path) -> list[Told]:
    return [told for session in read(file).sessions for told in drafting(session)]


def guesser() -> Guesser:
    return Guesser(MODEL, 0.7, full=True)


def per_step(statistics: list[Statistics]) -> float:
    """Tokens of a step behind the ones that computed the prompts."""
    accepted = sum(one.accepted for one in statistics)
    return 1 + accepted / sum(one.steps - 1 for one in statistics)


def test_the_recorded_way_is_what_happened(file: Path) -> None:
    statistics = ran(guesser(), (3, 2, 1), file)
    outcome = judge_recorded(parse("recorded"), requests(file))
    assert outcome.steps == sum(one.steps - 1 for one in statistics)
    assert outcome.drafted == sum(one.drafted for one in statistics)
    assert outcome.accepted == sum(one.accepted for one in statistics)
    depths = [sum(column) for column in zip(*(one.accepted_per_depth for one in statistics), strict=True)]
    assert outcome.accepted_per_depth == depths
    assert outcome.short == 0


@pytest.mark.parametrize("levels", [2, 5])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_on_a_trace_do_what_they_do_when_they_draft(
    file: Path, name: str, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request after the other, since some look at earlier answers, and over before a step drafts nothing at all."""
    monkeypatch.setitem(LOOKUPS, "suffix", partial(SuffixDrafter, slice_seconds=math.inf))
    ran(guesser(), (3, 2, 1), file, max_seqs=1, tokens=70)
    statistics = ran(LOOKUPS[name](), (1,) * levels, max_seqs=1, tokens=70)
    outcome = judge_lookups(parse(f"{name}:{levels}"), requests(file))
    assert outcome.steps == sum(one.steps - 1 for one in statistics)
    assert (outcome.drafted, outcome.accepted) == (
        sum(one.drafted for one in statistics),
        sum(one.accepted for one in statistics),
    )
    assert outcome.accepted > 50
    assert outcome.seconds is not None and outcome.seconds > 0


@pytest.mark.parametrize("length", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_shorter_chains_are_foretold(file: Path, length: int) -> None:
    ran(guesser(), (1,) * 5, file)
    foretold = judge_recorded(parse(f"recorded:{length}"), requests(file))
    assert foretold.tokens_per_step == pytest.approx(per_step(ran(guesser(), (1,) * length)), rel=0.07)
    assert foretold.short / foretold.steps < 0.05, "only where the text was about to end"


def part(parents: list[int], drawn: list[int], accepted: int, chances: list[float], root: int = 5) -> Part:
    return Part(
        id="a", root=root, parents=parents, drawn=drawn, drafter="d", accepted=accepted, emitted=accepted + 1,
        chances=chances,
    )  # fmt: skip


#: root -> 1 (.5), 2 (.3); 1 -> 3 (.2); 2 -> 4 (.25); 4 -> 5 (.1). The draws go 2, 4, 5.
TREE = ([-1, 0, 0, 1, 2, 4], [2, -1, 4, -1, 5, -1])
CHANCES = [1.0, 0.5, 0.3, 0.2, 0.25, 0.1]


@pytest.mark.parametrize(
    ("way", "drafted", "accepted", "short"),
    [
        ("recorded", 5, 3, False),
        ("recorded:1", 1, 0, False),  # the likeliest child is not the one that was drawn
        ("recorded:2,2,1", 5, 3, False),
        ("recorded:2,1", 3, 2, False),
        ("recorded:1,1,1", 2, 0, True),  # below node 1 nothing deeper is recorded
        ("recorded@1", 1, 0, False),
        ("recorded@2", 2, 1, False),
        ("recorded@3", 3, 2, False),  # nodes 1, 2 and 4
        ("recorded@63", 5, 3, True),
    ],
)
def test_parts_of_one_tree(way: str, drafted: int, accepted: int, short: bool) -> None:
    begin = Begin(id="a", at=0.0, prompt=5, limit=100, temperature=1.0)
    told = Told(begin, [part(*TREE, 3, CHANCES)], text=None)
    outcome = judge_recorded(parse(way), [told])
    assert (outcome.drafted, outcome.accepted, bool(outcome.short)) == (drafted, accepted, short)


def test_a_text_cut_in_the_run_counts_as_far_as_it_goes() -> None:
    begin = Begin(id="a", at=0.0, prompt=5, limit=100, temperature=1.0)
    told = Told(begin, [part(*TREE, 3, CHANCES)], text=2)
    assert judge_recorded(parse("recorded"), [told]).accepted == 2


def session(*steps: tuple[int, float, float]) -> Session:
    """Steps by levels of a chain, milliseconds of drafting and of the forward pass."""
    told = [
        Step(
            number=number, at=0.0, ms={"plan": 0.5, "propose": propose, "forward": forward, "draw": 0.1 * (1 + levels)},
            rows=1 + levels, running=1, waiting=0, pages=1,
            parts=[part(list(range(-1, levels)), [-1] * (1 + levels), 0, [])],
        )
        for number, (levels, propose, forward) in enumerate(steps)
    ]  # fmt: skip
    start = Start(version=1, foresay="", at=0.0, text=False, engine={}, cost=COST.points)
    return Session(start, told, {"a": Told(Begin(id="a", at=0.0, prompt=1, limit=9, temperature=0.0), told[0].parts)})


def test_what_a_step_costs() -> None:
    cost = Cost.of([session((4, 8.0, 20.0), (4, 8.0, 20.0), (2, 4.0, 20.0))])
    assert cost.slower == pytest.approx(2.0), "everything was twice as slow as at start-up"
    assert (cost.level, cost.draw, cost.rest) == pytest.approx((2.0, 0.1, 0.5))
    assert cost.plain() == pytest.approx(20.0 + 0.1 + 0.5)
    outcome = judge_recorded(parse("recorded:2"), session((4, 8.0, 20.0)).requests.values())
    assert cost.step(parse("recorded:2"), outcome) == pytest.approx(20.0 + 0.3 + 0.5 + 4.0)


@pytest.mark.parametrize(
    "way", ["", "nothing", "recorded:", "recorded:0", "recorded@x", "recorded:3,0", "ngram:99", "ngram@3", "none:2"]
)
def test_ways_that_nobody_knows(way: str) -> None:
    with pytest.raises(ConfigurationError, match="draft"):
        parse(way)


def test_the_usual_ways_are_all_known() -> None:
    ways = [way.text for way in usual(3, 9, text=True)]
    assert ways[:2] == ["none", "recorded"]
    assert "recorded@8" in ways and "recorded@16" not in ways
    assert "recorded:3" in ways and "recorded:4" not in ways
    assert not any(way.source == "ngram" for way in usual(3, 3, text=False))


def test_the_command_prints_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statistics = ran(guesser(), (3, 2, 1), file)
    assert main(["replay", str(file)]) == 0
    out = capsys.readouterr().out
    assert "table <- guesser: 4 requests, 1000 tokens" in out
    assert f"recorded           {per_step(statistics):>11.2f}" in out
    assert "ngram:4" in out and "<- best" in out
    assert main(["replay", str(file), "--draft", "recorded:1", "--draft", "none", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["draft"] for row in told["rows"]] == ["recorded:1", "none"]
    assert told["rows"][1]["tokens_per_step"] == 1.0
    assert told["rows"][1]["speed_up"] == pytest.approx(1.0)
    assert told["rows"][1]["steps"] == 1000 - 4


def test_lookups_need_the_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(guesser(), (3, 2, 1), file, text=False)
    assert main(["replay", str(file), "--draft", "ngram:4"]) == 2
    assert "--trace-text" in capsys.readouterr().err
    assert main(["replay", str(file)]) == 0
    assert "ngram" not in capsys.readouterr().out


def test_only_the_pair_that_ran_last_is_evaluated(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(guesser(), (1,), file)
    file.write_text(file.read_text().replace('"drafter":"guesser"', '"drafter":"another"'))
    ran(guesser(), (2, 1), file)
    assert main(["replay", str(file), "--draft", "recorded"]) == 0
    shown = capsys.readouterr()
    assert "4 requests" in shown.out
    assert "left out 1 of 2 runs" in shown.err


def test_a_trace_without_requests(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = TraceWriter(Lines(str(file)), text=False)
    writer.started(House(MODEL).engine.info, COST)
    writer.close()
    assert main(["replay", str(file)]) == 2
    assert "contains no request" in capsys.readouterr().err


def test_a_trace_of_plain_decoding_can_be_looked_up_in(file: Path) -> None:
    ran(guesser(), (), file)
    sessions = read(file).sessions
    assert largest(sessions) == (0, 0)
    rows = {row.draft: row for row in evaluate(sessions, usual(0, 0, text=True)).rows}
    assert rows["recorded"].tokens_per_step == 1.0
    assert rows["ngram:4"].tokens_per_step == pytest.approx(per_step(ran(NgramDrafter(), (1,) * 4)))
