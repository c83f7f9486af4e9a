"""The WebSocket through the official client and through a bare one, around an engine that says what a test wants."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, get_args

import pytest
from aiohttp import WSMsgType, web
from openai.types.responses import ResponsesServerEvent
from openai.types.responses.responses_server_event import ResponseWsError

from foresay.server.api.responses.answer import TYPES
from foresay.server.api.responses.socket import decoded
from foresay.server.api.responses.store import Responses
from foresay.server.gateway.keys import Caller, serve
from foresay.server.text.choice import Choice
from foresay.spec.errors import InvalidRequest
from tests.responses.serving import STORY, asking, saying, serving

PATH = "/v1/responses"
LAST = ("response.completed", "response.incomplete", "response.failed", "error")


async def answer(socket: Any, create: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The events up to the last one of a response."""
    if create is not None:
        await socket.send_json({"type": "response.create"} | create)
    events = []
    while not events or events[-1]["type"] not in LAST:
        events.append(await socket.receive_json(timeout=60))
    return events


async def lanes(socket: Any, count: int) -> dict[str | None, list[dict[str, Any]]]:
    """The events of several lanes until as many responses have ended."""
    said: dict[str | None, list[dict[str, Any]]] = {}
    while count:
        event = await socket.receive_json(timeout=60)
        said.setdefault(event.get("stream_id"), []).append(event)
        count -= event["type"] in LAST
    return said


def said(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def test_the_official_client_connects_and_goes_on(tokenizer):
    engine = saying(tokenizer, run=3)
    async with asking(engine, tokenizer) as client, client.responses.connect() as connection:
        await connection.response.create(model="toy", input="Tell", store=False)
        first = await _final(connection)
        assert first.status == "completed" and first.output_text == STORY
        await connection.response.create(model="toy", input="And?", previous_response_id=first.id, store=False)
        second = await _final(connection)
        assert second.previous_response_id == first.id
    prompt = tokenizer.decode(engine.requests[1].prompt, skip_special_tokens=False)
    assert prompt == f"<|user|>Tell<|end|><|assistant|>{STORY}<|end|><|user|>And?<|end|><|assistant|>"


async def _final(connection: Any) -> Any:
    async for event in connection:
        assert event.type != "error", event
        if event.type in LAST:
            return event.response
    raise AssertionError("the connection was closed")


async def test_the_events_are_those_of_http(tokenizer):
    async with serving(saying(tokenizer, run=2), tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        over_socket = await answer(socket, {"input": "Tell"})
        streamed = await (await http.post(PATH, json={"input": "Tell", "stream": True})).text()
    over_http = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [event["type"] for event in over_socket] == [event["type"] for event in over_http]
    assert [event["sequence_number"] for event in over_socket] == list(range(len(over_socket)))
    assert [event.keys() for event in over_socket] == [event.keys() for event in over_http]


async def test_lanes_run_side_by_side_and_each_in_order(tokenizer):
    engine = saying(tokenizer, pause=0.005)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        for lane, text in (("a", "One"), ("b", "Two"), ("a", "Three"), (None, "Four")):
            await socket.send_json({"type": "response.create", "stream_id": lane, "input": text})
        order = []
        ended = 0
        events = []
        while ended < 4:
            event = await socket.receive_json(timeout=60)
            events.append(event)
            order.append(event.get("stream_id"))
            ended += event["type"] in LAST
    assert order != sorted(order, key=str), "lanes were not interleaved"
    types = [event["type"] for event in events if event.get("stream_id") == "a"]
    assert [type for type in types if type in ("response.created", "response.completed")] == [
        "response.created",
        "response.completed",
        "response.created",
        "response.completed",
    ]
    assert [len(request.prompt) for request in engine.requests[:3]].count(len(engine.requests[0].prompt)) >= 1
    texts = [said([event for event in events if event.get("stream_id") == lane]) for lane in ("a", "b", None)]
    assert texts == [STORY + STORY, STORY, STORY]


async def test_a_lane_can_go_on_from_another_lanes_response(tokenizer):
    engine = saying(tokenizer)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        first = (await answer(socket, {"input": "Tell", "stream_id": "a", "store": False}))[-1]["response"]["id"]
        for lane in ("b", "c"):
            create = {"input": lane, "stream_id": lane, "previous_response_id": first, "store": False}
            await socket.send_json({"type": "response.create"} | create)
        events = await lanes(socket, 2)
    assert {lane: events[lane][-1]["type"] for lane in "bc"} == dict.fromkeys("bc", "response.completed")


async def test_warm_up_prepares_the_prompt_and_says_nothing(tokenizer):
    engine = saying(tokenizer)
    async with serving(engine, tokenizer) as (http, service), http.ws_connect(PATH) as socket:
        warm = await answer(socket, {"instructions": "Be brief.", "generate": False, "store": False, "stop": "x"})
        assert [event["type"] for event in warm] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        response = warm[-1]["response"]
        assert response["output"] == [] and response["usage"]["output_tokens"] == 0
        assert engine.requests[0].params.max_tokens == 1
        follow = {"input": "Tell", "previous_response_id": response["id"], "instructions": "Be brief.", "store": False}
        assert said(await answer(socket, follow)) == STORY
        prewarm = {"input": "Tell", "prompt_cache_options": {"prewarm": True}}
        assert (await answer(socket, prewarm))[-1]["response"]["output"] == []
        assert not service.server.of(Responses).running
    first, second = (request.prompt for request in engine.requests[:2])
    assert second[: len(first)] == first, "the warm-up's KV is no prefix of the answer's"


async def test_a_memory_of_one_socket_is_not_anothers(tokenizer):
    async with serving(saying(tokenizer), tokenizer) as (http, _):
        async with http.ws_connect(PATH) as one, http.ws_connect(PATH) as other:
            hidden = (await answer(one, {"input": "Tell", "store": False}))[-1]["response"]["id"]
            stored = (await answer(one, {"input": "Tell"}))[-1]["response"]["id"]
            error = (await answer(other, {"input": "?", "previous_response_id": hidden, "stream_id": "x"}))[-1]
            assert (error["status"], error["stream_id"]) == (400, "x")
            assert error["error"]["code"] == "previous_response_not_found"
            assert error["error"]["param"] == "previous_response_id"
            assert (await answer(other, {"input": "?", "previous_response_id": stored}))[-1]["type"] == LAST[0]
        assert (await http.get(f"{PATH}/{stored}")).status == 200
        assert (await http.get(f"{PATH}/{hidden}")).status == 404


async def test_a_response_is_cancelled_by_its_id(tokenizer):
    engine = saying(tokenizer, "fox " * 100, pause=0.01)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        for lane in "ab":
            await socket.send_json({"type": "response.create", "stream_id": lane, "input": "Tell", "store": False})
        events: dict[str, list[Any]] = {"a": [], "b": []}
        while not (said(events["a"]) and said(events["b"])):
            event = await socket.receive_json(timeout=60)
            events[event["stream_id"]].append(event)
        await socket.send_json({"type": "response.cancel", "response_id": events["a"][0]["response"]["id"]})
        rest = await lanes(socket, 2)
    (last,) = [event for event in rest["a"] if event["type"] in LAST]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert last["response"]["output"][0]["content"][0]["text"] == said(events["a"] + rest["a"])
    assert rest["b"][-1]["type"] == "response.completed"
    assert len(engine.cancelled) == 1


async def test_cancel_ends_a_lane_and_what_waits_in_it(tokenizer):
    engine = saying(tokenizer, "fox " * 100, hold_after=9)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        for lane in ("a", "a", "a", "b"):
            await socket.send_json({"type": "response.create", "stream_id": lane, "input": "Tell"})
        begun: set[str] = set()
        while begun != {"a", "b"}:
            event = await socket.receive_json(timeout=180)
            begun |= {event["stream_id"]} if event["type"] == "response.created" else set()
        await socket.send_json({"type": "response.cancel", "stream_id": "a"})
        rest = await lanes(socket, 3)
        await socket.send_json({"type": "response.cancel"})
        assert (await lanes(socket, 1))["b"][-1]["response"]["status"] == "cancelled"
        await socket.send_json({"type": "response.cancel"})  # nothing runs: nothing happens
        await socket.send_json({"type": "response.cancel", "response_id": "resp_unknown"})
        assert said(await answer(socket, {"input": "Tell", "max_output_tokens": 2})) == "fox"
    dropped = [event["error"]["code"] for event in rest["a"] if event["type"] == "error"]
    assert dropped == ["cancelled", "cancelled"]
    assert "cancelled" in [event["response"]["status"] for event in rest["a"] if event["type"] in LAST[:3]]


async def test_a_cancel_in_the_moment_of_the_engines_request_counts(tokenizer, monkeypatch):
    engine = saying(tokenizer, "fox " * 100, pause=0.01)
    async with serving(engine, tokenizer) as (http, service), http.ws_connect(PATH) as socket:
        add = engine.add

        def add_and_cancel(*asked: Any) -> None:
            add(*asked)
            (record,) = service.server.of(Responses).running.values()
            assert record.cancel is not None
            asyncio.get_running_loop().call_soon(record.cancel)

        monkeypatch.setattr(engine, "add", add_and_cancel)
        assert (await answer(socket, {"input": "Tell"}))[-1]["error"]["code"] == "cancelled"
    assert len(engine.cancelled) == 1


async def test_cancel_over_http_ends_a_response_of_a_socket(tokenizer):
    engine = saying(tokenizer, "fox " * 100, pause=0.01)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        await socket.send_json({"type": "response.create", "input": "Tell", "store": False})
        id = (await socket.receive_json(timeout=180))["response"]["id"]
        cancelled = await (await http.post(f"{PATH}/{id}/cancel")).json()
        events = await answer(socket)
    assert cancelled["status"] == events[-1]["response"]["status"] == "cancelled"


WRONG: list[tuple[str, str | None]] = [
    ("", None),
    ("{", None),
    ("[]", None),
    ('"text"', None),
    ("1e999999", None),
    ("[" * 100_000, None),
    ("{}", "type"),
    ('{"type":"response.create","input":7,"stream_id":"a"}', "input"),
    ('{"type":"response.made","stream_id":"a"}', "type"),
    ('{"type":"response.create","stream_id":7}', "stream_id"),
    ('{"type":"response.create","input":"x","stream_id":"' + "x" * 300 + '"}', "stream_id"),
    ('{"type":"response.create"}', "input"),
    ('{"type":"response.create","input":[]}', "input"),
    ('{"type":"response.create","input":"x","temperature":9}', "temperature"),
    ('{"type":"response.create","input":"x","max_output_tokens":0}', "max_output_tokens"),
    ('{"type":"response.create","input":"x","background":true}', "background"),
    ('{"type":"response.create","input":"x","model":"other"}', "model"),
    ('{"type":"response.cancel","response_id":7}', "response_id"),
]


async def test_a_wrong_message_gets_an_error_and_the_socket_stays_open(tokenizer):
    async with serving(saying(tokenizer), tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        for message, param in WRONG:
            await socket.send_str(message)
            event = await socket.receive_json(timeout=60)
            assert event["type"] == "error" and event["status"] in (400, 404), message[:80]
            assert event["error"]["param"] == param, message[:80]
            assert event.get("stream_id") == ("a" if '"stream_id":"a"' in message else None)
            parsed = ResponseWsError.model_validate(event)
            assert parsed.error.type == "invalid_request_error" and parsed.error.message
        assert said(await answer(socket, {"input": "Tell"})) == STORY


@pytest.mark.skipif("FORESAY_REPLICAS" in os.environ, reason="it refuses with an error that no frame carries")
async def test_an_engine_that_refuses_is_an_error_and_one_that_breaks_a_failed_response(tokenizer):
    from foresay.server.schemas.errors import QueueFull

    engine = saying(tokenizer, fail_after=4)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        failed = (await answer(socket, {"input": "Tell"}))[-1]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        engine.refusal = QueueFull("full")
        error = (await answer(socket, {"input": "Tell"}))[-1]
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", 429, "queue_full")
        engine.refusal, engine.fail_after = None, None
        assert said(await answer(socket, {"input": "Tell"})) == STORY


async def test_the_callers_tenant_goes_with_every_message(tokenizer):
    @web.middleware
    async def by_header(request: web.Request, handler: Any) -> Any:
        serve(caller=Caller(tenant=request.headers.get("X-Tenant", "")))
        return await handler(request)

    engine = saying(tokenizer)
    async with serving(engine, tokenizer, middleware=by_header) as (http, _):
        async with http.ws_connect(PATH, headers={"X-Tenant": "a"}) as socket:
            await answer(socket, {"input": "Tell", "cache_salt": "s"})
        async with http.ws_connect(PATH, headers={"X-Tenant": "b"}) as socket:
            await answer(socket, {"input": "Tell"})
    assert [request.salt for request in engine.requests] == ["a:s", "b:"]


async def test_a_mistake_of_ours_fails_the_response_and_the_socket_stays(tokenizer, monkeypatch, caplog):
    plain, calls = Choice.take, iter(range(1000))

    def take(choice, delta):
        if next(calls) == 5:
            raise KeyError("a mistake of ours")
        return plain(choice, delta)

    engine = saying(tokenizer, pause=0.002)
    async with serving(engine, tokenizer) as (http, _), http.ws_connect(PATH) as socket:
        monkeypatch.setattr(Choice, "take", take)
        *before, last = await answer(socket, {"input": "Tell"})
        assert last["type"] == "response.failed"
        assert "" != said(before) != STORY and STORY.startswith(said(before))
        assert "the server's log says more" in last["response"]["error"]["message"]
        kept = await (await http.get(f"{PATH}/{last['response']['id']}")).json()
        assert kept["status"] == "failed"
        assert said(await answer(socket, {"input": "Tell"})) == STORY
    assert caplog.text.count("Traceback") == 1


@pytest.mark.parametrize("offered", ["foresay.v1.json", "foresay.v1.json,openai-insecure-api-key.secret"])
async def test_a_browser_may_name_its_protocol(tokenizer, offered):
    protocols = offered.split(",")
    async with serving(saying(tokenizer), tokenizer) as (http, _), http.ws_connect(PATH, protocols=protocols) as socket:
        assert socket.protocol == "foresay.v1.json"
        assert said(await answer(socket, {"input": "Tell"})) == STORY


def test_every_event_is_one_the_client_knows():
    theirs = {get_args(one.model_fields["type"].annotation)[0] for one in get_args(get_args(ResponsesServerEvent)[0])}
    assert {*TYPES} <= theirs


async def test_frames_are_never_compressed(tokenizer):
    async with serving(saying(tokenizer), tokenizer) as (http, _), http.ws_connect(PATH, compress=15) as socket:
        assert socket.compress == 0
        await socket.send_json({"type": "response.create", "input": "Tell"})
        assert (await socket.receive()).type is WSMsgType.TEXT


def test_a_value_that_looks_like_a_complaint_does_not_rename_its_field():
    requested = {"type": "response.create", "model": "toy", "input": "x", "spec_decode_metrics": "x' - at `$.model`"}
    with pytest.raises(InvalidRequest) as caught:
        decoded(json.dumps(requested))
    assert caught.value.param == "spec_decode_metrics"
