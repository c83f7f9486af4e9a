"""Several models behind every API: routed by name, waited for, listed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foresay.server.models.models import Models
from foresay.server.text.choice import Choice
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.models.serving import Serving, serving
from tests.routes.apis import APIS, TURN, Api
from tests.server.scripted import END

FOX, OWL = "said the fox", "said the owl"
TEXTS = {"fox": FOX, "org/owl-1.5:q": OWL}
apis = pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))


async def said(server: Serving, api: Api, model: str) -> str:
    """The text of an answer."""
    return api.joined([await server.json(api.path, **api.request(model=model))]).text


@apis
async def test_every_api_uses_the_model_that_is_named(tokenizer, api: Api):
    async with serving(tokenizer, TEXTS) as server:
        for name in ("fox", "org/owl-1.5:q", "fox"):
            assert await said(server, api, name) == TEXTS[name]
    assert server.loads == {"fox": 2, "org/owl-1.5:q": 1}


async def test_over_a_websocket_each_message_names_its_model(tokenizer):
    async with serving(tokenizer, TEXTS) as server, server.client.ws_connect("/v1/responses") as socket:
        for name in ("fox", "org/owl-1.5:q", "fox"):
            await socket.send_json({"type": "response.create", "model": name, "input": "Who?"})
            while (event := await socket.receive_json(timeout=180))["type"] != "response.completed":
                assert event["type"] != "error", event
            assert event["response"]["output"][0]["content"][0]["text"] == TEXTS[name]
        await socket.send_json({"type": "response.create", "model": "wolf", "input": "Who?"})
        assert (await socket.receive_json(timeout=180))["error"]["code"] == "model_not_found"
    assert server.loads == {"fox": 2, "org/owl-1.5:q": 1}


@apis
async def test_a_name_that_is_none_or_missing(tokenizer, api: Api):
    async with serving(tokenizer, TEXTS) as server:
        for name in ("wolf", "", "fox ", "FOX", "../fox", "fox\u0000", "x" * 5000, "org/owl-1.5"):
            response = await server.client.post(api.path, json=api.request(model=name))
            body = await response.text()
            assert response.status == 404, body
            assert "org/owl-1.5:q" in body and len(body) < 4000
        nameless = {field: value for field, value in api.request().items() if field != "model"}
        response = await server.client.post(api.path, json=nameless)
        assert response.status == 400
        assert "model" in await response.text()
    assert server.loads == {"fox": 0, "org/owl-1.5:q": 0}


@apis
async def test_where_any_name_will_do_the_first_model_serves_it(tokenizer, api: Api):
    async with serving(tokenizer, TEXTS, any_model=True) as server:
        for name in ("claude", ""):
            assert await said(server, api, name) == FOX
        answer = await server.json(api.path, **api.request(model="org/owl-1.5:q:latest"))
        assert api.joined([answer]).text == OWL and "warnings" not in answer
        answer = await server.json(api.path, **api.request(model="claude"))
    assert [warning["message"] for warning in answer["warnings"]] == ["model: 'claude' is served by 'fox'"]


async def test_where_any_name_will_do_none_need_be_given(tokenizer):
    async with serving(tokenizer, TEXTS, any_model=True) as server:
        assert (await server.json("/v1/completions", prompt="Who?"))["choices"][0]["text"] == FOX
        assert "warnings" not in await server.json("/v1/completions", prompt="Who?")


@apis
async def test_a_stream_that_began_while_it_waited_has_warnings_in_its_events_alone(tokenizer, api: Api):
    """Its headers were out before anybody had looked at the request."""
    async with serving(tokenizer, TEXTS, any_model=True, ping_seconds=0.05) as server:
        server.by_name["fox"].gate.clear()
        for _ in ("while it loads", "when it is there"):
            response = await server.client.post(api.path, json=api.request(True, model="claude"))
            server.by_name["fox"].gate.set()
            assert "is served by 'fox'" in await response.text()


async def test_how_it_lists_its_models(tokenizer):
    async with serving(tokenizer, TEXTS) as server:
        listed = await server.json("/v1/models")
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("fox", "org/owl-1.5:q", False)
        cards = listed["data"]
        assert [card["display_name"] for card in cards] == ["fox", "org/owl-1.5:q"]
        assert [(card["id"], card["loaded"], card["root"]) for card in cards] == [
            ("fox", False, "/models/fox"),
            ("org/owl-1.5:q", False, "/models/org/owl-1.5:q"),
        ]
        assert "max_model_len" not in cards[0]
        assert await server.json("/health") == {
            "status": "ok",
            "model": "fox",
            "running": 0,
            "engine_starts": 0,
            "models": {"fox": "unloaded", "org/owl-1.5:q": "unloaded"},
        }
        assert await server.json("/ready") == {"status": "ready"}
        await server.json("/v1/completions", model="org/owl-1.5:q", prompt="x")
        card = await server.json("/v1/models/org/owl-1.5:q")
        assert (card["loaded"], card["max_model_len"]) == (True, 512)
        assert (await server.json("/health"))["models"] == {"fox": "unloaded", "org/owl-1.5:q": "ok"}
        info = await server.json("/server_info")
        assert info["models"]["fox"] is None and info["models"]["org/owl-1.5:q"]["target"] == "toy"
        assert await server.json("/load") == {"running": 0, "waiting": 0, "server_load": 0}


async def test_metrics_of_each_model_bear_its_name_and_no_family_stands_twice(tokenizer):
    async with serving(tokenizer, TEXTS) as server:
        await server.json("/v1/completions", model="fox", prompt="x", max_tokens=3)
        for _ in range(2):
            await server.json("/v1/completions", model="org/owl-1.5:q", prompt="x", max_tokens=5)
        response = await server.client.get("/metrics")
        text = await response.text()
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = {
        (sample.name, sample.labels.get("model_name")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert samples["foresay:generation_tokens_total", "fox"] == 3
    assert samples["vllm:generation_tokens_total", "org/owl-1.5:q"] == 10
    assert samples["foresay:engine_up", "fox"] == 0 and samples["foresay:engine_up", "org/owl-1.5:q"] == 1
    assert samples["foresay:http_responses_total", ""] == 3
    assert samples["foresay:build_info", "org/owl-1.5:q"] == 1


async def test_the_page_shows_one_model_at_a_time(tokenizer):
    async with serving(tokenizer, TEXTS) as server:
        await server.json("/v1/completions", model="org/owl-1.5:q", prompt="x", max_tokens=4)
        for query, name, tokens in (("", "fox", 0), ("?model=org/owl-1.5:q", "org/owl-1.5:q", 4)):
            state = await server.json(f"/dashboard/state{query}")
            assert state["snapshot"]["server"]["model"] == name
            assert state["snapshot"]["totals"]["generation_tokens"] == tokens
            assert state["models"] == {"fox": "unloaded", "org/owl-1.5:q": "ok"}
            listed = await server.json(f"/dashboard/requests{query}")
            assert len(listed) == (tokens > 0)
            async with server.client.get(f"/dashboard/feed{query}") as feed:
                frame = json.loads((await feed.content.readline()).removeprefix(b"data: "))
            assert frame["snapshot"]["server"]["model"] == name
            assert frame["models"] == state["models"]
        await server.json("/dashboard/state?model=wolf", status=404)


# -- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", [api for api in APIS.values() if api.quiet], ids=lambda api: api.path)
async def test_a_stream_that_waits_for_its_model_has_pings_and_then_goes_on(tokenizer, api: Api):
    async with serving(tokenizer, TEXTS, ping_seconds=0.05) as server:
        server.by_name["fox"].gate.clear()
        async with server.client.post(api.path, json=api.request(True, model="fox")) as response:
            assert response.status == 200
            begin = b""
            while begin.count(b"ping") < 2:
                begin += await response.content.readany()
            server.by_name["fox"].gate.set()
            body = (begin + await response.read()).decode()
    assert b'"model":"fox"' not in begin and '"model":"fox"' in body
    assert "error" not in body.replace('"error":null', "").replace("incomplete_details", "")


async def test_ollamas_lines_wait_in_silence(tokenizer):
    async with serving(tokenizer, TEXTS, ping_seconds=0.02) as server:
        server.by_name["fox"].gate.clear()

        async def load() -> None:
            await server.settle("fox", "coming")
            await asyncio.sleep(0.15)
            server.by_name["fox"].gate.set()

        async with ollama.AsyncClient(host=str(server.client.make_url("/"))) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(load())
            pieces = [piece async for piece in await client.generate(model="fox", prompt="Who?", stream=True)]
    assert "".join(piece.response or "" for piece in pieces) == FOX
    assert 0.15e9 <= (pieces[-1].load_duration or 0) <= (pieces[-1].total_duration or 0)


@apis
async def test_a_load_that_fails_is_an_error_in_the_stream_that_began_or_a_status(tokenizer, api: Api):
    async with serving(tokenizer, TEXTS, ping_seconds=0.02) as server:
        server.by_name["fox"].wrong = "its weights are damaged"
        server.by_name["fox"].gate.clear()
        async with server.client.post(api.path, json=api.request(True, model="fox")) as response:
            assert response.status == 200
            server.by_name["fox"].gate.set()
            body = await response.text()
        last = api.events(body)[-1]
        error = last if api.path == "/v1/responses" else last["error"]
        assert "its weights are damaged" in str(error)
        assert api.path in ("/v1/messages", "/api/chat", "/api/generate") or error["code"] == "load_failed"
        assert ("event: error\n" in body) == (api.path in ("/v1/messages", "/v1/responses"))
        async with server.client.post(api.path, json=api.request(model="fox")) as response:
            assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
        assert await said(server, api, "org/owl-1.5:q") == OWL, "the others go on"


async def test_what_is_wrong_with_a_request_is_an_error_in_its_stream_after_the_wait(tokenizer):
    async with serving(tokenizer, TEXTS, ping_seconds=0.02) as server:
        server.by_name["fox"].gate.clear()
        ask = {"model": "fox", "prompt": "x" * 5000, "stream": True}
        async with server.client.post("/v1/completions", json=ask) as response:
            server.by_name["fox"].gate.set()
            *_, last = (await response.text()).strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"


async def test_a_client_that_leaves_while_it_waits_frees_its_slot(tokenizer):
    async with serving(tokenizer, TEXTS, most_running=1) as server:
        server.by_name["fox"].gate.clear()
        ask = {"model": "fox", "prompt": "x"}
        waiting = asyncio.create_task(server.client.post("/v1/completions", json=ask))
        await server.settle("fox", "coming")
        assert await server.json("/load") == {"running": 0, "waiting": 1, "server_load": 1}
        assert (await server.json("/dashboard/state"))["snapshot"]["live"]["gauges"]["num_requests_waiting"] == 1
        full = await server.client.post("/v1/completions", json=ask)
        assert full.status == 429 and (await full.json())["error"]["code"] == "queue_full"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(60):
            while server.models.find("fox").service.running:
                await asyncio.sleep(0.005)
        server.by_name["fox"].gate.set()
        assert (await server.client.post("/v1/completions", json=ask)).status == 200


async def test_a_long_stream_finishes_before_its_model_leaves(tokenizer):
    async with serving(tokenizer, TEXTS) as server:
        engine = server.by_name["fox"].engine
        engine.pause = 0.02  # until it was seen to leave
        client = openai.AsyncOpenAI(base_url=str(server.client.make_url("/v1")), api_key="none", max_retries=0)
        async with client:
            ask: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
            stream = aiter(await client.completions.create(model="fox", stream=True, **ask))
            await anext(stream)
            owl = asyncio.create_task(client.completions.create(model="org/owl-1.5:q", prompt="x"))
            await server.settle("fox", "leaving")
            late = asyncio.create_task(client.completions.create(model="fox", prompt="x"))
            engine.pause = 0.0
            chunks = [chunk async for chunk in stream]
            assert server.by_name["fox"].unloads <= 1
            assert chunks[-1].choices[0].finish_reason == "length"
            assert (await owl).choices[0].text == OWL
            assert (await late).choices[0].text == FOX
    assert server.loads == {"fox": 2, "org/owl-1.5:q": 1}


async def test_counting_needs_no_model_that_was_loaded_once(tokenizer):
    async with serving(tokenizer, TEXTS) as server:
        asks: dict[str, dict[str, Any]] = {
            "/tokenize": {"prompt": "Who?"},
            "/detokenize": {"tokens": [1, 2]},
            "/apply-template": {"messages": [TURN]},
            "/v1/messages/count_tokens": {"messages": [TURN]},
            "/v1/responses/input_tokens": {"input": "Who?"},
        }
        for _ in range(2):
            for path, ask in asks.items():
                await server.json(path, model="fox", **ask)
            await server.json("/v1/completions", model="org/owl-1.5:q", prompt="x")
            assert server.loads == {"fox": 1, "org/owl-1.5:q": 1}


async def test_a_response_may_be_followed_by_another_model(tokenizer):
    async with serving(tokenizer, TEXTS) as server:
        first = await server.json("/v1/responses", model="fox", input="Who?")
        then = await server.json("/v1/responses", model="org/owl-1.5:q", input="And?", previous_response_id=first["id"])
        assert then["output"][0]["content"][0]["text"] == OWL
        read = await server.json(f"/v1/responses/{first['id']}")
        assert read["model"] == "fox"
        [requested] = server.by_name["org/owl-1.5:q"].engine.requests
        alone = tokenizer.encode(f"<|user|>Who?<|end|><|assistant|>{FOX}<|end|><|user|>And?<|end|><|assistant|>", False)
        assert requested.prompt == alone


async def test_draining_refuses_what_waits_and_lets_the_others_finish(tokenizer):
    async with serving(tokenizer, TEXTS) as server:
        engine = server.by_name["fox"].engine
        engine.pause = 0.02  # until it was seen to leave
        ask: dict[str, Any] = {"model": "fox", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
        running = asyncio.create_task(server.json("/v1/completions", **ask))
        await server.settle("fox", "in")
        waiting = asyncio.create_task(server.json("/v1/completions", status=503, model="org/owl-1.5:q", prompt="x"))
        await server.settle("fox", "leaving")
        draining = asyncio.create_task(server.models.drain(60.0))
        assert (await waiting)["error"]["code"] == "draining" and not running.done()
        engine.pause = 0.0
        await draining
        assert (await running)["usage"]["completion_tokens"] == 400
        assert (await server.json("/v1/completions", status=503, model="fox", prompt="x"))["error"][
            "code"
        ] == "draining"


def test_without_sections_there_is_one_model_that_is_there_from_the_start():
    from foresay.server.settings.config import ServeConfig

    models = Models.of(ServeConfig(target="bundled"), lambda status: None)
    assert not models.several
    assert models.first.name == "bundled" and models.first.loaded


def choice(tokenizer, id: str, prompt: list[int], **params: Any) -> Choice:
    request = Request(id=id, prompt=prompt, params=SamplingParams(**params))
    return Choice(request, tokenizer, [END])


async def test_a_client_that_does_not_read_holds_no_model(tokenizer):
    """The engine has no more to do for it, so another model may have its memory."""
    async with serving(tokenizer, TEXTS) as server, server.models.lease("fox") as service:
        resident = server.models.find("fox")
        async with service.generation([choice(tokenizer, "deaf", [5, 6], max_tokens=20)]) as generation:
            assert resident.leases == 1
            answer = await server.json("/v1/completions", model="org/owl-1.5:q", prompt="x")
            assert answer["choices"][0]["text"] == OWL
            assert resident.state == "out"
            deltas = await generation.next()
            assert deltas[-1][1].finish_reason is not None
        assert resident.leases == 0


async def test_choices_hold_it_until_the_last_of_them_is_done(tokenizer):
    async with serving(tokenizer, TEXTS) as server, server.models.lease("fox") as service:
        resident = server.models.find("fox")
        server.by_name["fox"].engine.pause = 0.01
        lengths = {"short": 2, "long": 20}
        choices = [choice(tokenizer, id, [5], max_tokens=most, ignore_eos=True) for id, most in lengths.items()]
        async with service.generation(choices) as generation:
            ended = 0
            while ended < 2:
                for _, delta in await generation.next():
                    ended += delta.finish_reason is not None
                assert resident.leases == (ended < 2)
