"""Limits, close codes, and that everything ends when a socket does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import WSMsgType

from foresay.server.api.responses.store import Responses, SocketLimits
from foresay.server.http.auth import AuthMiddleware
from tests.responses.bare import BINARY, PING, TEXT, Bare
from tests.responses.serving import STORY, saying, serving
from tests.responses.test_socket import PATH, answer, said
from tests.server.wire import until

LONG = "fox " * 2000


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """Every task that a test's sockets started is gone at its end."""
    before = asyncio.all_tasks()
    yield
    for _ in range(6000):
        left = {task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()}
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(left)


async def closed_with(socket: Any) -> int:
    """Read what is left; the code the server closed with."""
    while (await socket.receive(timeout=60)).type not in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING):
        pass
    return int(socket.close_code)


async def test_a_reader_that_stops_is_closed_with_1013_and_its_request_cancelled(tokenizer):
    limits = SocketLimits(stall=1.0)
    engine = saying(tokenizer, "fox " * 50, run=50, pause=0.0005)
    engine.tokens.pop()  # without an end
    async with (
        serving(engine, tokenizer, limits, send_buffer=4096) as (http, service),
        await Bare.connect(int(http.port or 0)) as bare,
    ):
        for lane in range(60):
            await bare.create(input="Tell", max_output_tokens=400, stream_id=f"{lane:0200}")
        await until(lambda: not service.server.on_drain)
        await until(lambda: not service.server.of(Responses).running)
        assert await bare.close_code() == 1013
        assert (await http.get("/health")).status == 200


async def test_a_slow_reader_gets_fewer_and_longer_deltas_but_the_whole_text(tokenizer):
    engine = saying(tokenizer, LONG, pause=0.0)
    buffer: Any = {"send_buffer": 4096}
    async with serving(engine, tokenizer, **buffer) as (http, _), await Bare.connect(int(http.port or 0)) as bare:
        await bare.create(input="Tell", max_output_tokens=480, stream_id="x" * 250)
        await until(lambda: engine.requests and not engine._tasks)
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "response.incomplete":
            events.append(await bare.event())
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    assert said(events) == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert len(events) < 200, "nothing was merged"


async def test_a_socket_that_nobody_uses_is_closed_with_1000(tokenizer):
    limits = SocketLimits(idle=1.0)
    async with serving(saying(tokenizer), tokenizer, limits) as (http, _), http.ws_connect(PATH) as socket:
        assert said(await answer(socket, {"input": "Tell"})) == STORY
        assert await closed_with(socket) == 1000


async def test_a_running_response_is_no_idleness(tokenizer):
    engine = saying(tokenizer, pause=0.2)
    async with serving(engine, tokenizer, SocketLimits(idle=1.0)) as (http, _), http.ws_connect(PATH) as socket:
        assert said(await answer(socket, {"input": "Tell"})) == STORY


async def test_the_socket_too_many_is_refused_and_closed_with_1013(tokenizer):
    limits = SocketLimits(most=2)
    async with serving(saying(tokenizer), tokenizer, limits) as (http, service):
        async with http.ws_connect(PATH) as one, http.ws_connect(PATH), http.ws_connect(PATH) as third:
            error = await third.receive_json(timeout=180)
            assert (error["status"], error["error"]["code"]) == (429, "websocket_connection_limit_reached")
            assert await closed_with(third) == 1013
            assert said(await answer(one, {"input": "Tell"})) == STORY
        await until(lambda: not service.server.on_drain)


async def test_a_draining_server_finishes_what_runs_and_closes_with_1012(tokenizer):
    engine = saying(tokenizer, pause=0.02)
    async with (
        serving(engine, tokenizer) as (http, service),
        http.ws_connect(PATH) as busy,
        http.ws_connect(PATH) as idle,
    ):
        await busy.send_json({"type": "response.create", "input": "Tell"})
        assert (await busy.receive_json(timeout=180))["type"] == "response.created"
        draining = asyncio.create_task(service.drain(60.0))
        assert await closed_with(idle) == 1012
        await busy.send_json({"type": "response.create", "input": "More", "stream_id": "b"})
        events = [await busy.receive_json(timeout=60)]
        while events[-1]["type"] != "response.completed":
            events.append(await busy.receive_json(timeout=60))
        assert said(events) == STORY
        (refused,) = [event for event in events if event["type"] == "error"]
        assert (refused["status"], refused["error"]["code"], refused["stream_id"]) == (503, "draining", "b")
        assert await closed_with(busy) == 1012
        await draining


async def test_a_drain_that_loses_patience_fails_the_response_first(tokenizer):
    engine = saying(tokenizer, hold_after=5)
    async with serving(engine, tokenizer) as (http, service), http.ws_connect(PATH) as socket:
        await socket.send_json({"type": "response.create", "input": "Tell"})
        assert (await socket.receive_json(timeout=180))["type"] == "response.created"
        await service.drain(0.1)
        assert (await answer(socket))[-1]["type"] == "response.failed"
        assert await closed_with(socket) == 1012


async def test_a_message_too_big_closes_with_1009(tokenizer):
    async with serving(saying(tokenizer), tokenizer, auth=AuthMiddleware(largest_body=4096)) as (http, service):
        async with http.ws_connect(PATH) as socket:
            await socket.send_json({"type": "response.create", "input": "x" * 5000})
            assert await closed_with(socket) == 1009
        await until(lambda: not service.server.on_drain)


@pytest.mark.parametrize(
    ("data", "opcode", "code"), [(b"{}", BINARY, 1003), (b'{"type":"\xff"}', TEXT, 1007), (b"x", 7, 1002)]
)
async def test_frames_that_are_wrong_close_the_socket(tokenizer, data, opcode, code):
    async with serving(saying(tokenizer), tokenizer) as (http, _), await Bare.connect(int(http.port or 0)) as bare:
        await bare.send(data, opcode)
        assert await bare.close_code() == code


async def test_a_message_in_fragments_is_one_message(tokenizer):
    async with serving(saying(tokenizer), tokenizer) as (http, _), await Bare.connect(int(http.port or 0)) as bare:
        await bare.send(b'{"type":"response.cre', final=False)
        await bare.send(b"", opcode=PING)
        await bare.send(b'ate","input":"Tell"}', opcode=0)
        assert (await bare.read())[0] == 10
        assert (await bare.event())["type"] == "response.created"


@pytest.mark.parametrize("leave", [Bare.vanish, Bare.half_close], ids=["vanish", "half close"])
async def test_a_client_that_leaves_cancels_its_requests(tokenizer, leave):
    engine = saying(tokenizer, hold_after=5)
    async with serving(engine, tokenizer) as (http, service), await Bare.connect(int(http.port or 0)) as bare:
        for lane in ("a", "b", "b"):
            await bare.create(input="Tell", stream_id=lane)
        await until(lambda: len(engine.requests) == 2)
        leave(bare)
        await until(lambda: not service.server.on_drain and not service.server.of(Responses).running)
        assert len(engine.cancelled) == 2 and len(engine.requests) == 2


async def test_pings_come_and_silence_ends_the_socket(tokenizer):
    engine = saying(tokenizer, hold_after=5)
    async with (
        serving(engine, tokenizer, SocketLimits(heartbeat=0.2)) as (http, service),
        await Bare.connect(int(http.port or 0)) as bare,
    ):
        await bare.create(input="Tell")
        opcodes = []
        while PING not in opcodes:
            opcodes.append((await bare.read())[0])
        await until(lambda: not service.server.on_drain and engine.cancelled)
        assert len(engine.cancelled) == 1


async def test_more_than_may_wait_is_refused(tokenizer):
    engine = saying(tokenizer, hold_after=5)
    async with serving(engine, tokenizer, SocketLimits(waiting=3)) as (http, _), http.ws_connect(PATH) as socket:
        for _ in range(5):
            await socket.send_json({"type": "response.create", "input": "Tell", "stream_id": "a"})
        event = await socket.receive_json(timeout=180)
        while event["type"] != "error":
            event = await socket.receive_json(timeout=180)
        assert (event["status"], event["error"]["code"], event["stream_id"]) == (429, "too_many_waiting", "a")


@pytest.mark.parametrize(
    ("headers", "status"), [({"Sec-WebSocket-Protocol": "other"}, 400), ({"Sec-WebSocket-Version": "3"}, 400)]
)
async def test_a_handshake_that_cannot_succeed_is_an_http_error(tokenizer, headers, status):
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="} | headers
    async with serving(saying(tokenizer), tokenizer) as (http, service):
        response = await http.get(PATH, headers=upgrade)
        assert response.status == status and (await response.json())["error"]["message"]
        service.server.draining = True
        assert (await http.get(PATH, headers=upgrade)).status == 503
