"""Requests with options: answered or streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from foresay.spec.request import Request
from tests.server.scripted import ScriptedEngine
from tests.server.wire import ASK

PATHS = ["completions", "chat/completions"]


class Several(ScriptedEngine):
    """Says something else to each seed: the script, begun elsewhere."""

    def script_of(self, request: Request) -> Sequence[int]:
        begin = (request.params.seed or 0) % len(self.tokens)
        return [*self.tokens[begin:], *self.tokens[:begin]]


async def post(client, path, **fields):
    requested = ({"prompt": "Tell"} if path == "completions" else ASK) | fields
    return await client.post(f"/v1/{path}", json=requested)


async def answer(client, path, **fields) -> dict[str, Any]:
    response = await post(client, path, **fields)
    body: dict[str, Any] = await response.json()
    assert response.status == 200, body
    return body


async def chunks_of(client, path, **fields) -> list[dict[str, Any]]:
    response = await post(client, path, **fields, stream=True)
    *events, done = (await response.text()).split("\n\n")[:-1]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: ")]


def joined(chunks, index) -> dict[str, Any]:
    """A completion choice of a stream, its pieces joined."""
    whole: dict[str, Any] = {"text": "", "logprobs": None}
    for choice in (one for chunk in chunks for one in chunk["choices"] if one["index"] == index):
        whole["text"] += choice["text"]
        if choice["logprobs"] is not None:
            before = whole["logprobs"] or {name: [] for name in choice["logprobs"]}
            whole["logprobs"] = {name: before[name] + values for name, values in choice["logprobs"].items()}
    return whole
