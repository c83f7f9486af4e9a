"""Readers of a stream that are slow, or leave."""

from __future__ import annotations

import asyncio

import pytest

from foresay.server.engine.generation import Sink
from foresay.spec.request import Request
from tests.server.scripted import ScriptedEngine, served
from tests.server.wire import ASK, events, post


class Held(ScriptedEngine):
    """Says nothing before the gate opens."""

    gate: asyncio.Event

    async def _say(self, request: Request, sink: Sink) -> None:
        await self.gate.wait()
        await super()._say(request, sink)


async def test_comments_keep_a_quiet_stream_open(tokenizer):
    engine = Held(tokenizer.encode("ab"))
    engine.gate = asyncio.Event()
    async with served(engine, tokenizer, ping_seconds=0.05) as client, asyncio.timeout(60):
        response = await post(client, "chat/completions", **ASK, max_tokens=2, stream=True)
        first = (await response.content.readuntil(b"\n\n")).decode()
        assert '"role":"assistant"' in first, "the role goes out before the first token when that takes long"
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        engine.gate.set()
        assert b"data: [DONE]" in await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reader_who_leaves_frees_the_engine(tokenizer, stream):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.02)
    async with served(engine, tokenizer) as client:
        asking = asyncio.create_task(post(client, "completions", prompt="x", max_tokens=200, stream=stream))
        while engine.emitted < 3:
            await asyncio.sleep(0.01)
        if stream:
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(60):
            while not engine.cancelled:
                await asyncio.sleep(0.01)
    assert engine.cancelled == [engine.requests[0].id]


async def test_a_slow_reader_gets_everything_later_in_fewer_events(tokenizer, monkeypatch):
    tokens = tokenizer.encode("abcdefghij")
    engine = ScriptedEngine(tokens, pause=0.001)
    gate = asyncio.Event()
    await_gate_before_second_write(monkeypatch, gate)
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", prompt="x", max_tokens=100, stream=True)
        async with asyncio.timeout(60):
            while engine.emitted < 100:  # nobody reads, and the engine goes on
                await asyncio.sleep(0.01)
        gate.set()
        *chunks, _ = await events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcdefghij" * 10
    assert len(chunks) < 20


async def test_a_reader_too_far_behind_loses_the_stream(tokenizer, monkeypatch):
    engine = ScriptedEngine(tokenizer.encode("abcdefghij"), pause=0.001)
    gate = asyncio.Event()
    await_gate_before_second_write(monkeypatch, gate)
    async with served(engine, tokenizer, most_pending_tokens=20) as client:
        response = await post(client, "completions", prompt="x", max_tokens=200, stream=True)
        async with asyncio.timeout(60):
            while not engine.cancelled:
                await asyncio.sleep(0.01)
        assert engine.emitted < 40
        gate.set()
        *_, error = await events(response)
    assert error["error"]["code"] == "slow_reader"


def await_gate_before_second_write(monkeypatch, gate: asyncio.Event) -> None:
    """A connection whose buffers are full after one event, until the gate opens."""
    from aiohttp import web

    plain_write = web.StreamResponse.write
    writes = 0

    async def write(self, data):
        nonlocal writes
        writes += 1
        if writes > 1:
            await gate.wait()
        await plain_write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", write)
