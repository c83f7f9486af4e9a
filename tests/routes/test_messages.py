"""Anthropic's messages over a scripted engine, mostly through Anthropic's own client."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from foresay.server.engine.generation import EngineStatus
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import STORY

ASK: dict[str, Any] = {"model": "toy", "max_tokens": 200, "messages": [{"role": "user", "content": "Tell"}]}


@asynccontextmanager
async def clients(engine, tokenizer, **options):
    """Anthropic's client and a plain one, for one server."""
    async with served(engine, tokenizer, **options) as plain:
        url = str(plain.make_url("/"))
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            yield client, plain


async def events(plain, **fields) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of every event of a stream."""
    response = await plain.post("/v1/messages", json={**ASK, "stream": True, **fields})
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    blocks = (await response.read()).decode().split("\n\n")
    assert blocks.pop() == ""
    pairs = [block.split("\n") for block in blocks]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in pairs)
    return [(name[7:], json.loads(data[6:])) for name, data in pairs]


@pytest.mark.parametrize("run", [1, 3, 50])
async def test_a_stream_has_anthropics_events_in_order(tokenizer, script, run):
    async with clients(ScriptedEngine(script, run), tokenizer) as (_, plain):
        reported = await events(plain)
    assert all(name == data["type"] for name, data in reported)
    names = [name for name, _ in reported]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start, block = reported[0][1]["message"], reported[1][1]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert block["content_block"] == {"type": "text", "text": ""}
    assert "".join(data["delta"]["text"] for name, data in reported if name == "content_block_delta") == STORY
    ending = reported[-2][1]
    assert ending["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert ending["usage"]["output_tokens"] == len(script)
    assert ending["metrics"]["exact"] is True


async def test_usage_adds_up_to_the_prompt(tokenizer, script):
    async with clients(ScriptedEngine(script), tokenizer) as (client, _):
        message = await client.messages.create(**ASK)
        counted = await client.messages.count_tokens(model="toy", messages=ASK["messages"])
    assert message.usage.cache_read_input_tokens == 3  # the script's
    assert message.usage.input_tokens + 3 == counted.input_tokens
    assert message.usage.output_tokens == len(script)


async def test_an_empty_answer_has_no_blocks(tokenizer):
    async with clients(ScriptedEngine([END]), tokenizer) as (client, plain):
        assert (await client.messages.create(**ASK)).content == []
        assert [name for name, _ in await events(plain)] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"system": "Be kind"}, "<|system|>Be kind<|end|><|user|>Tell<|end|><|assistant|>"),
        ({"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "<|system|>a\nb<|end|><|user|>"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "user", "content": [{"type": "text", "text": "b"}]},
                ]
            },
            "<|user|>a\nb<|end|><|assistant|>",
        ),
        (
            {"messages": [*ASK["messages"], {"role": "assistant", "content": "Once upon"}]},
            "<|user|>Tell<|end|><|assistant|>Once upon",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [{"type": "text", "text": "b", "cache_control": None}]},
                    {"role": "user", "content": "c"},
                ]
            },
            "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>",
        ),
    ],
)
async def test_what_the_model_sees(tokenizer, script, fields, rendered):
    engine = ScriptedEngine(script)
    async with clients(engine, tokenizer) as (client, _):
        await client.messages.create(**ASK | fields)
    seen = tokenizer.decode(engine.requests[0].prompt, skip_special_tokens=False)
    assert seen.startswith(rendered)
    if fields.get("messages"):
        assert seen == rendered


async def test_errors_raise_what_anthropics_client_calls_them(tokenizer, script):
    engine = ScriptedEngine(script)
    async with clients(engine, tokenizer) as (client, _):
        with pytest.raises(anthropic.NotFoundError, match="claude"):
            await client.messages.create(**ASK | {"model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match="top_k"):
            await client.messages.create(**ASK, extra_body={"top_k": -5})
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.batches.list()
        engine.status = EngineStatus("down", "gone")
        with pytest.raises(anthropic.InternalServerError, match="overloaded_error") as caught:
            await client.messages.create(**ASK)
        assert caught.value.status_code == 503
