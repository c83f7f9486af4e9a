"""The feed and the data behind the page: an event a second, to those who may, at nobody's cost."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from foresay.server.api.about import routes as about
from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import AuthMiddleware
from foresay.server.metrics.telemetry import Telemetry
from tests.gateway.guarded import ALICE, BOB, bearer, guarded
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import until

ASK = {"prompt": "Tell", "max_tokens": 12, "ignore_eos": True}


async def events(response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_an_event_at_once_and_then_one_a_second(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("once upon a time"), run=3)
    async with served(engine, tokenizer) as client:
        state = await (await client.get("/dashboard/state")).json()
        since = int(state["snapshot"]["now"])
        began, frames = time.monotonic(), []
        async with client.get(f"/dashboard/feed?since={since}") as response:
            assert response.content_type == "text/event-stream"
            assert "Content-Encoding" not in response.headers
            assert (await client.post("/v1/completions", json=ASK)).status == 200
            async for frame in events(response):
                frames.append(frame)
                if len(frames) >= 4 and sum(point["tokens"] for point in frame_points(frames)) == ASK["max_tokens"]:
                    break
        assert time.monotonic() - began > 1.9
        seconds = [int(frame["snapshot"]["now"]) for frame in frames]
        assert seconds == sorted(set(seconds)), "one a second"
        points = frame_points(frames)
        assert [point["at"] for point in points] == sorted({point["at"] for point in points})
        assert sum(point["tokens"] for point in points) == ASK["max_tokens"]
        totals = frames[-1]["snapshot"]["totals"]
        assert totals["generation_tokens"] == ASK["max_tokens"]
        again = await (await client.get("/dashboard/state")).json()
        assert again["history"]["seconds"][-len(points) :] == points


def frame_points(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [point for frame in frames for point in frame["points"]]


async def test_who_comes_back_gets_what_it_missed(tokenizer):
    async with served(ScriptedEngine(tokenizer.encode("once upon"), run=2), tokenizer) as client:
        await client.post("/v1/completions", json=ASK)
        await asyncio.sleep(1.1)
        async with client.get("/dashboard/feed?since=0") as response:
            first = await anext(events(response))
        assert sum(point["tokens"] for point in first["points"]) == ASK["max_tokens"]
        after = first["points"][-1]["at"] + 1
        async with client.get(f"/dashboard/feed?since={after}") as response:
            assert (await anext(events(response)))["points"] == []


@pytest.mark.parametrize("since", ["x", "-1", "1.5", "9" * 13, "²"])
async def test_since_is_a_second(tokenizer, since):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        response = await client.get("/dashboard/feed", params={"since": since})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "since")


# -- who may -----------------------------------------------------------------------------------------------------------


async def test_requests_are_shown_to_their_own_key_only_and_without_text(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("the fox is secret"), run=3)
    async with guarded(engine, tokenizer, AuthMiddleware(KeyStore([ALICE, BOB]))) as client:
        await client.post("/v1/completions", json=ASK, headers=bearer(ALICE))
        (one,) = await (await client.get("/dashboard/requests", headers=bearer(ALICE))).json()
        assert one["output_tokens"] == ASK["max_tokens"] and "secret" not in str(one)
        assert await (await client.get("/dashboard/requests", headers=bearer(BOB))).json() == []
        state = await (await client.get("/dashboard/state", headers=bearer(BOB))).text()
        assert "secret" not in state and one["id"] not in state


async def test_a_server_that_drains_says_so(tokenizer):
    engine, services = ScriptedEngine(tokenizer.encode("abc"), hold_after=1), []
    async with served(engine, tokenizer, services.append) as client, client.get("/dashboard/feed") as response:
        reported = events(response)
        running = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await until(lambda: engine.requests)
        assert (await anext(reported))["snapshot"]["server"]["status"] == "ready"
        draining = asyncio.create_task(services[0].drain(60))
        while (server := (await anext(reported))["snapshot"]["server"])["status"] == "ready":
            pass
        assert (server["status"], server["message"]) == ("draining", "running requests finish, new ones are refused")
        state = await (await client.get("/dashboard/state")).json()
        assert state["snapshot"]["server"]["status"] == "draining"
        running.cancel()
        await draining


# -- at whose cost -----------------------------------------------------------------------------------------------------


def deaf_client(client, path: str) -> socket.socket:
    """Asks and then reads nothing; its buffer is small."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((client.host, client.port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {client.host}\r\n\r\n".encode())
    return connection


async def test_a_reader_that_stops_reading_holds_nobody_up_and_is_hung_up_on(tokenizer, monkeypatch):
    engine = ScriptedEngine(tokenizer.encode("once upon a time"), run=2)
    made, limits = 0, list[asyncio.Timeout]()

    async def much(telemetry):
        nonlocal made
        made += 1
        return msgspec.Raw(b'"%s"' % (b"x" * 8_000_000))  # no socket holds that much

    def limited(seconds: float) -> asyncio.Timeout:
        limits.append(asyncio.timeout(seconds))
        return limits[-1]

    async with served(engine, tokenizer) as client:
        monkeypatch.setattr(about, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": limited}))
        monkeypatch.setattr(about, "STALL_SECONDS", 3600.0)
        with monkeypatch.context() as patch:
            patch.setattr(Telemetry, "snapshot", much)
            deaf = deaf_client(client, "/dashboard/feed")
            await until(lambda: limits)
        async with client.get("/dashboard/feed") as response:
            await anext(events(response))
            answer = await (await client.post("/v1/completions", json=ASK)).json()
            assert answer["usage"]["completion_tokens"] == ASK["max_tokens"]
            await anext(events(response))
            assert not limits[0].expired(), "nobody waited until it was hung up on"
            limits[0].reschedule(0.0)
            await until(limits[0].expired)
        assert made == 1, "nothing is made for a reader that does not read"
        deaf.close()


async def test_the_end_of_the_server_is_the_end_of_the_feed(tokenizer, monkeypatch):
    monkeypatch.setattr(about, "LATE", 100.0)  # until the next event
    async with served(ScriptedEngine([END]), tokenizer) as client, client.get("/dashboard/feed") as response:
        await anext(events(response))
        assert client.app is not None
        await client.app.shutdown()
        async with asyncio.timeout(60):
            await response.read()
