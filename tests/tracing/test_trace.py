"""The trace of a real engine tells what its answers tell; a file that fails ends the trace and nothing else."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foresay.server.engine.observers import Lines, TraceWriter
from foresay.server.engine.trace import Session, read
from foresay.spec.budget import CostModel
from foresay.spec.errors import ConfigurationError
from foresay.spec.observer import Observer
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from tests.spec.harness import Harness
from tests.spec.tables import Guesser, TableModel

COST = CostModel([1, 64], [0.01, 0.02])


class Order(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def begun(self, sequence: SequenceState) -> None:
        self.seen.append(f"begun {sequence.id}")

    def stepped(self, trace, verdicts) -> None:
        self.seen.append(f"step {trace.number}")

    def ended(self, sequence: SequenceState) -> None:
        self.seen.append(f"ended {sequence.id}")


Traced = Callable[..., Harness]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    """Makes engines that draft trees and write a trace into one file."""
    with contextlib.ExitStack() as closing:

        def make(text: bool = True) -> Harness:
            model = TableModel(5)
            writer = TraceWriter(Lines(str(tmp_path / "trace")), text)
            closing.callback(writer.close)
            harness = Harness(model, Guesser(model, 0.6, full=True), (3, 2, 1), observers=[writer])
            writer.started(harness.engine.info, COST)
            return harness

        yield make


def only_session(path: Path) -> Session:
    (session,) = read(path).sessions
    return session


def test_a_trace_agrees_with_the_answers(tmp_path: Path, traced: Traced) -> None:
    harness = traced()
    for number in range(6):
        harness.add(str(number), [number, 1, 2], SamplingParams(max_tokens=9 + number, seed=number))
    answers = harness.run()
    session = only_session(tmp_path / "trace")
    assert session.start.cost == [(1, 0.01), (64, 0.02)]
    assert [step.number for step in session.steps] == [trace.number for trace in harness.traces]
    for id, answer in answers.items():
        record, counts = session.requests[id], session.requests[id].counts()
        assert record.output() == answer.tokens
        assert record.begin.tokens == [int(id), 1, 2]
        assert record.end is not None and record.end.reason == "length"
        assert counts.per_step_drafted == answer.statistics.per_step_drafted
        assert counts.per_step_accepted == answer.statistics.per_step_accepted
        assert counts.accepted_per_depth == answer.statistics.accepted_per_depth


def test_a_text_cut_in_the_middle_of_a_run(tmp_path: Path, traced: Traced) -> None:
    harness = traced()
    harness.add("one", [1, 2], SamplingParams(max_tokens=50, seed=1))
    harness.add("two", [1, 3], SamplingParams(max_tokens=8, seed=2))
    for _ in range(4):
        harness.step()
    harness.engine.finish("one", 3)
    harness.run()
    harness.engine.finish("two", 6)  # found when the engine had ended it by itself
    harness.engine.notify()
    session = only_session(tmp_path / "trace")
    assert (session.requests["one"].kept, session.requests["two"].kept) == (3, 6)
    assert session.requests["one"].emitted > 3
    assert session.requests["two"].emitted == 8
    statistics = harness.answers["one"].statistics
    assert session.requests["one"].counts().per_step_accepted == statistics.per_step_accepted
    assert sum(session.requests["two"].counts().per_step_accepted) <= 5


def test_without_text_no_line_holds_a_token(tmp_path: Path, traced: Traced) -> None:
    harness = traced(text=False)
    harness.answer([1, 2, 3], SamplingParams(max_tokens=12, seed=1))
    content = (tmp_path / "trace").read_text()
    assert '"tokens":[' not in content and '"draws":[' not in content
    record = only_session(tmp_path / "trace").requests["only"]
    assert record.output() is None
    assert record.kept == 12


def test_engines_of_one_file_come_one_after_the_other(tmp_path: Path, traced: Traced) -> None:
    for _ in range(2):
        traced().answer([1], SamplingParams(max_tokens=3, seed=1))
    assert [len(session.requests) for session in read(tmp_path / "trace").sessions] == [1, 1]
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


def test_a_broken_line_is_counted_and_left_out(tmp_path: Path, traced: Traced) -> None:
    traced().answer([1], SamplingParams(max_tokens=3, seed=1))
    with (tmp_path / "trace").open("ab") as file:
        file.write(b'{"is":"step","num')
    traced().answer([1], SamplingParams(max_tokens=4, seed=1))
    trace = read(tmp_path / "trace")
    assert trace.broken == 1
    assert [session.requests["only"].kept for session in trace.sessions] == [3, 4]


@pytest.mark.parametrize(
    "content", ["", "hello\n", '{"is":"end","id":"1","at":1,"reason":"","tokens":1}\n', "{}\n", "\0\n"]
)
def test_what_is_no_trace(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ConfigurationError, match="is not a trace"):
        read(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(tmp_path / "nothing")


def test_a_trace_of_another_version(tmp_path: Path, traced: Traced) -> None:
    traced()
    content = (tmp_path / "trace").read_text()
    (tmp_path / "trace").write_text(content.replace('"version":1', '"version":9'))
    with pytest.raises(ConfigurationError, match="version 9"):
        read(tmp_path / "trace")


def test_files_that_cannot_be_appended_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "no" / "folder", Path("/dev/full")):
        with pytest.raises(ConfigurationError, match="--trace"):
            Lines(str(path))


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = Lines(str(tmp_path / "trace"))
    lines.close()
    lines._file = open("/dev/full", "ab", buffering=4096)  # noqa: SIM115
    harness = Harness(TableModel(5), observers=[TraceWriter(lines, text=False)])
    assert len(harness.answer([1, 2], SamplingParams(max_tokens=40, seed=1)).tokens) == 40
    (record,) = caplog.records
    assert "the trace ends here" in record.message and "No space left" in record.message
    lines.close()


def test_events_come_in_order_and_after_the_tokens() -> None:
    harness = Harness(TableModel(5), observers=[order := Order()])
    harness.engine.add(Request(id="a", prompt=[1, 2], params=SamplingParams(max_tokens=9, seed=1)))
    deltas = harness.engine.step()
    assert order.seen == ["begun a"], "the step is reported when its tokens are on their way"
    assert deltas[0].tokens
    harness.engine.step()
    assert order.seen == ["begun a", "step 1"]
    harness.engine.cancel("a")
    harness.engine.notify()
    assert order.seen == ["begun a", "step 1", "step 2", "ended a"]


class Failing(Observer):
    def stepped(self, trace, verdicts) -> None:
        raise ValueError("it looked too closely")


def test_an_observer_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(TableModel(5), observers=[Failing(), order := Order()])
    assert len(harness.answer([1, 2], SamplingParams(max_tokens=5, seed=1)).tokens) == 5
    assert order.seen == ["begun only", *(f"step {number}" for number in range(1, 6)), "ended only"]
    (record,) = caplog.records
    assert "Failing failed" in record.message
