"""The engine's end where several ask it: whose is whose, and that nobody waits for one who does not read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from foresay.server.host import frames
from foresay.server.host.frames import FrameSplitter, pack, unpack_down
from foresay.server.host.replicas import doors
from foresay.server.host.replicas.doors import Doors
from foresay.spec.request import Delta, EngineInfo, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import StepTrace

TRACE = StepTrace(number=1, rows=1, sequences=1, prefill_rows=0, drafted=0, accepted=0, emitted=1, seconds={})
WORDS = dict.fromkeys(("target", "drafter", "drafter_reason", "dtype", "dtype_reason", "device", "exact_reason"), "x")
NUMBERS = dict.fromkeys(("kv_tokens", "page_size", "max_model_len", "max_seqs", "vocab_size"), 16)
INFO = msgspec.convert({**WORDS, **NUMBERS, "exact": True, "draft_shape": [], "eos_token_ids": []}, EngineInfo)


class House:
    """Doors, who started the engine, and whoever was handed in."""

    def __init__(self) -> None:
        self.server, theirs = socket.socketpair()
        self.hand, arrivals = socket.socketpair()
        self.doors = Doors(theirs, arrivals)
        self.ends = [self.server, self.hand, theirs]
        self.splitters: dict[socket.socket, FrameSplitter] = {}

    def enter(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        socket.send_fds(self.hand, [b"!"], [theirs.fileno()])
        theirs.close()
        self.ends.append(ours)
        assert not list(self.doors.receive(wait=False))
        return ours

    def heard(self, end: socket.socket) -> list[frames.DownFrame]:
        splitter = self.splitters.setdefault(end, FrameSplitter())
        try:
            return [unpack_down(body) for body in splitter.feed(end.recv(1 << 20, socket.MSG_DONTWAIT))]
        except BlockingIOError:
            return []


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    with closing(made.doors):
        made.doors.send(frames.Ready(INFO))
        yield made
    for end in made.ends:
        end.close()


def add(id: str, fork_of: str | None = None) -> bytes:
    return pack(frames.Add(Request(id=id, prompt=[1], params=SamplingParams(), fork_of=fork_of)))


def test_who_is_let_in_is_told_what_runs(house):
    assert house.heard(house.enter()) == [frames.Ready(INFO)]


def test_requests_that_are_called_alike_are_kept_apart(house):
    ends = [house.enter(), house.enter()]
    for end in ends:
        house.heard(end)
        end.send(add("a") + add("b", fork_of="a"))
    added = [(frame.request.id, frame.request.fork_of) for frame in house.doors.receive(wait=True)]
    assert added == [("1/a", None), ("1/b", "1/a"), ("2/a", None), ("2/b", "2/a")]
    house.doors.send(frames.Deltas([Delta(id="2/a", tokens=[7]), Delta(id="1/b", tokens=[8])], TRACE))
    assert house.heard(ends[0]) == [frames.Deltas([Delta(id="b", tokens=[8])], TRACE)]
    assert house.heard(ends[1]) == [frames.Deltas([Delta(id="a", tokens=[7])], TRACE)]


def test_who_leaves_wants_nothing_any_more(house):
    end = house.enter()
    end.send(add("a") + add("b") + add("c"))
    list(house.doors.receive(wait=True))
    end.send(pack(frames.Cancel("b")))
    assert list(house.doors.receive(wait=True)) == [frames.Cancel("1/b")]
    house.doors.send(frames.Deltas([Delta(id="1/c", tokens=[], finish_reason="stop")]))
    end.close()
    assert list(house.doors.receive(wait=True)) == [frames.Cancel("1/a")]
    house.doors.send(frames.Deltas([Delta(id="1/a", tokens=[3])], TRACE))  # it was in the step that ran


def test_a_front_door_cannot_end_the_engine(house):
    house.enter().send(pack(frames.Stop()) + pack(frames.Number(9)) + pack(frames.Ping()))
    assert not list(house.doors.receive(wait=True))
    house.server.send(pack(frames.Stop()))
    assert list(house.doors.receive(wait=True)) == [frames.Stop()]


def test_a_frame_that_cannot_be_read_is_its_senders(house):
    end = house.enter()
    house.heard(end)
    body = b"\x81\xa1x\x01"
    end.send(len(body).to_bytes(4, "big") + body)
    (rejected,) = house.doors.receive(wait=True)
    house.doors.send(rejected)
    assert [frame.id for frame in house.heard(end)] == [""]


def test_a_failed_step_tells_each_of_its_own(house):
    ends = [house.enter(), house.enter()]
    for end in (*ends, house.server):
        house.heard(end)
    house.doors.send(frames.Failed("why", running=["2/a", "2/b"]))
    assert [house.heard(end)[0].running for end in (*ends, house.server)] == [[], ["a", "b"], []]


def test_a_failed_step_tells_against_nobody_where_another_is_as_suspicious(house):
    ends = [house.enter(), house.enter()]
    for end in ends:
        house.heard(end)
        end.send(add("a"))
    list(house.doors.receive(wait=True))
    for told in ([[], []], [["a"], []]):
        house.doors.send(frames.Failed("why", running=["1/a", "2/a"]))
        assert [house.heard(end)[-1].running for end in ends] == told
        house.doors.send(frames.Deltas([Delta(id="2/a", tokens=[7])], TRACE))
        house.doors.send(frames.Deltas([Delta(id="2/a", tokens=[7])], TRACE))


def test_nobody_waits_for_one_who_does_not_read(house, monkeypatch):
    monkeypatch.setattr(doors, "MOST_UNREAD", 1 << 20)
    asleep, awake = house.enter(), house.enter()
    asleep.send(add("a"))
    list(house.doors.receive(wait=True))
    house.heard(awake)
    for _ in range(40):
        house.doors.send(frames.Deltas([Delta(id="1/a", tokens=list(range(1 << 14)))], TRACE))
        list(house.doors.receive(wait=False))
        assert len(house.heard(awake)) == 1
    assert not house.doors._doors.get(1), "it was shown out"


def test_who_reads_again_in_time_gets_all(house):
    end = house.enter()
    for number in range(20):
        house.doors.send(frames.Deltas([Delta(id="1/a", tokens=[number] * (1 << 14))], TRACE))
    assert house.doors._doors[1].unread, "more than a socket holds"
    got: list[int] = []
    while len(got) < 20:
        deltas = [frame.deltas for frame in house.heard(end) if isinstance(frame, frames.Deltas)]
        got += [delta.tokens[0] for each in deltas for delta in each]
        assert not list(house.doors.receive(wait=False))
    assert got == list(range(20))


def test_the_server_that_started_it_is_not_waited_for_either(house):
    for _ in range(5000):
        house.doors._news_at = 0.0
        house.doors.send(frames.Deltas([], TRACE))
    house.doors.send(frames.Pong())
