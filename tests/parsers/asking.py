"""Asking a server around a scripted engine, as HTTP and with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.server.scripted import END, ScriptedEngine

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA},
}
USER: Any = {"role": "user", "content": "Weather?"}
#: A call, and what came of it.
MADE: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [MADE]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


def engine_saying(tokenizer, text: str, run: int = 1) -> ScriptedEngine:
    return ScriptedEngine([*tokenizer.encode(text, add_special_tokens=False), END], run)


async def ask(client, messages=(USER,), **fields):
    response = await client.post("/v1/chat/completions", json={"messages": list(messages), **fields})
    return response.status, await response.json()


async def chunks_of(client, **fields) -> list[dict]:
    response = await client.post("/v1/chat/completions", json={"messages": [USER], "stream": True, **fields})
    lines = (await response.read()).decode().split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def official(client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=str(client.make_url("/v1")), api_key="none", max_retries=0)


def prompt_of(engine, tokenizer) -> str:
    return str(tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False))
