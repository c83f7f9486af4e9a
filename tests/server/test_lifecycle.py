"""A server that is full, loading, ready or draining, and the ids of its requests."""

from __future__ import annotations

from foresay.server.engine.generation import EngineStatus
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import events, post


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
