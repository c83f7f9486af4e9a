"""What the tests of the HTTP layer send, and how they read a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from foresay.spec.request import Request
from tests.server.scripted import ScriptedEngine

PATHS = ["completions", "chat/completions"]
STORY = "Once upon a fox there was a 🦊🐍 who said: the\u2028end\u0085!"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell"}]}


async def events(response) -> list:
    """The parsed data lines; comments and the separators checked on the way."""
    body = (await response.read()).decode()
    assert body.endswith("\n\n")
    blocks = body.split("\n\n")[:-1]
    assert all(len(block.splitlines()) == 1 for block in blocks), "an event is one line for everybody"
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") for block in data)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in data]


async def until(true: Callable[..., object]) -> None:
    """Poll until it is so."""
    async with asyncio.timeout(180):
        while not true():
            await asyncio.sleep(0.005)


class Several(ScriptedEngine):
    """Says something else to each seed: the script, begun elsewhere."""

    def script_of(self, request: Request) -> Sequence[int]:
        begin = (request.params.seed or 0) % len(self.tokens)
        return [*self.tokens[begin:], *self.tokens[:begin]]


async def post(client, path, **fields):
    usual: dict[str, dict[str, Any]] = {"completions": {"prompt": "Tell"}, "chat/completions": ASK}
    return await client.post(f"/v1/{path}", json=usual.get(path, {}) | fields)


async def answer(client, path, **fields) -> dict[str, Any]:
    response = await post(client, path, **fields)
    body: dict[str, Any] = await response.json()
    assert response.status == 200, body
    return body


async def chunks_of(client, path, **fields) -> list[dict[str, Any]]:
    *chunks, done = await events(await post(client, path, **fields, stream=True))
    assert done == "[DONE]"
    return chunks


def joined(chunks, index) -> dict[str, Any]:
    """A completion choice of a stream, its pieces joined."""
    whole: dict[str, Any] = {"text": "", "logprobs": None}
    for choice in (one for chunk in chunks for one in chunk["choices"] if one["index"] == index):
        whole["text"] += choice["text"]
        if choice["logprobs"] is not None:
            before = whole["logprobs"] or {name: [] for name in choice["logprobs"]}
            whole["logprobs"] = {name: before[name] + values for name, values in choice["logprobs"].items()}
    return whole
