"""Who goes on in the next engine and who does not: without a process (test_failover.py: in what order, and how)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
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
        self.flights.lost("it died", among)

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


KILLS = "twice at the same position"
#: Lives of one server's requests, event by event, and what becomes of those that do not go on. ``+a``: it comes; ``a.``
#: it has a step, ``a!`` two, which prove it; ``-a``: it leaves; ``w``: a step in which others waited; ``x``: the engine
#: dies, of any; ``x:``: of none, ``x:a,b``: of one of these; ``r``:
#: another one is ready; ``s``: one was started and is not; ``h``: it takes no more.
LIVES: dict[str, tuple[str, dict[str, str]]] = {
    "what it dies of is known after two deaths": ("+a +b a! b! +k k. x r a! b! k. x r", {"k": KILLS}),
    "who comes when it is gone is no suspect": ("h +l x r -l h +l x r -l h +l x r", {}),
    "one that gets further is no suspect": ("+a a! x r a! x r a! x r a!", {}),
    "and goes on three times at most": ("+a a! x r a! x r a! x r a! x", {"a": "resumed 3 times (--max-resumes)"}),
    "two that were new are distinguished": ("+a +b x r a! x r a! x", {"b": KILLS}),
    "who ran may be hit once more": ("+a a! x r x r", {}),
    "and no more": ("+a a! x r x r x", {"a": KILLS}),
    "one that only waits for a slot": ("+a w x r w x r w x r", {}),
    "of whom it cannot have died": ("+a x: r x:b r x:c,d r", {}),
    "of two that were new the step names the one": ("+k +b x:k r x:k r", {"k": KILLS}),
    "engines that never get ready count": ("+a x s x s x s x", {"a": "please send it again"}),
    "a self-check": ("+*a x", {"*a": "please send it again"}),
}


@pytest.mark.parametrize(("life", "ended"), LIVES.values(), ids=LIVES)
def test_who_goes_on_and_who_does_not(life: str, ended: dict[str, str]) -> None:
    bench = Bench()
    for event in life.split():
        kind, _, among = event.partition(":")
        match kind:
            case "x":
                bench.dies([one for one in among.split(",") if one] if ":" in event else None)
            case "r":
                bench.engine()
            case "s":
                bench.engines += 1
            case "h":
                bench.flights.hold()
            case "w":
                bench.flights.stepped(waiting=1)
            case _ if kind[0] == "+":
                bench.add(kind[1:], aside="*" in kind)
            case _ if kind[0] == "-":
                bench.flights.cancel(kind[1:])
            case _:
                bench.proves(kind[:-1]) if kind[-1] == "!" else bench.emits(kind[:-1], 7)
    errors = {id: sink.error for id, sink in bench.sinks.items() if sink.error is not None}
    assert errors.keys() == ended.keys()
    for id, error in errors.items():
        assert ended[id] in str(error) and isinstance(error, KillsEngine) == (ended[id] == KILLS)
        assert not isinstance(error, KillsEngine) or error.headers == {"X-Should-Retry": "false"}


def test_none_goes_on_if_none_shall() -> None:
    bench = Bench(most_losses=0)
    bench.add("a")
    bench.emits("a", 1)
    bench.dies()
    assert str(bench.sinks["a"].error) == "it died; this request was lost, please send it again"


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
