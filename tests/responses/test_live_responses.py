"""``/v1/responses`` of the real server with the bundled pair, through the official clients."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

ASK: dict[str, Any] = {"model": "bundled", "input": "Tell me a story about a fox.", "extra_body": {"seed": 3}}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")


def test_the_synchronous_client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        client: Any = made
        whole = client.responses.create(**ASK, max_output_tokens=12)
        streamed = list(client.responses.create(**ASK, max_output_tokens=12, stream=True))
        assert streamed[-1].response.output_text == whole.output_text
        with client.responses.connect() as connection:
            connection.send({"type": "response.create", "input": ASK["input"], "max_output_tokens": 12, "seed": 3})
            for event in connection:
                if event.type in LAST:
                    break
        assert event.response.output_text == whole.output_text
        assert (event.response.seed, whole.seed) == (3, 3)


async def test_a_whole_one_says_what_the_stream_says(client):
    whole = await client.responses.create(**ASK, max_output_tokens=16)
    async with client.responses.stream(**ASK) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.status == "completed" and final.output_text.startswith(whole.output_text)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    drafting = final.metrics["speculative_decoding"]
    assert len(drafting["acceptance_histogram"]) == drafting["num_spec_tokens"] + 1
    deltas = sum(event.type == "response.output_text.delta" for event in events)
    assert deltas < final.usage.output_tokens, "one event a step, not one a token"


async def test_the_conversation_goes_on_warm(client):
    first = await client.responses.create(**ASK, max_output_tokens=24)
    more: dict[str, Any] = {"model": "bundled", "input": "And then?", "max_output_tokens": 4}
    by_id = await client.responses.create(**more, previous_response_id=first.id, extra_body={"seed": 5})
    assert by_id.usage.input_tokens_details.cached_tokens >= 16
    more["input"] = [{"role": "user", "content": ASK["input"]}, *first.output, {"role": "user", "content": "And then?"}]
    by_items = await client.responses.create(**more, extra_body={"seed": 5})
    assert by_items.output_text == by_id.output_text


async def test_logprobs(client):
    whole = await client.responses.create(
        **ASK, max_output_tokens=6, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    stream = await client.responses.create(
        **ASK, max_output_tokens=6, top_logprobs=2, include=["message.output_text.logprobs"], stream=True
    )
    events = [event async for event in stream]
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == whole.usage.output_tokens == 6
    assert "".join(one.token for one in logprobs) == whole.output_text
    assert all(len(one.top_logprobs) == 2 for one in logprobs)
    streamed = [one.token for event in events if event.type.endswith("text.delta") for one in event.logprobs]
    assert streamed == [one.token for one in logprobs]


async def test_two_lanes_of_one_socket(client):
    alone = await client.responses.create(**ASK, max_output_tokens=160)
    async with client.responses.connect() as connection:
        for lane in "ab":
            create = {"input": ASK["input"], "max_output_tokens": 160, "seed": 3, "stream_id": lane, "store": False}
            await connection.send({"type": "response.create"} | create)
        order, texts = [], {}
        async for event in connection:
            order.append(event.stream_id)
            if event.type in LAST:
                texts[event.stream_id] = event.response.output_text
                if len(texts) == 2:
                    break
    assert texts == dict.fromkeys("ab", alone.output_text)
    assert order != sorted(order)


async def test_a_warm_up_fills_the_cache(client):
    long = "There was once a miller who had three sons and a cat. " * 4
    async with client.responses.connect() as connection:
        await connection.response.create(model="bundled", instructions=long, generate=False, store=False)
        warm = await _last(connection)
        assert warm.output == [] and warm.usage.input_tokens > 40
        await connection.response.create(
            model="bundled",
            instructions=long,
            input="Go on.",
            previous_response_id=warm.id,
            max_output_tokens=4,
            store=False,
        )
        response = await _last(connection)
    assert response.usage.input_tokens_details.cached_tokens >= warm.usage.input_tokens - 16


async def test_cancel_over_the_socket(client):
    async with client.responses.connect() as connection:
        create = {"input": ASK["input"], "ignore_eos": True, "store": False, "stream_id": "a"}
        await connection.send({"type": "response.create"} | create)
        async for event in connection:
            if event.type == "response.output_text.delta":
                await connection.send({"type": "response.cancel"})
                break
        cancelled = await _last(connection)
        assert cancelled.status == "cancelled" and cancelled.output_text
        await connection.response.create(model="bundled", input="Again.", max_output_tokens=2)
        assert (await _last(connection)).usage.output_tokens == 2


async def _last(connection: Any) -> Any:
    async with asyncio.timeout(60):
        async for event in connection:
            assert event.type != "error", event
            if event.type in LAST:
                return event.response
    raise AssertionError("the connection was closed")
