"""One model that leaves when nobody asks for it, or when Ollama's clients say so."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from unittest.mock import AsyncMock, Mock

import ollama
import pytest

from foresay.server.api.admin import _changed
from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import AuthMiddleware
from foresay.server.models.model import Model
from foresay.server.models.service import ServerState, Text
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.errors import InvalidRequest
from tests.models.serving import Serving, serving
from tests.server.scripted import INFO

FOX = "said the fox"
TURN = {"role": "user", "content": "Who?"}
KEYS = ["a-key-of-alice-16", "a-key-of-bob-16-c"]


async def until_loaded(server: Serving, loaded: bool) -> None:
    await server.settle("fox", "in" if loaded else "out")


@asynccontextmanager
async def ollamas(tokenizer, texts=None, **options):
    async with (
        serving(tokenizer, texts or {"fox": FOX}, **options) as server,
        ollama.AsyncClient(host=str(server.client.make_url("/"))) as client,
    ):
        yield server, client


async def test_unloaded_it_is_well_and_listed_and_comes_again_without_a_503(tokenizer):
    async with serving(tokenizer, {"fox": FOX}) as server:
        assert (await server.json("/health"))["status"] == "ok"
        card = await server.json("/v1/models/fox")
        server.by_name["fox"].usual_keep = 0.05
        server.models.residency.arrived(server.by_name["fox"])
        await until_loaded(server, False)
        server.by_name["fox"].usual_keep = None
        assert (await server.json("/health"))["status"] == "unloaded"
        assert await server.json("/ready") == {"status": "ready"}
        assert (await server.json("/v1/models"))["data"] == [card]
        assert (await server.json("/api/ps"))["models"] == []
        assert len((await server.json("/api/tags"))["models"]) == 1
        snapshot = (await server.json("/dashboard/state"))["snapshot"]
        assert snapshot["server"]["status"] == "unloaded"
        gate = server.by_name["fox"].gate
        gate.clear()
        asking = [asyncio.create_task(server.json("/v1/completions", model="fox", prompt="x")) for _ in range(3)]
        await server.settle("fox", "coming")
        health = await server.client.get("/health")
        assert (health.status, (await health.json())["status"]) == (200, "loading")
        gate.set()
        assert [(await one)["choices"][0]["text"] for one in asking] == [FOX] * 3
        assert server.by_name["fox"].loads == 2


async def test_a_reload_that_fails_is_reported_and_tried_again(tokenizer):
    async with serving(tokenizer, {"fox": FOX}, keep=0.05) as server:
        await until_loaded(server, False)
        server.by_name["fox"].wrong = "the disk is gone"
        refused = await server.json("/v1/completions", status=503, model="fox", prompt="x")
        assert refused["error"]["code"] == "load_failed"
        health = await server.client.get("/health")
        body = await health.json()
        assert (health.status, body["status"]) == (503, "failed")
        assert "the disk is gone" in body["message"]
        server.by_name["fox"].wrong = ""
        server.models.find("fox").refused_until = 0.0
        assert (await server.json("/v1/completions", model="fox", prompt="x"))["choices"][0]["text"] == FOX


@pytest.mark.parametrize("state", ["out", "coming", "in", "leaving"])
async def test_no_stream_moves_into_another_model_whether_it_is_loaded_or_not(tokenizer, monkeypatch, state):
    async with serving(tokenizer, {"fox": FOX}) as server:
        entry, reload = server.models.find("fox"), AsyncMock()
        monkeypatch.setattr(server.models, "reload", reload)
        entry.state = state
        for changes in ({"target": str(BUNDLED / "target")}, {"max_seqs": 2}):
            await _changed(server.models, entry, changes)
        for less in ("max_model_len", "kv_tokens"):
            with pytest.raises(InvalidRequest, match=f"^{less} .2. is too small: running requests may need"):
                await _changed(server.models, entry, {less: 2})
        entry.state = "in"
    assert [call.args[2] for call in reload.call_args_list] == [False, True]


async def test_what_was_read_of_the_settings_before_a_reload_is_not_kept(monkeypatch):
    before, after = ServeConfig(max_model_len=64), ServeConfig(max_model_len=32)
    model, old, new = Model(["a"], before, ServerState(), lambda status: None), Mock(), Mock()
    await model.look()
    model.engine.info = INFO

    async def read(config: ServeConfig) -> Text:
        await model.reload(after, new, {})
        return old

    monkeypatch.setattr(model, "read", read)
    await model.prepare()
    assert (model.service.text, model.service.longest) == (new, 32) and model.info is None


async def test_requests_without_an_answer_of_the_model_do_not_keep_it(tokenizer):
    async with serving(tokenizer, {"fox": FOX}, keep=0.2) as server:
        async with asyncio.timeout(60):
            while server.models.find("fox").loaded:
                await server.json("/health")
                await server.json("/v1/models")
                await server.json("/tokenize", prompt="x")


async def test_an_open_websocket_does_not_keep_it_and_a_message_brings_it_back(tokenizer):
    async with serving(tokenizer, {"fox": FOX}, keep=0.05) as server:
        async with server.client.ws_connect("/v1/responses") as socket:
            for _ in range(2):
                await until_loaded(server, False)
                await socket.send_json({"type": "response.create", "model": "fox", "input": "Who?"})
                while (event := await socket.receive_json(timeout=180))["type"] != "response.completed":
                    assert event["type"] != "error", event
        assert server.by_name["fox"].loads == 3


# -- keep_alive ------------------------------------------------------------------------------------------------------


async def test_keep_alive_0_unloads_after_the_answer(tokenizer):
    async with ollamas(tokenizer) as (server, client):
        assert (await client.chat(model="fox", messages=[TURN], keep_alive=0)).message.content == FOX
        await until_loaded(server, False)
        assert (await client.ps()).models == []
        assert (await client.generate(model="fox", prompt="x", keep_alive="0s")).response == FOX
        await until_loaded(server, False)
        assert server.by_name["fox"].loads == 2


async def test_an_empty_prompt_loads_or_unloads(tokenizer):
    async with ollamas(tokenizer) as (server, client):
        assert (await client.generate(model="fox", keep_alive=0)).done_reason == "unload"
        await until_loaded(server, False)
        assert (await client.chat(model="fox", messages=[], keep_alive=0)).done_reason == "unload"
        assert server.by_name["fox"].loads == 1, "nothing is loaded to be unloaded"
        assert (await client.chat(model="fox", messages=[], keep_alive="10m")).done_reason == "load"
        assert server.by_name["fox"].loads == 2
        [running] = (await client.ps()).models
        assert running.expires_at is not None
        assert 540 < (running.expires_at - datetime.now(UTC)).total_seconds() <= 600


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("1.5h", 5400), (90, 90), (90.5, 90.5), ("90s", 90), (-1, None), ("-1m", None)],
)
async def test_the_last_request_sets_how_long_it_stays(tokenizer, keep_alive, seconds):
    async with ollamas(tokenizer) as (_, client):
        await client.generate(model="fox", prompt="x", keep_alive=keep_alive)
        [running] = (await client.ps()).models
        assert running.expires_at is not None
        left = (running.expires_at - datetime.now(UTC)).total_seconds()
        assert left > 1e9 if seconds is None else seconds - 60 < left <= seconds
        await client.generate(model="fox", prompt="x")
        [running] = (await client.ps()).models
        assert running.expires_at is not None
        assert (running.expires_at - datetime.now(UTC)).total_seconds() > 1e9, "by itself it stays"


@pytest.mark.parametrize("keep_alive", ["soon", "5", "", "5 m", "m", "1d", "--5m", "5m5", "9" * 400 + "s", "1m" * 300])
async def test_a_span_that_is_none_is_refused_by_name(tokenizer, keep_alive):
    async with ollamas(tokenizer) as (server, _):
        for path, ask in (("/api/chat", {"messages": [TURN]}), ("/api/generate", {"prompt": ""})):
            body = await server.json(path, status=400, **{"model": "fox", "keep_alive": keep_alive, **ask})
            assert "keep_alive" in body["error"] and len(body["error"]) < 2500


async def test_a_number_beyond_all_time_is_for_ever(tokenizer):
    async with ollamas(tokenizer) as (server, client):
        await client.generate(model="fox", prompt="x", keep_alive=1e300)
        [running] = (await client.ps()).models
        assert running.expires_at is not None and running.expires_at.year == 9999
        await until_loaded(server, True)


async def test_where_there_are_several_keys_nobody_sends_away_what_others_use(tokenizer):
    async with serving(tokenizer, {"fox": FOX}, auth=AuthMiddleware(KeyStore(KEYS))) as server:
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        for ask in ({"prompt": "x", "stream": False}, {"prompt": ""}):
            body: dict[str, Any] = {"model": "fox", "keep_alive": 0, **ask}
            async with server.client.post("/api/generate", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
        await asyncio.sleep(0.1)
        assert server.models.find("fox").loaded
        assert server.by_name["fox"].unloads == 0


async def test_ollama_lists_all_and_shows_without_loading(tokenizer):
    async with ollamas(tokenizer, {"fox": FOX, "owl:8b": "said the owl"}) as (server, client):
        assert [model.model for model in (await client.list()).models] == ["fox:latest", "owl:8b"]
        for name in ("fox", "fox:latest", "owl:8b"):
            shown = await client.show(name)
            assert "completion" in (shown.capabilities or []) and "generation_prompt" in (shown.template or "")
        assert server.loads == {"fox": 0, "owl:8b": 0}
        await client.generate(model="owl:8b", prompt="x")
        [running] = (await client.ps()).models
        assert running.model == "owl:8b"
        with pytest.raises(ollama.ResponseError, match="was not found"):
            await client.generate(model="wolf", prompt="x")
