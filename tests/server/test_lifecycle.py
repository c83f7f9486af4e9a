"""A server that is full, loading, ready or draining, and the ids of its requests."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import ServerDisconnectedError

from foresay.server.api.common.route import EventStream
from foresay.server.engine.generation import EngineStatus
from foresay.server.host.service import Service
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import events, post


async def test_a_full_queue_answers_429(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=30)
    async with served(engine, tokenizer, most_running=2) as client:
        waiting = asyncio.create_task(post(client, "completions", prompt=["a", "b"]))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        refused = await post(client, "completions", prompt="c")
        assert refused.status == 429
        assert "Retry-After" in refused.headers
        assert (await refused.json())["error"]["code"] == "queue_full"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_while_loading_everything_but_health_says_how_far_it_is(tokenizer):
    engine = ScriptedEngine([END])
    engine.status, engine.info = EngineStatus("loading", "weights of the target", 0.4), None
    async with served(engine, tokenizer) as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/ready"), ("GET", "/v1/models")):
            response = await client.request(method, path, json={"prompt": "x"} if method == "POST" else None)
            error = (await response.json())["error"]
            assert response.status == 503
            assert error["code"] == "loading"
            assert error["message"] == "Loading model: weights of the target (40%)"
            assert "Retry-After" in response.headers
        health = await client.get("/health")
        assert health.status == 503
        assert (await health.json())["status"] == "loading"
        engine.status = EngineStatus("down", "the engine process died (signal 9)")
        assert (await client.get("/health")).status == 503
        assert (await (await client.get("/ready")).json())["error"]["code"] == "engine_down"


async def test_a_server_that_is_ready_says_what_it_serves(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        assert (await client.get("/ready")).status == 200
        health = await client.get("/health")
        assert (health.status, (await health.json())["exact"]) == (200, "yes")
        models = await (await client.get("/v1/models")).json()
        card = await (await client.get("/v1/models/toy")).json()
        assert models == {"object": "list", "data": [card], "first_id": "toy", "has_more": False, "last_id": "toy"}
        assert (card["id"], card["object"], card["max_model_len"]) == ("toy", "model", 512)
        assert (await client.get("/v1/models/org/other")).status == 404
        assert "/v1/models" in (await (await client.get("/")).json())["routes"]


async def test_request_ids_are_echoed_or_made(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        named = await client.post(
            "/v1/completions", json={"prompt": "x", "stream": True}, headers={"X-Request-Id": "r-1"}
        )
        assert named.headers["X-Request-Id"] == "r-1"
        assert (await events(named))[0]["id"] == "cmpl-r-1"
        own = await post(client, "completions", prompt="x", request_id="mine")
        assert (await own.json())["id"] == "cmpl-mine"
        assert len(own.headers["X-Request-Id"]) == 32
        for useless in ("x" * 200, "ü"):
            answer = await client.get("/ready", headers={"X-Request-Id": useless})
            assert answer.headers["X-Request-Id"] != useless
        assert "X-Request-Id" in (await client.get("/nothing")).headers


async def test_draining_refuses_new_requests_and_finishes_running_ones(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.05)
    services: list[Service] = []
    async with served(engine, tokenizer, services.append) as client:
        running = asyncio.create_task(post(client, "completions", prompt="x", max_tokens=6))
        while not engine.requests:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(services[0].drain(60))
        await asyncio.sleep(0)
        assert (await client.get("/ready")).status == 503
        refused = await post(client, "completions", prompt="x")
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
        assert (await (await running).json())["choices"][0]["text"] == "abcabc"
        await draining


async def test_draining_ends_what_takes_too_long(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.02)
    services: list[Service] = []
    async with served(engine, tokenizer, services.append) as client:
        streamed = await post(client, "completions", prompt="x", max_tokens=200, stream=True)
        whole = asyncio.create_task(post(client, "completions", prompt="x", max_tokens=200))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        await services[0].drain(0.1)
        *_, error = await events(streamed)
        assert error["error"]["message"] == "the server is shutting down"
        assert (await whole).status == 500
    assert len(engine.cancelled) == 2


async def test_a_client_that_is_gone_when_something_is_written_is_no_mistake(tokenizer, monkeypatch, caplog):
    async def write(self: EventStream, data: bytes) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(EventStream, "write", write)
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.01)
    async with served(engine, tokenizer) as client:
        with pytest.raises(ServerDisconnectedError):
            await post(client, "completions", prompt="x", stream=True)
        assert (await client.get("/health")).status == 200
    assert engine.cancelled == [engine.requests[0].id]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
