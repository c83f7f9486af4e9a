"""The real server with the bundled pair: the provenance adds up to the rest of the answer, at every route."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from tests.provenance.drafting import Json, check, check_counts, check_steps, joined

EXTRA: Json = {"provenance": True, "return_token_ids": True, "spec_decode_metrics": "detailed"}
ASK: Json = {"seed": 3, "max_tokens": 40}
CHAT: Json = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
SCHEMA: Json = {
    "type": "object",
    "properties": {"name": {"enum": ["Reynard the fox", "Isengrim the wolf"]}, "happy": {"type": "boolean"}},
    "required": ["name", "happy"],
    "additionalProperties": False,
}


async def posted(url: str, path: str, ask: Json) -> Json:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=ask) as answer:
        assert answer.status == 200, await answer.text()
        body: Json = await answer.json()
        return body


@pytest.mark.parametrize(
    "fields",
    [{"n": 2, "stop": "a", "seed": 8}, {"stop": ["e"], "min_tokens": 20}, {"speculation": {"off": True}}],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_whole_answers(url: str, path: str, fields: Json) -> None:
    prompt: Json = CHAT | {"logprobs": True} if "chat" in path else {"prompt": "Once upon a time", "logprobs": 1}
    body = await posted(url, path, ASK | EXTRA | prompt | fields)
    for choice in body["choices"]:
        record = choice["provenance"]
        check_steps(record)
        assert [token["id"] for token in record["tokens"]] == choice["token_ids"]
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        assert "".join(token["text"] for token in record["tokens"]) == text
        entries = choice["logprobs"].get("content") or [{"logprob": x} for x in choice["logprobs"]["token_logprobs"]]
        assert [token["logprob"] for token in record["tokens"]] == [entry["logprob"] for entry in entries]
        assert all({"propose", "forward", "draw", "commit"} <= set(step["ms"]) for step in record["steps"])
    if "speculation" in fields:
        assert all(step["drafted"] == 0 for choice in body["choices"] for step in choice["provenance"]["steps"])
    check_counts([choice["provenance"] for choice in body["choices"]], body["metrics"])


async def test_the_official_client_is_not_disturbed(client: openai.AsyncOpenAI) -> None:
    ask: Any = {"model": "bundled", **CHAT, "seed": 3, "max_tokens": 100, "stop": ["."]}
    whole = await client.chat.completions.create(**ask, extra_body=EXTRA)
    plain = await client.chat.completions.create(**ask)
    assert whole.choices[0].message == plain.choices[0].message
    record: Any = whole.choices[0].model_extra
    metrics: Any = whole.metrics
    content = whole.choices[0].message.content or ""
    check(record["provenance"], record["token_ids"], content, metrics)
    async with client.chat.completions.stream(**ask, extra_body=EXTRA) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == content
    chunks: Any = [event.chunk for event in events if event.type == "chunk"]
    extras = [choice.model_extra for chunk in chunks for choice in chunk.choices]
    parts = [one["provenance"] for one in extras if "provenance" in one]
    check(joined(parts), record["token_ids"], content, chunks[-1].metrics)


async def test_forced_tokens_are_reported_as_such(url: str) -> None:
    schema: Json = {"type": "json_schema", "json_schema": {"name": "beast", "schema": SCHEMA}}
    body = await posted(url, "/v1/chat/completions", ASK | EXTRA | CHAT | {"response_format": schema})
    choice = body["choices"][0]
    record = choice["provenance"]
    check(record, choice["token_ids"], choice["message"]["content"], body["metrics"])
    kinds = {token["origin"] for token in record["tokens"]}
    assert {"grammar", "target"} <= kinds
    assert sum(step["forced"] for step in record["steps"]) > 5


async def test_other_doors_ignore_the_field(url: str) -> None:
    ask: Json = CHAT | {"provenance": True, "max_tokens": 4, "model": "bundled"}
    for path, more in (("/v1/messages", {}), ("/api/chat", {"stream": False})):
        assert "provenance" not in await posted(url, path, ask | more)
