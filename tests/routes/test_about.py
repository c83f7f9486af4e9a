"""What the server says about itself, and of texts: tokens, rendering."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import foresay
from foresay.server.api.about.routes import HIDDEN, settings_shown
from foresay.server.settings.config import ServeConfig
from tests.server.scripted import INFO, ScriptedEngine, served
from tests.server.wire import until


async def answer(client, path):
    response = await client.get(path)
    return response.status, await response.json()


async def test_version_and_ping(tokenizer):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        assert await answer(client, "/version") == (200, {"version": foresay.__version__})
        assert await answer(client, "/ping") == await answer(client, "/health")
        assert (await client.head("/ping")).status == 200


async def test_the_index_lists_every_door(tokenizer):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        _, body = await answer(client, "/")
    assert {"/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize", "/openapi.json"} <= set(body["routes"])


async def test_server_info_shows_settings_and_engine(tokenizer):
    async with served(ScriptedEngine([5]), tokenizer, max_seqs=3) as client:
        _, body = await answer(client, "/server_info")
    assert body["config"]["max_seqs"] == 3
    assert body["engine"] == msgspec.json.decode(msgspec.json.encode(INFO))
    assert (body["model"], body["status"], body["version"]) == ("toy", "ok", foresay.__version__)


async def test_keys_are_not_shown(tokenizer):
    config = ServeConfig(api_key=("sk-sesame-0123456789",), draft_tokens=2)
    async with served(ScriptedEngine([5]), tokenizer, api_key=config.api_key, draft_tokens=2) as client:
        body = await (await client.get("/server_info")).text()
    assert "sesame" not in body
    shown = settings_shown(config)
    assert (shown["api_key"], shown["draft_tokens"]) == (HIDDEN, 2)
    assert not settings_shown(ServeConfig())["api_key"]


async def test_load_counts_who_runs_and_who_waits(tokenizer):
    engine = ScriptedEngine([5], hold_after=9)
    async with served(engine, tokenizer) as client:
        assert await answer(client, "/load") == (200, {"running": 0, "waiting": 0, "server_load": 0})
        ask = {"prompt": ["a"] * (INFO.max_seqs + 2), "max_tokens": 50, "ignore_eos": True}
        running = asyncio.create_task(client.post("/v1/completions", json=ask))
        await until(lambda: len(engine.requests) == INFO.max_seqs + 2)
        assert await answer(client, "/load") == (
            200,
            {"running": INFO.max_seqs, "waiting": 2, "server_load": INFO.max_seqs + 2},
        )
        running.cancel()
        async with asyncio.timeout(180):
            while await answer(client, "/load") != (200, {"running": 0, "waiting": 0, "server_load": 0}):
                await asyncio.sleep(0.01)


async def test_known_models_that_rarely_call_tools_are_marked(tokenizer) -> None:
    for target, marked in (("smollm2", True), ("Qwen/Qwen2.5-Coder-1.5B-Instruct", True), ("Qwen/Qwen3-8B", None)):
        engine = ScriptedEngine([5])
        engine.info = msgspec.structs.replace(INFO, target=target)
        async with served(engine, tokenizer) as client:
            card = await (await client.get("/v1/models/toy")).json()
            assert card.get("rarely_calls_tools") is marked


# -- tokenizing, detokenizing and rendering say what the model would see -----------------------------------------------


ASK = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Once 🦊"}]
RENDERED = "<|system|>Be kind<|end|><|user|>Once 🦊<|end|><|assistant|>"


@pytest.fixture
async def client(tokenizer):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        yield client


async def said(client, path, **fields):
    response = await client.post(path, json=fields)
    return response.status, await response.json()


async def test_a_text_and_back(client, tokenizer):
    status, body = await said(client, "/tokenize", model="toy", prompt="Once 🦊", return_token_strs=True)
    assert status == 200
    assert body["tokens"] == tokenizer.encode("Once 🦊")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["token_strs"][0].startswith("On")
    assert body["max_model_len"] == INFO.max_model_len
    assert await said(client, "/detokenize", model="toy", tokens=body["tokens"]) == (
        200,
        {"prompt": "Once 🦊", "content": "Once 🦊"},  # vLLM's name and llama.cpp's
    )


async def test_token_strings_only_on_request(client):
    assert (await said(client, "/tokenize", prompt="Once"))[1]["token_strs"] is None
    assert (await said(client, "/tokenize", content="Once"))[1]["count"] == 1, "as llama.cpp's clients ask"


async def test_special_tokens_are_written_out(client):
    assert (await said(client, "/detokenize", tokens=[2, 0]))[1]["prompt"] == "<|user|><|end|>"


async def test_a_conversation_has_the_tokens_of_its_rendering(client, tokenizer):
    status, body = await said(client, "/tokenize", messages=ASK)
    assert (status, body["tokens"]) == (200, tokenizer.encode(RENDERED))
    _, bare = await said(client, "/tokenize", messages=ASK, add_generation_prompt=False)
    assert bare["tokens"] == body["tokens"][:-1]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/apply-template"])
async def test_rendering_shows_what_a_completion_begins_with(client, tokenizer, path):
    status, body = await said(client, path, messages=ASK, temperature=0.5, max_tokens=3)
    assert status == 200
    assert body["prompt"] == RENDERED
    assert body["token_ids"] == tokenizer.encode(RENDERED)
    _, answer = await said(client, "/v1/chat/completions", messages=ASK, max_tokens=3, return_token_ids=True)
    assert answer["prompt_token_ids"] == body["token_ids"]
