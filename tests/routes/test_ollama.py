"""Ollama's API over a scripted engine, mostly through Ollama's own client."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import ollama
import pytest

import foresay
from foresay.server.api.ollama import routes
from tests.server.scripted import END, INFO, ScriptedEngine, served
from tests.server.wire import STORY

ASK: list[dict[str, Any]] = [{"role": "user", "content": "Tell"}]
CHATS = {"model": "toy", "messages": ASK}


@asynccontextmanager
async def clients(engine, tokenizer, **options):
    """Ollama's client and a plain one, for one server."""
    async with (
        served(engine, tokenizer, **options) as plain,
        ollama.AsyncClient(host=str(plain.make_url("/"))) as client,
    ):
        yield client, plain


async def lines(plain, path, **fields) -> list[dict[str, Any]]:
    """The lines of a stream."""
    response = await plain.post(path, json=fields)
    assert response.status == 200
    assert response.headers["Content-Type"] == "application/x-ndjson"
    body = (await response.read()).decode()
    assert body.endswith("\n")
    assert len(body.splitlines()) == body.count("\n"), "a line is one line for everybody"
    return [json.loads(line) for line in body.splitlines()]


async def test_chat_streams_by_default(tokenizer, script):
    async with clients(ScriptedEngine(script, 3), tokenizer) as (_, plain):
        *reported, last = await lines(plain, "/api/chat", **CHATS)
    assert "".join(line["message"]["content"] for line in reported) == STORY
    assert all(not line["done"] and "done_reason" not in line for line in reported)
    assert all(line["model"] == "toy" and line["created_at"].endswith("Z") for line in [*reported, last])
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["prompt_eval_count"] == len(tokenizer.encode("<|user|>Tell<|end|><|assistant|>"))
    assert last["total_duration"] >= last["eval_duration"] >= 0
    assert last["load_duration"] == 0


async def test_generate_goes_through_the_template_unless_raw(tokenizer, script):
    engine = ScriptedEngine(script, 3)
    async with clients(engine, tokenizer) as (client, plain):
        whole = await client.generate(model="toy", prompt="Tell", system="Be kind")
        pieces = [piece async for piece in await client.generate(model="toy", prompt="Tell", raw=True, stream=True)]
        *reported, last = await lines(plain, "/api/generate", model="toy", prompt="Tell")
    assert whole.response == "".join(piece.response or "" for piece in pieces) == STORY
    assert "".join(line["response"] for line in reported) == STORY
    assert (last["response"], last["done"]) == ("", True)
    prompts = [tokenizer.decode(request.prompt, skip_special_tokens=False) for request in engine.requests]
    assert prompts[:2] == ["<|system|>Be kind<|end|><|user|>Tell<|end|><|assistant|>", "Tell"]


async def test_an_answer_may_be_endless_and_an_option_without_effect(tokenizer, script):
    engine = ScriptedEngine(script)
    async with clients(engine, tokenizer) as (client, _):
        await client.generate(model="toy", prompt="x", raw=True, options={"num_predict": -1, "num_ctx": 64})
    (request,) = engine.requests
    assert request.params.max_tokens == INFO.max_model_len - len(request.prompt)


async def test_what_it_says_about_its_models(tokenizer):
    async with clients(ScriptedEngine([END]), tokenizer) as (client, plain):
        [listed] = (await client.list()).models
        shown = await client.show("toy")
        [running] = (await client.ps()).models
        version = await (await plain.get("/api/version")).json()
    assert listed.model == running.model == "toy:latest"
    assert listed.digest is not None and len(listed.digest) == 64
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == INFO.max_model_len
    facts = [shown.modelinfo[f"general.{name}"] for name in ("architecture", "basename", "parameter_count")]
    assert facts == ["llama", "toy", INFO.parameters]
    assert INFO.footprint is not None
    assert listed.size == INFO.weight_bytes and running.size == INFO.footprint.held and running.size_vram == 0
    for described in (listed.details, shown.details):
        assert described is not None
        assert (described.family, described.parameter_size, described.quantization_level) == ("llama", "1.2M", "F32")
    assert "generation_prompt" in (shown.template or "")
    assert "completion" in (shown.capabilities or [])
    assert running.context_length == INFO.max_model_len
    assert version["foresay"] == foresay.__version__
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4), "what VS Code's Copilot asks for"


async def test_errors_raise_in_ollamas_client(tokenizer, script):
    async with clients(ScriptedEngine(script), tokenizer) as (client, _):
        with pytest.raises(ollama.ResponseError, match="was not found") as caught:
            await client.chat(model="llama3", messages=ASK)
        assert caught.value.status_code == 404
        assert (await client.pull("toy")).status == "success", "it is served"
        with pytest.raises(ollama.ResponseError, match="/api/create") as caught:
            await client.create("toy", from_="toy")
        assert caught.value.status_code == 404


# -- pulls -------------------------------------------------------------------------------------------------------------


class SilentHub:
    """A hub that accepts connections and never answers. open: how many there are; changed: set when that changes."""

    def __init__(self) -> None:
        self.open, self.changed = 0, asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count(1)
        while await reader.read(1 << 16):
            pass
        writer.close()
        self.count(-1)

    def count(self, change: int) -> None:
        self.open += change
        self.changed.set()

    async def until(self, connections: int) -> None:
        while self.open != connections:
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
async def hub(monkeypatch, tmp_path):
    hub = SilentHub()
    async with await asyncio.start_server(hub.take, "127.0.0.1", 0) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(routes, "PULL_SECONDS", 0.02)
        yield hub


async def said(response, words: str) -> None:
    """Until a stream of a pull says this."""
    while words not in (line := (await response.content.readline()).decode()):
        assert line, "it has ended"


async def test_pulls_leave_chats_alone_and_end_with_their_clients(tokenizer, script, hub):
    async with served(ScriptedEngine(script), tokenizer) as client, AsyncExitStack() as opened:
        begun = []
        for name in ("one", "two"):
            pulled = client.post("/api/pull", json={"model": f"some/{name}"})
            begun.append(await opened.enter_async_context(pulled))
            await said(begun[-1], f"pulling some/{name}")
        await hub.until(2)
        chat = await (await client.post("/v1/chat/completions", json=CHATS)).json()
        assert chat["choices"][0]["message"]["content"] == STORY
        for one in begun:
            one.close()
        await hub.until(0)


async def test_why_a_model_cannot_be_pulled(tokenizer, script, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    async with served(ScriptedEngine(script), tokenizer) as client:
        response = await client.post("/api/pull", json={"model": "some/model", "stream": False})
        error = (await response.json())["error"]
    assert response.status == 404
    assert error.startswith("some/model is not a directory here, and HF_HUB_OFFLINE is set while")
