"""``/v1/responses`` over HTTP through the official client, around an engine that says what a test wants."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from foresay.server.api.responses.store import Responses
from tests.responses.serving import STORY, address, asking, saying, serving
from tests.server.live import openai_client
from tests.server.scripted import END, INFO, ScriptedEngine
from tests.server.wire import until


async def test_whole_and_streamed_are_the_same(tokenizer):
    async with asking(saying(tokenizer, run=3), tokenizer) as client:
        whole = await client.responses.create(model="toy", input="Tell", instructions="Be brief.", metadata={"a": "b"})
        stream = await client.responses.create(model="toy", input="Tell", stream=True)
        events = [event async for event in stream]
        async with client.responses.stream(model="toy", input="Tell") as following:
            final = await following.get_final_response()
    assert whole.status == "completed" and whole.output_text == STORY == final.output_text
    assert (whole.instructions, whole.metadata) == ("Be brief.", {"a": "b"})
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == STORY
    assert whole.usage is not None and final.usage is not None
    assert whole.usage.output_tokens == final.usage.output_tokens == len(tokenizer.encode(STORY, False)) + 1
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    extra: Any = whole
    assert extra.seed == 7 and extra.metrics["exact"] is True


async def test_a_response_goes_on_where_another_ended(tokenizer):
    engine = saying(tokenizer)
    async with asking(engine, tokenizer) as client:
        first = await client.responses.create(model="toy", input="Tell", instructions="Be brief.")
        await client.responses.create(model="toy", input="And then?", previous_response_id=first.id)
    prompt = tokenizer.decode(engine.requests[1].prompt, skip_special_tokens=False)
    assert prompt == f"<|user|>Tell<|end|><|assistant|>{STORY}<|end|><|user|>And then?<|end|><|assistant|>"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_what_a_model_wrote_is_read_again_as_it_was_spelled(tokenizer, streamed):
    """Letter by letter, where the tokenizer would spell words."""
    spelled = [token for letter in "Once upon" for token in tokenizer.encode(letter, False)]
    engine = ScriptedEngine([*spelled, END])
    async with serving(engine, tokenizer) as (http, service), openai_client(address(http)) as client:
        first = client.responses.create(model="toy", input="Tell", stream=streamed)
        found = await first
        id = [event async for event in found][-1].response.id if streamed else found.id
        await client.responses.create(model="toy", input="And then?", previous_response_id=id)
        before = engine.requests[0].prompt
        assert engine.requests[1].prompt[: len(before) + len(spelled)] == before + spelled
        behind: Any = service.engine
        behind.info = replace(INFO, identity={"weights": "others"})  # under the same name, after a reload
        await client.responses.create(model="toy", input="And then?", previous_response_id=id)
        assert engine.requests[2].prompt != engine.requests[1].prompt
    requested = tokenizer.decode(engine.requests[2].prompt, skip_special_tokens=False)
    assert requested == tokenizer.decode(engine.requests[1].prompt, skip_special_tokens=False)


async def test_retrieve_delete_and_input_items(tokenizer):
    async with asking(saying(tokenizer), tokenizer) as client:
        first = await client.responses.create(model="toy", input="One")
        second = await client.responses.create(model="toy", input="Two", previous_response_id=first.id)
        assert await client.responses.retrieve(second.id) == second
        listed = await client.responses.input_items.list(second.id, order="asc", limit=2)
        assert [item.role for item in listed.data] == ["user", "assistant"]  # type: ignore[union-attr]
        assert listed.has_more
        everything: list[Any] = [item async for item in client.responses.input_items.list(second.id, limit=1)]
        assert [item.content[0].text for item in everything] == ["Two", STORY, "One"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        third = await client.responses.create(model="toy", input="Three", previous_response_id=second.id)
        assert third.status == "completed"


async def test_a_running_response_is_cancelled_from_elsewhere(tokenizer):
    engine = saying(tokenizer, hold_after=5)
    async with asking(engine, tokenizer) as client:
        stream = await client.responses.create(model="toy", input="Tell", stream=True)
        events = [await anext(stream) for _ in range(6)]
        id = events[0].response.id  # type: ignore[union-attr]
        assert (await client.responses.retrieve(id)).status == "in_progress"
        cancelled = await client.responses.cancel(id)
        events += [event async for event in stream]
        assert cancelled.status == "cancelled" and cancelled.output_text
        assert events[-1].type == "response.incomplete" and events[-1].response.status == "cancelled"
        assert (await client.responses.retrieve(id)).status == "cancelled"
        assert (await client.responses.cancel(id)).status == "cancelled"
        assert len(engine.cancelled) == 1


async def test_a_response_that_nobody_streams_can_be_cancelled_too(tokenizer):
    engine = saying(tokenizer, "fox " * 100, hold_after=9)
    async with serving(engine, tokenizer) as (http, service), openai_client(address(http)) as client:
        asking = asyncio.create_task(client.responses.create(model="toy", input="Tell"))
        await until(lambda: engine.emitted > 4)
        ((_, id),) = service.server.of(Responses).running
        await client.responses.cancel(id)
        response = await asking
    assert response.status == "cancelled" and response.output_text.startswith("fox")


async def test_what_is_over_cannot_be_cancelled(tokenizer):
    async with asking(saying(tokenizer), tokenizer) as client:
        done = await client.responses.create(model="toy", input="Tell")
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a response that is completed"):
            await client.responses.cancel(done.id)


async def test_a_client_that_leaves_cancels_its_response(tokenizer):
    engine = saying(tokenizer, hold_after=5)
    async with serving(engine, tokenizer) as (http, service), openai_client(address(http)) as client:
        stream = await client.responses.create(model="toy", input="Tell", stream=True)
        id = (await anext(stream)).response.id  # type: ignore[union-attr]
        await stream.close()
        await until(lambda: not service.server.of(Responses).running)
        assert (await client.responses.retrieve(id)).status == "cancelled"
    assert len(engine.cancelled) == 1


async def test_old_turns_make_room_only_if_they_may(tokenizer):
    engine = saying(tokenizer)
    long = "fox " * 40
    turns: list[Any] = [{"role": "user", "content": f"{number} {long}"} for number in range(15)]
    async with asking(engine, tokenizer) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="toy", input=turns)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        response = await client.responses.create(
            model="toy", input=turns, truncation="auto", max_output_tokens=20, instructions="Be brief."
        )
        kept = (await client.responses.input_items.list(response.id, order="asc")).data
    prompt = tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False)
    assert prompt.startswith("<|system|>Be brief.<|end|><|user|>") and f"14 {long}" in prompt
    assert 1 < len(kept) < 15
    longer = len(engine.requests[-1].prompt) + 20 + len(tokenizer.encode(f"<|user|>0 {long}<|end|>", False))
    assert longer > 512, "one more turn would have fitted"


async def test_openais_client_goes_on_from_a_compaction(able):
    """The model reads the same as if all items had been sent again."""
    engine = saying(able, "Seen.")
    call: Any = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "a", "output": "There it is."}
    items: list[Any] = [{"role": "user", "content": "Look!"}, call, result, {"role": "assistant", "content": "Seen."}]
    question: Any = {"role": "user", "content": "And now?"}
    async with asking(engine, able) as client:
        window = await client.responses.compact(model="toy", input=items)
        assert [(item.type, getattr(item, "role", None)) for item in window.output] == [
            ("message", "user"),
            ("compaction", None),
        ]
        sent: list[Any] = [item.to_dict(warnings=False) for item in window.output]
        for given in (items, sent):
            await client.responses.create(model="toy", input=[*given, question], tools=[TOOL])
        response = await client.responses.create(model="toy", input=sent[1:])
        await client.responses.create(model="toy", input=[question], previous_response_id=response.id)
        kept = (await client.responses.input_items.list(response.id)).data
    assert engine.requests[0].prompt == engine.requests[1].prompt
    assert "There it is." in able.decode(engine.requests[3].prompt, skip_special_tokens=False)
    assert [item.type for item in kept] == ["compaction"]


async def test_tokens_are_counted(tokenizer):
    engine = saying(tokenizer)
    async with asking(engine, tokenizer) as client:
        counted = await client.responses.input_tokens.count(model="toy", input="Tell", instructions="Be brief.")
        response = await client.responses.create(model="toy", input="Tell", instructions="Be brief.")
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens


TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=item", "after"),
    ],
)
async def test_wrong_queries_are_named(tokenizer, path, param):
    async with serving(saying(tokenizer), tokenizer) as (http, _), openai_client(address(http)) as client:
        response = await client.responses.create(model="toy", input="Tell")
        answer = await http.get(f"/v1/responses/{response.id}{path}")
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param


async def test_a_get_without_upgrade_says_what_is_missing(tokenizer):
    async with serving(saying(tokenizer), tokenizer) as (http, _):
        answer = await http.get("/v1/responses")
        assert answer.status == 426 and answer.headers["Upgrade"] == "websocket"
        assert (await answer.json())["error"]["type"] == "invalid_request_error"


async def test_the_stream_has_named_events_and_an_end(tokenizer):
    async with serving(saying(tokenizer), tokenizer) as (http, _):
        answer = await http.post("/v1/responses", json={"input": "Tell", "stream": True})
        lines = (await answer.text()).splitlines()
    assert lines[0] == "event: response.created" and lines[1].startswith('data: {"type":"response.created"')
    assert lines[-5] == "event: response.completed" and lines[-2:] == ["data: [DONE]", ""]
