"""Random trees, runs, stop strings and n: every token once, and the counts of the metrics."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from tests.provenance.drafting import Drafting, Json, check, check_counts, check_steps, ids_of, joined
from tests.responses.serving import serving
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import served

TOKENIZER = byte_level_tokenizer()
STORY = "Once upon a fox there was a 🦊🐍. The fox said: 'naïve tart' and 世界 ended."
STOPS = ["fox", " the", ".", "🐍", "d: 'n", "world", "x t", "世", "ended!"]
LAST = ("response.completed", "response.incomplete", "response.failed", "error")

requests = some.fixed_dictionaries(
    {
        "max_tokens": some.integers(1, 70),
        "stop": some.lists(some.sampled_from(STOPS), max_size=3, unique=True),
        "min_tokens": some.sampled_from([0, 0, 5]),
        "include_stop_str_in_output": some.booleans(),
        "skip_special_tokens": some.booleans(),
    }
)
seeds, lengths = some.integers(0, 1 << 30), some.integers(2, 9)
many = settings(max_examples=60)


def possible(fields: Json) -> Json:
    return fields | {"min_tokens": min(fields["min_tokens"], fields["max_tokens"])}


@many
@given(fields=requests, seed=seeds, longest=lengths, count=some.integers(1, 3), path=some.sampled_from(["", "chat/"]))
async def test_chat_and_completions(fields: Json, seed: int, longest: int, count: int, path: str) -> None:
    prompt: Json = {"messages": [{"role": "user", "content": "x"}], "logprobs": True} if path else {"prompt": "x"}
    ask = possible(fields) | prompt | {"n": count, "return_token_ids": True, "spec_decode_metrics": "detailed"}
    ask |= {"provenance": True} if path else {"provenance": True, "logprobs": 0}
    async with served(Drafting(ids_of(STORY, TOKENIZER), seed, longest), TOKENIZER) as client:
        whole = await (await client.post(f"/v1/{path}completions", json=ask)).json()
        events = (await (await client.post(f"/v1/{path}completions", json=ask | {"stream": True})).text()).split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    record = [choice["provenance"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path else choice["text"]
        held_to(choice["provenance"], choice["token_ids"], text, logprobs_of(choice))
    check_counts(record, whole["metrics"])
    streamed = []
    for index in range(count):
        pieces = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        texts = [(one["delta"].get("content") or "") if path else one["text"] for one in pieces]
        parts = [one.get("provenance", {"steps": [], "tokens": []}) for one in pieces]
        for text, part in zip(texts, parts, strict=True):
            assert "".join(token["text"] for token in part["tokens"]) == text
        streamed.append(joined(parts))
        ids = [token for one in pieces for token in one.get("token_ids", [])]
        held_to(streamed[-1], ids, "".join(texts), [value for one in pieces for value in logprobs_of(one)])
    check_counts(streamed, chunks[-1]["metrics"])


def held_to(record: Json, tokens: list[int], text: str, logprobs: list[float]) -> None:
    check_steps(record)
    assert [token["id"] for token in record["tokens"]] == tokens
    assert "".join(token["text"] for token in record["tokens"]) == text
    assert [token["logprob"] for token in record["tokens"]] == logprobs


def logprobs_of(choice: Json) -> list[float]:
    found = choice.get("logprobs") or {}
    legacy: list[float] = found.get("token_logprobs", [])
    return legacy + [one["logprob"] for one in found.get("content", [])]


@many
@given(fields=requests, seed=seeds, longest=lengths, protocol=some.sampled_from(["http", "socket"]))
@example(fields={"max_tokens": 3, "stop": ["fox"], "min_tokens": 0}, seed=1, longest=9, protocol="socket")
async def test_responses(fields: Json, seed: int, longest: int, protocol: str) -> None:
    ask = possible(fields) | {"input": "x", "provenance": True, "spec_decode_metrics": "detailed"}
    ask["max_output_tokens"] = ask.pop("max_tokens")
    script = ids_of(STORY, TOKENIZER)
    async with serving(Drafting(script, seed, longest), TOKENIZER) as (http, _):
        events = await ALL[protocol](http, ask)
        kept = await (await http.get(f"/v1/responses/{events[-1]['response']['id']}")).json()
    response = events[-1]["response"]
    written = response["output"][0]["content"][0]["text"]
    tokens = script[: response["usage"]["output_tokens"]]
    assert kept["provenance"] == response["provenance"]
    check(response["provenance"], tokens, written, response["metrics"])
    deltas = [event for event in events if "provenance" in event]
    for delta in deltas:
        assert "".join(token["text"] for token in delta["provenance"]["tokens"]) == delta["delta"]
    assert all(event in deltas or not event["delta"] for event in events if "delta" in event)
    assert joined([delta["provenance"] for delta in deltas]) == response["provenance"]


async def over_http(http: Any, ask: Json) -> list[Json]:
    events = (await (await http.post("/v1/responses", json=ask | {"stream": True})).text()).split("\n\n")[:-2]
    return [json.loads(event.partition("\ndata: ")[2]) for event in events]


async def over_socket(http: Any, ask: Json) -> list[Json]:
    async with http.ws_connect("/v1/responses") as socket:
        await socket.send_json({"type": "response.create"} | ask)
        events = [await socket.receive_json(timeout=180)]
        while events[-1]["type"] not in LAST:
            events.append(await socket.receive_json(timeout=180))
    return events


ALL = {"http": over_http, "socket": over_socket}


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_nothing_is_reported_unless_requested(path: str) -> None:
    ask: Json = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
    async with served(Drafting(ids_of(STORY, TOKENIZER)), TOKENIZER) as client:
        for fields in ({}, {"provenance": False}, {"provenance": None}):
            for stream in (False, True):
                body = await (await client.post(f"/v1/{path}", json=ask | fields | {"stream": stream})).text()
                assert "provenance" not in body
        refused = await client.post(f"/v1/{path}", json=ask | {"provenance": "yes"})
        assert refused.status == 400 and (await refused.json())["error"]["param"] == "provenance"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_that_nobody_wanted_is_discarded(stream: bool) -> None:
    ask: Json = {"prompt": "Once", "echo": True, "max_tokens": 0, "provenance": True, "stream": stream}
    async with served(Drafting(ids_of(STORY, TOKENIZER)), TOKENIZER) as client:
        body = await (await client.post("/v1/completions", json=ask)).text()
    bodies = [json.loads(event[6:]) for event in body.split("\n\n")[:-2]] if stream else [json.loads(body)]
    record = joined([one["provenance"] for body in bodies for one in body["choices"] if "provenance" in one])
    assert [step["discarded"] for step in record["steps"]] == [1]
    assert record["tokens"] == []
