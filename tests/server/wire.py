"""What the tests of the HTTP layer send, and how they read a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

STORY = "Once upon a fox there was a 🦊🐍 who said: the\u2028end\u0085!"
ASK = {"messages": [{"role": "user", "content": "Tell"}]}


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


async def post(client, path, **fields):
    return await client.post(f"/v1/{path}", json=fields)
