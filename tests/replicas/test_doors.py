"""A replica with several front doors: whose each request is, and that none waits for one that does not read."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import pytest
from msgspec.structs import replace

from foresay.server.engine_process import frames
from foresay.server.engine_process.child import Spawned
from foresay.server.engine_process.frames import pack, unpack_down, unpack_up
from foresay.server.replicas import hosted
from foresay.server.replicas.hosted import Hosted, introduce
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import Delta, EngineInfo, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import StepTrace

SECONDS = 60.0
SECRET = b"secret"
TRACE = StepTrace(number=1, rows=1, sequences=1, prefill_rows=0, drafted=0, accepted=0, emitted=1, seconds={})
WORDS = dict.fromkeys(("target", "drafter", "drafter_reason", "dtype", "dtype_reason", "device", "exact_reason"), "x")
NUMBERS = dict.fromkeys(("kv_tokens", "page_size", "max_model_len", "max_seqs", "vocab_size"), 16)
INFO = msgspec.convert({**WORDS, **NUMBERS, "exact": True, "draft_shape": [], "eos_token_ids": []}, EngineInfo)


class End:
    """The other end of a connection to the replica: a front door's, or the engine's. unpack: what arrives there."""

    def __init__(self, connection: socket.socket, unpack: Callable[[bytes], object] = unpack_down) -> None:
        self._connection, self._unpack = connection, unpack

    async def open(self) -> Self:
        self._reader, self.writer = await asyncio.open_connection(sock=self._connection, limit=1 << 20)
        return self

    def say(self, *sent: frames.UpFrame | frames.DownFrame) -> None:
        self.writer.write(b"".join(map(pack, sent)))

    async def hear(self) -> Any:
        """The next frame; EOFError if there is none any more."""
        async with asyncio.timeout(SECONDS):
            size = int.from_bytes(await self._reader.readexactly(frames.HEADER_BYTES), "big")
            return self._unpack(await self._reader.readexactly(size))


#: The process of the engine, once its connection is closed.
DEAD: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: -11, wait=lambda timeout=None: -11, kill=lambda: None)


class Replica:
    """A replica whose engine is the test, and its front doors."""

    def __init__(self) -> None:
        config = ServeConfig(engine_timeout=30 * SECONDS)
        self.hosted = Hosted(config, "a", "127.0.0.1", SECRET, spawn=self._spawn)
        self.ends: list[End] = []

    def _spawn(self) -> Spawned:
        ours, theirs = socket.socketpair()
        self.engine = End(theirs, unpack_up)
        self.ends.append(self.engine)
        return Spawned(DEAD, ours)

    async def open(self) -> None:
        opening = asyncio.create_task(self.hosted.open())
        while not self.ends:
            await asyncio.sleep(0)
        await self.ready()
        await opening

    async def ready(self) -> None:
        await self.engine.open()
        assert isinstance(await self.engine.hear(), frames.Start)
        self.engine.say(frames.Ready(INFO))

    async def enter(self) -> End:
        address = self.hosted.address
        self.ends.append(end := await End(await introduce(address.host, address.port, address.secret)).open())
        return end

    async def asking(self, count: int, *ids: str) -> list[End]:
        """Front doors, each with these requests, which the engine has."""
        ends = [await self.enter() for _ in range(count)]
        for end in ends:
            assert await end.hear() == frames.Ready(INFO), "a front door that is let in learns what runs"
            end.say(*map(add, ids))
            for _ in ids:
                await self.engine.hear()
        return ends


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    await made.open()
    yield made
    await made.hosted.close()
    for end in made.ends:
        end.writer.close()


def add(id: str, fork_of: str | None = None) -> frames.Add:
    return frames.Add(Request(id=id, prompt=[1], params=SamplingParams(), fork_of=fork_of))


async def told(ends: list[End]) -> list[list[str] | None]:
    """Which of their requests the engine may have died of; their connections are closed then."""
    failed = [(await end.hear()).running for end in ends]
    for end in ends:
        with pytest.raises(EOFError):
            await end.hear()
    return failed


async def test_requests_that_are_called_alike_are_kept_apart(replica):
    ends = await replica.asking(2)
    for number, end in enumerate(ends, 1):
        end.say(add("a"), add("b", fork_of="a"))
        requests = [(await replica.engine.hear()).request for _ in "ab"]
        assert [(each.id, each.fork_of) for each in requests] == [
            (f"{number}/a", None),
            (f"{number}/b", f"{number}/a"),
        ]
    assert replica.hosted.load == 4
    replica.engine.say(frames.Deltas([Delta(id="2/a", tokens=[7]), Delta(id="1/b", tokens=[8])], TRACE))
    assert await ends[0].hear() == frames.Deltas([Delta(id="b", tokens=[8])], TRACE)
    assert await ends[1].hear() == frames.Deltas([Delta(id="a", tokens=[7])], TRACE)


async def test_who_leaves_wants_nothing_any_more(replica):
    [end] = await replica.asking(1, "a", "b", "c")
    end.say(frames.Cancel("b"))
    assert await replica.engine.hear() == frames.Cancel("1/b")
    over = Delta(id="1/c", tokens=[], finish_reason="stop")
    replica.engine.say(frames.Deltas([over]))
    assert await end.hear() == frames.Deltas([replace(over, id="c")])
    end.writer.close()
    assert await replica.engine.hear() == frames.Cancel("1/a")
    replica.engine.say(frames.Deltas([Delta(id="1/a", tokens=[3])], TRACE))  # it was in the step that ran
    await replica.asking(1)
    assert replica.hosted.load == 0


async def test_a_front_door_cannot_end_the_engine(replica):
    [end] = await replica.asking(1)
    end.say(frames.Stop(), frames.Ping(), frames.Finish("a", 3))
    assert await replica.engine.hear() == frames.Finish("1/a", 3)


async def test_what_the_engine_rejects_is_its_senders(replica):
    one, other = await replica.asking(2, "a")
    replica.engine.say(frames.Rejected("2/a", (("n",), " is wrong", "")))
    assert await other.hear() == frames.Rejected("a", (("n",), " is wrong", ""))
    assert replica.hosted.load == 1
    replica.engine.say(frames.Deltas([], TRACE))
    assert await one.hear() == frames.Deltas([], TRACE)


async def test_a_frame_that_cannot_be_read_is_its_senders(replica):
    [end] = await replica.asking(1)
    body = b"\x81\xa1x\x01"
    end.writer.write(len(body).to_bytes(4, "big") + body)
    assert (await end.hear()).id == ""


async def test_a_failed_step_reaches_each_front_door_with_its_own_requests(replica):
    ends = [*await replica.asking(1), *await replica.asking(1, "a", "b")]
    replica.engine.say(frames.Failed("why", running=["2/a", "2/b"]))
    assert await told(ends) == [[], ["a", "b"]]


@pytest.mark.parametrize(("heard", "expected"), [(0, [[], []]), (2, [["a"], []])])
async def test_a_failed_step_accuses_no_request_where_another_is_as_suspicious(replica, heard, expected):
    ends = await replica.asking(2, "a")
    for _ in range(heard):
        replica.engine.say(frames.Deltas([Delta(id="2/a", tokens=[7])], TRACE))
        for end in ends:
            await end.hear()
    replica.engine.say(frames.Failed("why", running=["1/a", "2/a"]))
    assert await told(ends) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, [None]), (2, [[], []])])
async def test_where_the_engine_dies_any_of_one_front_door_may_be_why(replica, count, expected):
    ends = await replica.asking(count, "a")
    replica.engine.writer.close()
    assert await told(ends) == expected


async def test_who_comes_while_there_is_no_engine_hears_of_the_next(replica):
    replica.engine.writer.close()
    async with asyncio.timeout(SECONDS):
        while "started again" not in replica.hosted.status.message:
            await asyncio.sleep(0)
    end = await replica.enter()
    async with asyncio.timeout(SECONDS):
        while replica.hosted.status.state != "loading":
            await asyncio.sleep(0.01)
    await replica.ready()
    assert await end.hear() == frames.Ready(INFO)


async def test_nobody_waits_for_one_who_does_not_read(replica, monkeypatch):
    monkeypatch.setattr(hosted, "MOST_UNREAD", 1 << 20)
    _, [awake] = await replica.asking(1, "a"), await replica.asking(1)
    for _ in range(400):
        replica.engine.say(frames.Deltas([Delta(id="1/a", tokens=list(range(1 << 14)))], TRACE))
        assert await awake.hear() == frames.Deltas([], TRACE)
    assert await replica.engine.hear() == frames.Cancel("1/a"), "its connection was dropped"


async def test_who_reads_again_in_time_gets_all(replica):
    [end] = await replica.asking(1, "a")
    for number in range(200):
        replica.engine.say(frames.Deltas([Delta(id="1/a", tokens=[number] * (1 << 14))], TRACE))
        await replica.engine.writer.drain()
    got = [(await end.hear()).deltas[0].tokens[0] for _ in range(200)]
    assert got == list(range(200))
