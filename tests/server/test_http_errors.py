"""Errors over HTTP: before an answer, of one choice of several, while a server loads; and the ids of requests."""

from __future__ import annotations

import pytest

from foresay.server.schemas.errors import EngineFailed
from foresay.spec.request import Delta
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import events, post


async def test_a_path_that_is_not_there_is_named(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        response = await client.post("/v1/embeddings")
        told = (await response.json())["error"]
    assert (response.status, told["message"]) == (404, "Not Found: POST /v1/embeddings")


async def test_a_body_that_is_not_utf8_is_told_so(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        response = await client.post("/v1/completions", data='{"prompt": "ä"}'.encode("latin-1"))
        told = (await response.json())["error"]["message"]
    assert (response.status, told) == (400, "The body is not valid JSON: it is not in UTF-8")


async def test_one_broken_choice_ends_the_answer_and_frees_the_others(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.01)
    plain_say = engine._say

    async def say(request, sink):
        if request.id.endswith("-1"):
            sink.fail(EngineFailed("only this one"))
        await plain_say(request, sink)

    engine._say = say  # type: ignore[method-assign]
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", prompt=["a", "b"], max_tokens=200)
        assert response.status == 500
    assert sorted(name[-2:] for name in engine.cancelled) == ["-0"]


async def test_a_request_whose_own_options_leave_no_token_is_at_fault(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"))

    async def say(request, sink):
        sink.put(
            Delta(
                id=request.id,
                tokens=[],
                finish_reason="error",
                error="none is left",
                fault=(("bad_words",), "none is left", ""),
            )
        )

    engine._say = say  # type: ignore[method-assign]
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", prompt="a")
        assert response.status == 400
        error = (await response.json())["error"]
        assert (error["param"], error["message"], error["type"]) == (
            *("bad_words", "none is left"),
            "invalid_request_error",
        )


@pytest.mark.parametrize("given", ["a b", "x" * 129, "a\tb", 'a" key=root', "ü", "id=1 key=alice"])
async def test_a_request_id_that_could_write_into_a_log_is_replaced(tokenizer, script, given):
    async with served(ScriptedEngine(script), tokenizer) as client:
        response = await client.get("/health", headers={"X-Request-Id": given})
        assert len(response.headers["X-Request-Id"]) == 32
        assert response.headers["X-Request-Id"].isalnum()


@pytest.mark.parametrize("given", ["", "x" * 900_000, "a b", "a\nb"])
async def test_a_request_id_in_the_body_is_short_and_plain(tokenizer, script, given):
    async with served(ScriptedEngine(script), tokenizer) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "request_id": given})
        output = await response.read()
        assert response.status == 400
        assert b'"param":"request_id"' in output
        assert len(output) < 3000


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
        assert "X-Request-Id" in (await client.get("/nothing")).headers
