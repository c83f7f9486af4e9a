"""Thoughts and calls: the text of each token is reported as what it became (tests/routes/test_matrix.py: all else).
Slow readers get fewer and longer deltas, in which no step and no token is missing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from foresay.server.api.common.streaming import pieces_of
from foresay.server.api.openai.completions import CompletionAnswer
from foresay.server.engine.generation import Generation
from foresay.server.models.service import AnswerOrigin
from foresay.server.schemas.chat import CompletionRequest
from foresay.server.text.choice import Choice
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.provenance.drafting import Drafting, Json, check, check_steps, ids_of, joined
from tests.responses.bare import STUCK, Bare
from tests.responses.serving import serving
from tests.server.scripted import END, served
from tests.server.wire import until

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


# -- slow readers ------------------------------------------------------------------------------------------------------


STORY = "Once upon a time there was a fox. " * 20


@pytest.mark.parametrize("seed", range(3))
async def test_a_socket_that_is_read_late(tokenizer: Any, seed: int) -> None:
    """Its first event is so large that the writer is stuck at once."""
    script = ids_of(STORY, tokenizer)
    engine = Drafting(script, seed, pause=0.001)
    async with (
        serving(engine, tokenizer, send_buffer=2048) as (http, _),
        await Bare.connect(int(http.port or 0), 2048) as bare,
    ):
        create: Json = {"input": "x", "provenance": True, "spec_decode_metrics": "detailed", "max_output_tokens": 400}
        await bare.create(**create, **STUCK)
        await until(lambda: engine.requests and not engine._tasks)
        events: list[Json] = []
        while not events or events[-1]["type"] != "response.completed":
            events.append(json.loads((await bare.read())[1]))
    response = events[-1]["response"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    steps = len(response["provenance"]["steps"])
    assert len(deltas) < steps, "they were to be merged"
    assert max(len(event["provenance"]["steps"]) for event in deltas) > 5
    assert joined([event["provenance"] for event in deltas]) == response["provenance"]
    check(response["provenance"], script, STORY, response["metrics"])


async def late(engine: Drafting, tokenizer: Any, count: int) -> list[Json]:
    """The chunks of a completion whose reader comes when all is over."""
    requests = [Request(id=f"r{n}", prompt=[5], params=SamplingParams(max_tokens=400)) for n in range(count)]
    choices = [Choice(request, tokenizer, [END], stop=("fox.",), provenance=True) for request in requests]
    shown = CompletionRequest(prompt="", provenance=True, return_token_ids=True, spec_decode_metrics="detailed")
    answer = CompletionAnswer(AnswerOrigin(id="1", model="toy", fingerprint="fs", exact=True), choices, shown)
    async with Generation(engine, requests) as generation:
        await until(lambda: not engine._tasks)
        batch = list(pieces_of(answer, generation, await generation.next(None)))
    chunks: list[Json] = msgspec.to_builtins([one for index, piece in batch for one in answer.chunks(index, piece)])
    return chunks


async def test_choices_that_end_together_have_one_last_chunk(tokenizer: Any) -> None:
    chunks = await late(Drafting(ids_of(STORY, tokenizer)), tokenizer, count=3)
    ended = [chunk["choices"][0]["finish_reason"] is not None for chunk in chunks]
    assert sum(ended) == 3
    assert [position for position, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]


async def test_steps_that_wait_for_the_writer_are_one_chunk_that_holds_them_all(tokenizer: Any) -> None:
    script = ids_of(STORY, tokenizer)
    _, chunk = await late(Drafting(script, 4), tokenizer, count=1)
    (received,) = chunk["choices"]
    assert received["text"] == STORY[: STORY.index("fox.")]
    steps = received["provenance"]["steps"]
    assert sum(step["discarded"] for step in steps) == len(script) - len(received["token_ids"])
    assert sum(not step["accepted"] and step["drafted"] > 0 for step in steps) > 10, "the engine never heard of the end"
    check(received["provenance"], received["token_ids"], received["text"], chunk["metrics"])
