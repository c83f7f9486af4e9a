"""While a long prompt is read, its stream, the page and /metrics say how far it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient

from foresay.server.engine.generation import Sink
from foresay.server.models.service import Service
from foresay.spec.request import Request
from tests.server.scripted import END, STEP, ScriptedEngine, served
from tests.telemetry.scraping import Scrape

CHAT = {"messages": [{"role": "user", "content": "Tell me all of it"}]}
#: Of each API that streams what it reads as events.
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Tell me all of it", "max_tokens": 20},
    "/completion": {"prompt": "Tell me all of it", "n_predict": 20},
    "/v1/responses": {"input": "Tell me all of it"},
    "/v1/messages": CHAT | {"model": "toy", "max_tokens": 20},
}
#: Those with llama.cpp's objects.
OBJECTS = tuple(ASKED)[:3]


class Reading(ScriptedEngine):
    """Reads prompts until it is told to answer. service: whose telemetry sees its steps."""

    service: Service

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.read = asyncio.Event()

    def of(self, service: Service) -> None:
        self.service = service

    def step(self, read: int, cached: int = 3) -> None:
        """A step that reads on, of all requests."""
        reading = {request.id: (read, cached) for request in self.requests}
        self.service.telemetry.step(msgspec.structs.replace(STEP, emitted=0, prefill_rows=1, reading=reading))

    async def _say(self, request: Request, sink: Sink) -> None:
        await self.read.wait()
        await super()._say(request, sink)


@pytest.fixture
async def engine(tokenizer) -> Reading:
    return Reading([*tokenizer.encode("Once", False), END])


@pytest.fixture
async def client(engine, tokenizer) -> AsyncIterator[TestClient]:
    async with served(engine, tokenizer, engine.of, ping_seconds=0.01) as client:
        yield client


async def until(response: Any, text: str) -> list[str]:
    """The lines of a stream up to the first one that has ``text``."""
    lines: list[str] = []
    while text not in (lines or [""])[-1]:
        lines.append((await response.content.readline()).decode())
        assert lines[-1], f"the stream ended without {text}: {lines}"
    return lines


@pytest.mark.parametrize("path", OBJECTS)
async def test_return_progress_is_llama_cpps_objects(client, engine, path):
    response = await client.post(path, json=ASKED[path] | {"stream": True, "return_progress": True})
    await until(response, ": ping")
    total = len(engine.requests[0].prompt)
    engine.step(5)
    [early] = progress_in(await until(response, "prompt_progress"))
    assert {name: early[name] for name in ("total", "cache", "processed")} == {
        "total": total,
        "cache": 3,
        "processed": 5,
    }
    assert early["time_ms"] >= 0
    engine.read.set()
    lines = (await response.text()).splitlines()
    found = progress_in(lines)
    assert found[-1]["processed"] == found[-1]["total"] == total and found[-1]["cache"] == 3
    assert [one["processed"] for one in found] == [5] * (len(found) - 1) + [total]
    assert max(at for at, line in enumerate(lines) if "prompt_progress" in line) < min(
        at for at, line in enumerate(lines) if '"O' in line
    ), "before the text"
    whole = await client.post(path, json=ASKED[path] | {"return_progress": True})
    assert "prompt_progress" not in await whole.text(), "only streams have it"


def progress_in(lines: Sequence[str]) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [event["prompt_progress"] for event in events if "prompt_progress" in event]


async def test_the_page_and_metrics_say_what_is_still_to_be_read(client, engine):
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    await until(response, ": ping")
    total = len(engine.requests[0].prompt)
    for read in (0, 5, 9):
        if read:
            engine.step(read)
        [request] = await (await client.get("/dashboard/requests")).json()
        assert (request["prompt_tokens"], request["read_tokens"]) == (total, read)
        assert await unread(client) == total - read
    engine.read.set()
    await response.text()
    [request] = await (await client.get("/dashboard/requests")).json()
    assert request["read_tokens"] == total and await unread(client) == 0


async def unread(client: TestClient) -> float:
    return Scrape(await (await client.get("/metrics")).text()).sum("foresay:prompt_tokens_unread")


async def test_several_prompts_are_counted_together_and_shared_ones_once(client, engine):
    body = {"prompt": ["Tell me", "Tell me all of it"], "n": 2, "max_tokens": 9}
    response = await client.post("/v1/completions", json=body | {"stream": True, "return_progress": True})
    await until(response, ": ping")
    engine.step(4)
    [found] = progress_in(await until(response, "prompt_progress"))
    prompts = [len(request.prompt) for request in engine.requests if request.fork_of is None]
    assert (found["total"], found["processed"], found["cache"]) == (sum(prompts), 8, 6) and len(prompts) == 2
