"""The layer below HTTP: frames on the wire, deltas on their way to a reader."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import socket
import threading

import msgspec
import pytest

from foresay.server.cli.serve import allow_most_files
from foresay.server.engine.generation import Generation, Sink, generate
from foresay.server.engine_process import frames
from foresay.server.engine_process.frames import Link
from foresay.server.engine_process.loop import Loop
from foresay.server.schemas.errors import EngineFailed, SlowReader
from foresay.server.settings.config import EngineConfig, ServeConfig
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams
from tests.server.scripted import INFO, ScriptedEngine
from tests.spec.harness import Harness
from tests.spec.tables import TableModel


def request(id: str = "r", **params) -> Request:
    return Request(id=id, prompt=[1, 2], params=SamplingParams(**params))


class HandEngine:
    """Does nothing by itself: the test puts deltas into the sinks."""

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.cancelled: list[str] = []

    def add(self, request: Request, sink: Sink) -> None:
        if request.id == "refused":
            raise InvalidRequest("prompt", "not this one")
        self.sinks[request.id] = sink

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)

    def finish(self, id: str, at_token: int) -> None:
        self.cancelled.append(f"{id} at {at_token}")


def delta(id: str, tokens: list[int], **fields) -> Delta:
    return Delta(id=id, tokens=tokens, **fields)


async def test_tokens_in_tokens_out():
    engine = ScriptedEngine([5, 6, 7], run=2)
    deltas = [delta async for delta in generate(engine, request(max_tokens=6))]
    assert [token for delta in deltas for token in delta.tokens] == [5, 6, 7, 5, 6, 7]
    assert [delta.finish_reason for delta in deltas[-2:]] == [None, "length"]


async def test_closing_the_iterator_cancels_the_request():
    engine = ScriptedEngine([5], pause=0.001)
    stream = generate(engine, request())
    assert (await anext(aiter(stream))).tokens == [5]
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine.cancelled == ["r"]


async def test_deltas_nobody_took_come_together_each_as_it_was():
    engine = HandEngine()
    async with Generation(engine, [request("a"), request("b")]) as generation:
        engine.sinks["a"].put(delta("a", [1], cached_tokens=16))
        engine.sinks["a"].put(delta("a", [2, 3], cached_tokens=16))
        engine.sinks["b"].put(delta("b", [9], finish_reason="stop", stop_token=9))
        engine.sinks["a"].put(delta("a", [4], cached_tokens=16, finish_reason="length"))
        batch = await generation.next()
        assert [(index, one.tokens, one.finish_reason) for index, one in batch] == [
            (0, [1], None),
            (0, [2, 3], None),
            (0, [4], "length"),
            (1, [9], "stop"),
        ]
        assert await generation.next(timeout=0.01) == []
    assert engine.cancelled == []


async def test_what_is_still_running_is_cancelled():
    engine = HandEngine()
    async with Generation(engine, [request("a"), request("b")]):
        engine.sinks["a"].put(delta("a", [], finish_reason="stop"))
    assert engine.cancelled == ["b"]
    engine.sinks["b"].put(delta("b", [1]))  # what was under way falls on the floor


async def test_a_refused_request_takes_its_siblings_along():
    engine = HandEngine()
    with pytest.raises(InvalidRequest):
        async with Generation(engine, [request("a"), request("refused")]):
            pass
    assert engine.cancelled == ["a", "refused"]


async def test_an_error_comes_after_the_tokens_before_it():
    engine = HandEngine()
    async with Generation(engine, [request("a")]) as generation:
        engine.sinks["a"].put(delta("a", [1]))
        engine.sinks["a"].put(delta("a", [2], finish_reason="error", error="not a number"))
        batch = await generation.next()
        assert [(one.tokens, one.finish_reason) for _, one in batch] == [([1], None), ([2], None)]
        with pytest.raises(EngineFailed, match="not a number"):
            await generation.next()
    assert engine.cancelled == []


async def test_a_reader_too_far_behind_loses_the_request():
    engine = HandEngine()
    async with Generation(engine, [request("a")], most_pending=4) as generation:
        for token in range(10):
            engine.sinks["a"].put(delta("a", [token]))
        assert engine.cancelled == ["a"]
        assert [one.tokens for _, one in await generation.next()] == [[0], [1], [2], [3], [4]]
        with pytest.raises(SlowReader):
            await generation.next()


async def test_an_early_end_is_passed_on_and_abort_reaches_everybody():
    engine = HandEngine()
    async with Generation(engine, [request("a"), request("b")]) as generation:
        generation.finish(1, 7)
        generation.abort(EngineFailed("over"))
        with pytest.raises(EngineFailed, match="over"):
            await asyncio.wait_for(generation.next(), 60)
    assert engine.cancelled == ["b at 7", "a", "b"]


# -- frames ------------------------------------------------------------------------------------------------------------

UP: list[frames.UpFrame] = [
    frames.Start(EngineConfig(target="somewhere", draft="ngram")),
    frames.Add(request(seed=2**64 - 1, stop_token_ids=(3,))),
    frames.Cancel("r"),
    frames.Finish("r", 5),
    frames.Stop(),
]
DOWN: list[frames.DownFrame] = [
    frames.Loading("weights", 0.5),
    frames.Ready(INFO),
    frames.Failed("no", True),
    frames.Deltas([delta("r", [1, 2], finish_reason="stop", seed=2**64 - 1)]),
    frames.Rejected("r", (("prompt",), "no", ""), "code"),
]


def test_every_frame_survives_the_trip_in_any_pieces():
    for sent, unpack in ((UP, frames.unpack_up), (DOWN, frames.unpack_down)):
        data = b"".join(frames.pack(frame) for frame in sent)
        for size in (1, 3, 64, len(data)):
            splitter = frames.FrameSplitter()
            pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
            bodies = itertools.chain.from_iterable(map(splitter.feed, pieces))
            assert [unpack(body) for body in bodies] == sent


def test_the_engine_process_sees_its_part_of_a_server_config():
    frame = frames.unpack_up(frames.pack(frames.Start(ServeConfig(draft="none", port=1)))[frames.HEADER_BYTES :])
    assert frame == frames.Start(EngineConfig(draft="none"))


def raw(body: object) -> bytes:
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return len(data).to_bytes(frames.HEADER_BYTES, "big") + data


def test_a_frame_that_cannot_be_served_fails_its_request_and_never_the_engine():
    good = msgspec.to_builtins(frames.Add(request("good", max_tokens=3, seed=1)))
    bad = [
        {**good, "request": {**good["request"], "id": "types", "prompt": ["x"]}},
        {**good, "request": {**good["request"], "id": "lacks", "params": 3}},
        {**good, "request": {**good["request"], "id": "tokens", "prompt": [1 << 40]}},
        {**good, "request": {**good["request"], "id": "forced", "forced": [-1]}},
    ]
    harness = Harness(TableModel(0))
    ours, low = socket.socketpair()
    allow_most_files()
    with low:
        theirs = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD, 1500))  # as behind so many clients
    with ours, theirs, contextlib.closing(Link(theirs)) as link:
        thread = threading.Thread(target=Loop(harness.engine, link).run)
        thread.start()
        ours.settimeout(60)
        for body in (b"\xc1\xff", {"type": "nothing"}, 7, *bad, good):
            ours.sendall(raw(body))
        splitter, found = frames.FrameSplitter(), dict[str, str | None]()
        while "good" not in found:
            for frame in map(frames.unpack_down, splitter.feed(ours.recv(1 << 16))):
                if isinstance(frame, frames.Rejected):
                    found[frame.id] = frame.error.message
                elif isinstance(frame, frames.Deltas):
                    found |= {one.id: one.error for one in frame.deltas if one.finish_reason is not None}
        ours.sendall(frames.pack(frames.Stop()))
        thread.join(60)
    assert not thread.is_alive()
    assert found.keys() == {"", "types", "lacks", "tokens", "forced", "good"}
    assert found["good"] is None
    harness.engine.check()
