"""Tokens that are held back until a chunk has enough of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.asking import chunks_of, joined, post
from tests.server.scripted import ScriptedEngine, served


@pytest.mark.parametrize("interval", [2, 4, 100])
async def test_a_chunk_has_at_least_stream_interval_tokens(tokenizer, interval):
    tokens = tokenizer.encode("abcdefghijklmnopqrst")
    async with served(ScriptedEngine(tokens, run=1), tokenizer) as client:
        ask: dict[str, Any] = {"max_tokens": len(tokens), "logprobs": 0}
        chunks = await chunks_of(client, "completions", **ask, stream_interval=interval)
        every = await chunks_of(client, "completions", **ask)
    sizes = [len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks]
    assert sizes[0] == 1
    assert all(size == interval for size in sizes[1:-1])
    assert len(every) == len(tokens)
    assert joined(chunks, 0) == joined(every, 0)


async def test_what_was_held_back_comes_before_an_error(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abcdef"), fail_after=3)
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", stream=True, stream_interval=50)
        *chunks, error = [json.loads(event[6:]) for event in (await response.text()).split("\n\n")[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert error["error"]["type"] == "engine_error"
