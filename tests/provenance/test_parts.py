"""Thoughts and calls: the text of each token is reported as what it became (tests/routes/test_matrix.py: all else)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.provenance.drafting import Drafting, Json, check, check_steps, ids_of, joined
from tests.responses.serving import serving
from tests.server.scripted import served

TOOL: Json = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "the fox"}}</tool_call>'
SCRIPT = f"<think>Where is it?</think>I look. {CALL}"
CHAT: Json = {
    "messages": [{"role": "user", "content": "Look!"}],
    "tools": [{"type": "function", "function": TOOL}],
    "provenance": True,
    "return_token_ids": True,
    "spec_decode_metrics": "detailed",
}
FIELDS = {"text": "content", "reasoning": "reasoning_content"}


def text_of(field: str, record: Json) -> str:
    return "".join(token.get(field, "") for token in record["tokens"])


@pytest.mark.parametrize("seed", range(6))
async def test_a_whole_chat(able: Any, seed: int) -> None:
    script = ids_of(SCRIPT, able)
    async with served(Drafting(script, seed), able) as client:
        body = await (await client.post("/v1/chat/completions", json=CHAT)).json()
    (choice,) = body["choices"]
    message, record = choice["message"], choice["provenance"]
    assert message["reasoning_content"] == "Where is it?"
    check(record, script, message["content"], body["metrics"])
    check(record, choice["token_ids"], message["reasoning_content"], body["metrics"], "reasoning")
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert text_of("arguments", record) == arguments == '{"at": "the fox"}'


@pytest.mark.parametrize("seed", range(6))
async def test_a_streamed_chat(able: Any, seed: int) -> None:
    script = ids_of(SCRIPT, able)
    ask = CHAT | {"stream": True}
    async with served(Drafting(script, seed), able) as client:
        events = (await (await client.post("/v1/chat/completions", json=ask)).text()).split("\n\n")[:-2]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    record = joined([choice["provenance"] for choice in choices if "provenance" in choice])
    check_steps(record)
    assert [token["id"] for token in record["tokens"]] == script
    for field, name in FIELDS.items():
        assert text_of(field, record) == "".join(choice["delta"].get(name) or "" for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert text_of("arguments", record) == "".join(call["function"]["arguments"] for call in calls)


async def test_thoughts_that_are_not_shown_are_left_out(able: Any) -> None:
    script = ids_of(SCRIPT, able)
    for fields in ({}, {"stream": True}):
        async with served(Drafting(script), able) as client:
            ask = CHAT | {"include_reasoning": False} | fields
            body = await (await client.post("/v1/chat/completions", json=ask)).text()
        assert '"provenance"' in body and '"arguments"' in body
        assert '"reasoning' not in body.replace('"reasoning_tokens"', "") and "Where" not in body


@pytest.mark.parametrize("seed", range(6))
async def test_the_items_of_a_response(able: Any, seed: int) -> None:
    script = ids_of(SCRIPT, able)
    ask: Json = {"input": "Look!", "tools": [{"type": "function", **TOOL}], "provenance": True}
    events = []
    async with (
        serving(Drafting(script, seed), able) as (http, _),
        http.ws_connect("/v1/responses") as socket,
    ):
        await socket.send_json({"type": "response.create", "spec_decode_metrics": "detailed"} | ask)
        while not events or events[-1]["type"] != "response.completed":
            events.append(await socket.receive_json(timeout=180))
        response = events[-1]["response"]
        kept = await (await http.get(f"/v1/responses/{response['id']}")).json()
    assert kept["provenance"] == response["provenance"]
    thought, message, call = response["output"]
    record = response["provenance"]
    check(record, script, message["content"][0]["text"], response["metrics"])
    assert text_of("reasoning", record) == thought["content"][0]["text"] == "Where is it?"
    assert text_of("arguments", record) == call["arguments"] == '{"at": "the fox"}'
    assert joined([event["provenance"] for event in events if "provenance" in event]) == record


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_nothing_is_reported_unless_requested(able: Any, path: str) -> None:
    ask: Json = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
    async with served(Drafting(ids_of(SCRIPT, able)), able) as client:
        for fields in ({}, {"provenance": False}, {"provenance": None}):
            for stream in (False, True):
                body = await (await client.post(f"/v1/{path}", json=ask | fields | {"stream": stream})).text()
                assert "provenance" not in body
        refused = await client.post(f"/v1/{path}", json=ask | {"provenance": "yes"})
        assert refused.status == 400 and (await refused.json())["error"]["param"] == "provenance"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_that_nobody_wanted_is_discarded(able: Any, stream: bool) -> None:
    ask: Json = {"prompt": "Once", "echo": True, "max_tokens": 0, "provenance": True, "stream": stream}
    async with served(Drafting(ids_of(SCRIPT, able)), able) as client:
        body = await (await client.post("/v1/completions", json=ask)).text()
    bodies = [json.loads(event[6:]) for event in body.split("\n\n")[:-2]] if stream else [json.loads(body)]
    record = joined([one["provenance"] for body in bodies for one in body["choices"] if "provenance" in one])
    assert [step["discarded"] for step in record["steps"]] == [1]
    assert record["tokens"] == []
