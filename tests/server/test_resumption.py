"""Who goes on in the next engine, in what order, and who does not: without a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from foresay.server.engine_process import frames
from foresay.server.engine_process.resumption import InFlights
from foresay.server.schemas.errors import EngineFailed, KillsEngine, Mistake
from foresay.spec.request import Delta, FinishReason, Origin, Request, RequestEnd
from foresay.spec.sampling import SamplingParams
from tests.routes.apis import APIS
from tests.server.scripted import INFO, ScriptedEngine, served


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: Exception | None = None

    def put(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def fail(self, error: Exception) -> None:
        self.error = error


class Bench:
    """Requests in flight, with engines that only hear what is sent."""

    def __init__(self, most_losses: int = 3) -> None:
        self.sent: list[frames.UpFrame] = []
        self.flights = InFlights(self.sent.append, most_losses)
        self.sinks: dict[str, Kept] = {}
        self.engines = 0
        self.engine()

    def engine(self) -> int:
        """Another one is ready; how many go on in it."""
        self.engines += 1
        self.sent.clear()
        return self.flights.ready(4, "these weights")

    def dies(self, among: Collection[str] | None = None) -> None:
        self.flights.lost(self.engines, "it died", among)

    def add(self, *ids: str, aside: bool = False) -> None:
        for id in ids:
            self.sinks[id] = Kept()
            self.flights.add(Request(id=id, prompt=[1, 2], params=SamplingParams(), aside=aside), self.sinks[id])

    def emits(self, id: str, *tokens: int, last: bool = False) -> None:
        """A step that wrote these: all but the last of them were drafts."""
        count = len(tokens)
        origin = Origin(1, "ngram", list(range(-1, count)), 0, list(range(1, count)), {"draw": 0.1})
        reason: FinishReason | None = "stop" if last else None
        delta = Delta(id=id, tokens=list(tokens), origin=origin, seed=9, finish_reason=reason)
        self.flights.take(delta)

    def proves(self, *ids: str) -> None:
        """Each has had two steps."""
        for id in ids:
            self.emits(id, 1)
            self.emits(id, 2)

    @property
    def added(self) -> list[Request]:
        """Requests of the engine that is there now."""
        return [frame.request for frame in self.sent if isinstance(frame, frames.Add)]


class Failing(Kept):
    """A sink that raises: at this delta, and if it gets its end."""

    def __init__(self, at: int, deaf: bool = False) -> None:
        super().__init__()
        self._at, self._deaf = at, deaf

    def put(self, delta: Delta) -> None:
        if len(self.deltas) == self._at:
            raise KeyError("a mistake of ours")
        super().put(delta)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        if self._deaf:
            raise KeyError("another mistake of ours")


def ids(requests: list[Request]) -> list[str]:
    return [request.id for request in requests]


def test_they_go_on_one_by_one_in_order_of_arrival_with_what_went_out() -> None:
    bench = Bench()
    bench.add("a", "b", "c")
    assert ids(bench.added) == ["a", "b", "c"] and all(request.progress is None for request in bench.added)
    bench.emits("a", 5, 6)
    bench.emits("b", 7)
    bench.emits("a", 8)
    bench.dies()
    assert bench.engine() == 3
    assert ids(bench.added) == ["a"]
    bench.emits("a", 4)
    assert ids(bench.added) == ["a"], "one step is not enough: the next is the first on what it has written"
    bench.emits("a", 3)
    assert ids(bench.added) == ["a", "b"]
    first, second = bench.added
    assert first.committed == [5, 6, 8] and first.params.seed == 9
    assert first.progress is not None
    assert second.committed == [7]
    assert [delta.tokens for delta in bench.sinks["a"].deltas] == [[5, 6], [8], [4], [3]]


def test_who_had_nothing_yet_begins_again_as_it_came() -> None:
    bench = Bench()
    bench.add("a")
    bench.dies()
    bench.engine()
    [request] = bench.added
    assert request.committed == [] and request.params.seed is None and request.progress is not None
    ended = Delta(id="a", tokens=[], finish_reason="stop", ending=RequestEnd(levels=3))
    bench.flights.take(ended)
    assert bench.sinks["a"].deltas[-1].ending == RequestEnd(levels=3, resumed=[0], changed=[])


def test_who_comes_meanwhile_waits_behind_them() -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.dies()
    bench.engine()
    bench.add("new")
    assert ids(bench.added) == ["a"]
    bench.proves("a")
    assert ids(bench.added) == ["a", "b"]
    bench.emits("b", 1, last=True)
    assert ids(bench.added) == ["a", "b", "new"]


@pytest.mark.parametrize("end", ["cancel", "reject"])
def test_one_that_ends_otherwise_makes_way_too(end: str) -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.dies()
    bench.engine()
    ends: dict[str, Callable[[], None]] = {
        "cancel": lambda: bench.flights.cancel("a"),
        "reject": lambda: bench.flights.reject("a", EngineFailed("no")),
    }
    ends[end]()
    assert ids(bench.added) == ["a", "b"]
    assert (bench.sinks["a"].error is not None) == (end == "reject")


def test_who_left_meanwhile_does_not_go_on() -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.dies()
    bench.flights.cancel("a")
    assert bench.engine() == 1
    assert ids(bench.added) == ["b"] and not any(isinstance(frame, frames.Cancel) for frame in bench.sent)


def test_what_the_engine_dies_of_is_known_after_two_deaths() -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.proves("a", "b")
    bench.add("killer")
    bench.emits("killer", 7)
    bench.dies()
    bench.engine()
    bench.proves("a", "b")
    bench.emits("killer", 7)
    assert ids(bench.added) == ["a", "b", "killer"]
    bench.dies()
    error = bench.sinks["killer"].error
    assert isinstance(error, KillsEngine) and "twice" in str(error)
    assert error.headers == {"X-Should-Retry": "false"}
    assert bench.engine() == 2 and bench.sinks["a"].error is bench.sinks["b"].error is None


def test_who_comes_when_the_engine_is_gone_waits_and_is_no_suspect() -> None:
    bench = Bench()
    for _ in range(3):
        bench.flights.hold()
        bench.sent.clear()
        bench.add("late")
        assert bench.added == []
        bench.dies()
        bench.engine()
        assert ids(bench.added) == ["late"] and bench.sinks["late"].error is None
        bench.flights.cancel("late")


def test_one_that_gets_further_each_time_is_no_suspect_but_goes_on_three_times_at_most() -> None:
    bench = Bench()
    bench.add("a")
    for count in range(1, 4):
        bench.proves("a")
        bench.dies()
        bench.engine()
        assert bench.added[0].committed == [1, 2] * count
    bench.proves("a")
    bench.dies()
    assert "resumed 3 times (--max-resumes)" in str(bench.sinks["a"].error)
    assert not isinstance(bench.sinks["a"].error, KillsEngine)


def test_two_that_were_new_are_distinguished() -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.dies()
    for _ in range(2):
        assert bench.engine() == 2
        bench.proves("a")
        bench.dies()
    assert isinstance(bench.sinks["b"].error, KillsEngine) and bench.sinks["a"].error is None


def test_who_ran_when_an_engine_died_of_something_else_may_be_hit_once_more() -> None:
    bench = Bench()
    bench.add("a")
    bench.proves("a")
    for _ in range(2):
        bench.dies()
        assert bench.engine() == 1
    bench.dies()
    assert isinstance(bench.sinks["a"].error, KillsEngine)


def test_a_request_that_only_waits_for_a_slot_is_no_suspect() -> None:
    bench = Bench()
    bench.add("a")
    for _ in range(3):
        bench.flights.stepped(waiting=1)
        bench.dies()
        assert bench.engine() == 1


def test_of_whom_it_cannot_have_died_is_no_suspect() -> None:
    bench = Bench()
    bench.add("compiled")
    for others in ((), ["b"], ["c", "d"]):  # killed from outside; in a step without it
        bench.dies(others)
        assert bench.engine() == 1


def test_of_two_that_were_new_the_step_names_the_one() -> None:
    bench = Bench()
    for _ in range(2):
        bench.add("killer", "b") if bench.engines == 1 else None
        bench.dies(["killer"])
        bench.engine()
    assert isinstance(bench.sinks["killer"].error, KillsEngine) and bench.sinks["b"].error is None


@pytest.mark.parametrize(("known", "refused"), [(None, True), (["a"], True), ((), False), (["b"], False)])
def test_of_what_it_died_may_be_known_later(known: Collection[str] | None, refused: bool) -> None:
    bench = Bench()
    bench.add("a")
    for _ in range(2):
        bench.dies(())
        assert bench.sinks["a"].error is None
        for _ in range(2):  # reported twice it counts once
            bench.dies(known)
        bench.engine()
    assert isinstance(bench.sinks["a"].error, KillsEngine) == refused


def test_engines_that_never_get_ready_count() -> None:
    bench = Bench(most_losses=2)
    bench.add("a")
    bench.dies()
    bench.engines += 1
    bench.dies()
    assert bench.sinks["a"].error is None
    bench.engines += 1
    bench.dies()
    assert "please send it again" in str(bench.sinks["a"].error)


def test_an_end_is_reported_once() -> None:
    bench = Bench(most_losses=1)
    bench.add("a")
    bench.dies()
    bench.dies()
    assert bench.sinks["a"].error is None


def test_what_comes_late_of_an_engine_that_was_given_up_counts() -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.proves("a", "b")
    bench.dies()
    bench.proves("a", "b")
    bench.emits("b", 3, last=True)
    assert bench.engine() == 1
    assert [request.committed for request in bench.added] == [[1, 2, 1, 2]]
    assert ids(bench.added) == ["a"]


def test_none_goes_on_if_none_shall() -> None:
    bench = Bench(most_losses=0)
    bench.add("a")
    bench.emits("a", 1)
    bench.dies()
    assert str(bench.sinks["a"].error) == "it died; this request was lost, please send it again"


def test_a_self_check_does_not_go_on() -> None:
    bench = Bench()
    bench.add("re-run", aside=True)
    bench.dies()
    assert isinstance(bench.sinks["re-run"].error, EngineFailed)


@pytest.mark.parametrize("when", ["before it dies", "while it goes", "while it is gone", "before anything of the next"])
def test_a_text_that_has_ended_needs_no_engine(when: str) -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.flights.move() if when == "while it goes" else None
    bench.emits("a", 1, 2, 3, 4)
    if when == "before it dies":
        bench.flights.finish("a", 2)
        assert bench.sent[-1] == frames.Finish("a", 2)
    bench.dies() if when != "while it goes" else None
    if when == "before anything of the next":
        bench.engine()
        assert ids(bench.added) == ["a"]
    if when != "before it dies":
        bench.flights.finish("a", 2)
    last = bench.sinks["a"].deltas[-1]
    assert (last.tokens, last.finish_reason, last.seed) == ([], "stop", 9)
    assert last.ending is not None
    if when == "before anything of the next":
        assert frames.Cancel("a") in bench.sent
    else:
        bench.engine()
    assert ids(bench.added)[-1] == "b"


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_sink_that_fails_loses_its_request_alone(at: int, deaf: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.add("one", "two")
    broken = Failing(at, deaf)
    bench.flights.add(Request(id="broken", prompt=[1], params=SamplingParams()), broken)
    for token in range(3):
        for id in ("broken", "one", "two"):
            bench.emits(id, token, last=token == 2)
    assert [len(bench.sinks[id].deltas) for id in ("one", "two")] == [3, 3]
    assert len(broken.deltas) == at and isinstance(broken.error, Mistake)
    assert [frame.id for frame in bench.sent if isinstance(frame, frames.Cancel)] == (["broken"] if at < 2 else [])
    assert len(bench.flights) == 0
    assert caplog.text.count("Traceback") == 1 + deaf


@pytest.mark.parametrize("end", ["lost", "stopped", "moved", "refused", "ended"])
def test_a_sink_that_fails_at_its_end_keeps_it_from_nobody(end: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(most_losses=0)
    bench.flights.add(Request(id="broken", prompt=[1], params=SamplingParams(), aside=True), Failing(1, deaf=True))
    bench.add("one", aside=True)
    if end == "lost":
        bench.dies()
    elif end == "stopped":
        bench.flights.fail(lambda: EngineFailed("stopped"))
    elif end == "moved":
        bench.flights.move()
    elif end == "refused":
        for id in ("broken", "one"):
            bench.flights.reject(id, EngineFailed("no"))
    else:
        for id in ("broken", "one"):
            bench.emits(id, 1)
            bench.flights.finish(id, 1)
        bench.dies()
    assert bench.sinks["one"].error is not None or bench.sinks["one"].deltas[-1].finish_reason == "stop"
    assert len(bench.flights) == 0 and "mistake of ours" in caplog.text


def test_where_there_will_be_no_engine_all_get_an_error() -> None:
    bench = Bench()
    bench.add("a", "b")
    bench.dies()
    bench.flights.fail(lambda: EngineFailed("none"))
    assert [str(sink.error) for sink in bench.sinks.values()] == ["none", "none"]
    assert bench.engine() == 0


def said_of(body: bytes, name: str) -> Iterator[Any]:
    """Every value of this name in an answer or the events of a stream."""
    for line in body.decode().splitlines():
        line = line.removeprefix("data: ")
        if line.startswith("{"):
            event = json.loads(line)
            yield from (
                part[name] for part in (event, event.get("response")) if isinstance(part, dict) and name in part
            )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))
async def test_an_answer_that_is_not_exact_shows_where_it_may_differ(api, stream, tokenizer, script):
    engine = ScriptedEngine(script)
    engine.resumed = [3, 6]
    for exact in (True, False):
        engine.info = replace(INFO, exact=exact)
        async with served(engine, tokenizer) as client:
            response = await client.post(api.path, json=api.request(stream, max_tokens=8))
            body = await response.read()
        assert list(said_of(body, "metrics"))[-1]["resumed"] == 2
        warnings = list(said_of(body, "warnings"))
        if exact:
            assert warnings == []
            continue
        assert [warning["code"] for warning in warnings[-1]] == ["resumed", "resumed"]
        assert warnings[-1][0]["message"].startswith("choices[0]: the engine was replaced after output token 3;")
