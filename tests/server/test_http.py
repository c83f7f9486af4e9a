"""The HTTP layer over a scripted engine: chunk rules, errors, headers, slow and vanishing readers."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from server.engine_client import EngineStatus
from server.errors import EngineFailed
from server.service import Service
from server.text import SamplingDefaults
from spec.errors import InvalidRequest
from tests.server.scripted import END, ScriptedEngine, served

STORY = "Once upon a fox there was a 🦊🐍 who said: the\u2028end\u0085!"
ASK = {"messages": [{"role": "user", "content": "Tell"}]}


@pytest.fixture
def script(tokenizer) -> list[int]:
    return [*tokenizer.encode(STORY), END]


async def events(response) -> list:
    """The parsed data lines; comments and the separators checked on the way."""
    body = (await response.read()).decode()
    assert body.endswith("\n\n")
    blocks = body.split("\n\n")[:-1]
    assert all(len(block.splitlines()) == 1 for block in blocks), "an event is one line for everybody"
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") for block in data)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in data]


async def post(client, path, **fields):
    return await client.post(f"/v1/{path}", json=fields)


@pytest.mark.parametrize("run", [1, 3, 7, 50])
async def test_a_chat_stream_obeys_the_chunk_rules(tokenizer, script, run):
    async with served(ScriptedEngine(script, run), tokenizer) as client:
        response = await post(client, "chat/completions", **ASK, stream=True)
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in response.headers
        *chunks, done = await events(response)
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} and choice["finish_reason"] is None for choice in middle)
    assert "".join(choice["delta"]["content"] for choice in middle) == STORY
    assert all(choice["delta"]["content"] for choice in middle)
    assert last["delta"] == {}
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] is None
    assert [index for index, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]


async def test_one_event_per_step_with_all_its_tokens(tokenizer):
    tokens = tokenizer.encode("abcdefghij")
    async with served(ScriptedEngine(tokens, run=3), tokenizer) as client:
        response = await post(client, "completions", prompt="x", max_tokens=10, stream=True)
        *chunks, _ = await events(response)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "bcd", "efg", "hij"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_usage_comes_in_one_extra_chunk_only_when_asked_for(tokenizer, script, path):
    fields = {"prompt": "Tell", "max_tokens": 200} if path == "completions" else ASK
    async with served(ScriptedEngine(script, 3), tokenizer) as client:
        response = await post(client, path, **fields, stream=True, stream_options={"include_usage": True})
        *chunks, last, _ = await events(response)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == len(script)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(script)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2
    assert all(chunk["usage"] is None and "metrics" not in chunk for chunk in chunks)


async def test_continuous_usage_counts_up(tokenizer, script):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with served(ScriptedEngine(script, 3), tokenizer) as client:
        *chunks, _ = await events(await post(client, "chat/completions", **ASK, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(script)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_stream_and_a_whole_answer_say_the_same(tokenizer, script, path):
    fields = {"prompt": "Tell", "max_tokens": 200} if path == "completions" else ASK
    async with served(ScriptedEngine(script, 4), tokenizer) as client:
        whole = await (await post(client, path, **fields, stop=["said"], return_token_ids=True)).json()
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        response = await post(client, path, **fields, stop=["said"], return_token_ids=True, **streaming)
        *chunks, _ = await events(response)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if path == "completions":
        texts = [choice["text"] for choice in choices]
        assert whole["choices"][0]["text"] == "".join(texts)
        assert whole["choices"][0]["prompt_token_ids"] == choices[0]["prompt_token_ids"] == tokenizer.encode("Tell")
    else:
        texts = [choice["delta"].get("content", "") for choice in choices]
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "".join(texts), "refusal": None}
        assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    assert "".join(texts) == STORY[: STORY.index("said")]
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert whole["choices"][0]["token_ids"] == ids
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["usage"]["completion_tokens"] == len(ids)
    assert whole["choices"][0]["finish_reason"] == choices[-1]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == choices[-1]["stop_reason"] == "said"
    assert whole["choices"][0]["seed"] == choices[-1]["seed"] == 7
    assert whole["system_fingerprint"] == chunks[-1]["system_fingerprint"]


async def test_metrics_in_vllms_shape(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abcdefghij"), run=4)
    async with served(engine, tokenizer) as client:
        ask = {"prompt": "x", "max_tokens": 10}
        summary = (await (await post(client, "completions", **ask)).json())["metrics"]
        detailed = (await (await post(client, "completions", **ask, spec_decode_metrics="detailed")).json())["metrics"]
        none = await (await post(client, "completions", **ask, spec_decode_metrics="none")).json()
    assert set(summary) == {
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second", "exact",
        "speculative_decoding",
    }  # fmt: skip
    # One token by itself, then runs of 4, 4 and 1: three steps drafted 3 each and accepted 3, 3 and 0.
    expected = {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.6667,
        "acceptance_histogram": [1, 0, 0, 2],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
    }
    assert summary["speculative_decoding"] == expected
    assert detailed["speculative_decoding"] == expected | {
        "per_step_accepted": [3, 3, 0],
        "per_step_drafted": [3, 3, 3],
    }
    assert "metrics" not in none


async def test_without_a_drafter_there_is_nothing_speculative(tokenizer):
    async with served(ScriptedEngine(tokenizer.encode("abc"), run=1), tokenizer) as client:
        body = await (await post(client, "completions", prompt="x")).json()
    assert body["metrics"]["speculative_decoding"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_make_several_choices(tokenizer, stream):
    engine = ScriptedEngine(tokenizer.encode("abcde"), run=2)
    async with served(engine, tokenizer) as client:
        fields = {"prompt": ["one", "two", "three"], "max_tokens": 5, "echo": True, "stream": stream}
        response = await post(client, "completions", **fields)
        texts = ["", "", ""]
        if stream:
            *chunks, _ = await events(response)
            for choice in (choice for chunk in chunks for choice in chunk["choices"]):
                texts[choice["index"]] += choice["text"]
            assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        else:
            body = await response.json()
            texts = [choice["text"] for choice in body["choices"]]
            assert body["usage"]["completion_tokens"] == 15
    assert texts == ["oneabcde", "twoabcde", "threeabcde"]


async def test_prompts_as_token_ids(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"))
    async with served(engine, tokenizer) as client:
        one = await (await post(client, "completions", prompt=[50, 51], max_tokens=3, echo=True)).json()
        two = await (await post(client, "completions", prompt=[[50], [51, 52]], max_tokens=3)).json()
        bad = await (await post(client, "completions", prompt=[50, 330])).json()
    assert [request.prompt for request in engine.requests] == [[50, 51], [50], [51, 52]]
    assert one["choices"][0]["text"] == tokenizer.decode([50, 51]) + "abc"
    assert [choice["text"] for choice in two["choices"]] == ["abc", "abc"]
    assert bad["error"]["param"] == "prompt"


async def test_the_chat_template_makes_the_prompt(tokenizer):
    engine = ScriptedEngine([END])
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    async with served(engine, tokenizer) as client:
        await post(client, "chat/completions", messages=messages)
        await post(client, "chat/completions", messages=messages, add_generation_prompt=False)
        going = [*messages, {"role": "assistant", "content": "Well"}]
        await post(client, "chat/completions", messages=going, continue_final_message=True)
        both = {"continue_final_message": True, "add_generation_prompt": True}
        clash = await (await post(client, "chat/completions", messages=going, **both)).json()
    texts = [tokenizer.decode(request.prompt, skip_special_tokens=False) for request in engine.requests]
    opening = "<|system|>Be kind.<|end|><|user|>Hi<|end|>"
    assert texts == [opening + "<|assistant|>", opening, opening + "<|assistant|>Well"]
    assert clash["error"]["param"] == "continue_final_message"


async def test_template_arguments_and_refusals(tokenizer, sentencepiece):
    async with served(ScriptedEngine([END]), sentencepiece) as client:
        body = await (await post(client, "chat/completions", **ASK)).json()
        assert "no chat template" in body["error"]["message"]
    async with served(ScriptedEngine([END]), tokenizer) as client:
        bad = await (await post(client, "chat/completions", **ASK, chat_template_kwargs={"tokenize": True})).json()
        assert bad["error"]["param"] == "chat_template_kwargs"
        assert (await post(client, "chat/completions", **ASK, chat_template_kwargs={"thinking": True})).status == 200


async def test_the_models_recommendations_and_the_request_reach_the_engine(tokenizer):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer, defaults=SamplingDefaults(temperature=0.6, top_k=20), seed=11) as client:
        await post(client, "completions", prompt="x", cache_salt="mine")
        await post(client, "completions", prompt="x", temperature=0, seed=5)
    first, second = engine.requests
    assert (first.params.temperature, first.params.top_k, first.params.seed, first.salt) == (0.6, 20, 11, "mine")
    assert (second.params.temperature, second.params.seed) == (0, 5)


async def test_long_prompts_are_tokenized_beside_the_event_loop(tokenizer):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        body = await (await post(client, "completions", prompt="Once upon a time " * 2000)).json()
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["param"] == "prompt"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "code"),
    [
        ("completions", {"prompt": "x", "temperature": 3}, 400, "temperature", None),
        ("completions", {"prompt": "x", "best_of": 2}, 400, "best_of", None),
        ("completions", {}, 400, "prompt", None),
        ("completions", {"prompt": ""}, 400, "prompt", None),
        ("completions", {"prompt": "x", "max_tokens": 600}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": "x", "model": "gpt-9"}, 404, "model", "model_not_found"),
        ("chat/completions", {"messages": []}, 400, "messages", None),
        ("chat/completions", ASK | {"tools": [{"type": "function"}]}, 400, "tools[0].function", None),
        ("chat/completions", ASK | {"model": "toy", "stop": [""]}, 400, "stop", None),
    ],
)
async def test_errors_have_openais_body(tokenizer, path, fields, status, param, code):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        for stream in (False, True):
            response = await post(client, path, **fields, stream=stream)
            body = await response.json()
            assert response.status == status
            assert set(body) == {"error"}
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert (body["error"]["param"], body["error"]["code"]) == (param, code)
            assert body["error"]["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_a_400_even_for_a_stream(tokenizer, stream):
    engine = ScriptedEngine([END])
    engine.refusal = InvalidRequest("prompt", "no such prompt")
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", prompt="x", stream=stream)
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "no such prompt"


async def test_an_error_in_a_stream_is_its_last_event(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abcdef"), fail_after=3)
    async with served(engine, tokenizer) as client:
        *chunks, error = await events(await post(client, "chat/completions", **ASK, stream=True))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "abc"
        assert error == {
            "error": {
                "message": "the script breaks here",
                "type": "engine_error",
                "param": None,
                "code": "engine_error",
            }
        }
        whole = await post(client, "chat/completions", **ASK)
        assert whole.status == 500
        assert (await whole.json()) == error


async def test_requests_that_find_no_route_or_fit_no_body(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/completions", 405)):
            response = await client.request(method, path)
            assert response.status == status
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        large = await client.post("/v1/completions", data=io.BytesIO(b" " * (65 << 20)))
        assert large.status == 413
        assert "error" in await large.json()


async def test_a_full_queue_answers_429(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=30)
    async with served(engine, tokenizer, most_running=2) as client:
        waiting = asyncio.create_task(post(client, "completions", prompt=["a", "b"]))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        refused = await post(client, "completions", prompt="c")
        assert refused.status == 429
        assert "Retry-After" in refused.headers
        assert (await refused.json())["error"]["code"] == "queue_full"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


# -- what the server says about itself ---------------------------------------------------------------------------------


async def test_while_loading_everything_but_health_says_how_far_it_is(tokenizer):
    engine = ScriptedEngine([END])
    engine.status, engine.info = EngineStatus("loading", "weights of the target", 0.4), None
    async with served(engine, tokenizer) as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/ready"), ("GET", "/v1/models")):
            response = await client.request(method, path, json={"prompt": "x"} if method == "POST" else None)
            error = (await response.json())["error"]
            assert response.status == 503
            assert error["code"] == "loading"
            assert error["message"] == "Loading model: weights of the target (40%)"
            assert "Retry-After" in response.headers
        health = await client.get("/health")
        assert health.status == 503
        assert (await health.json())["status"] == "loading"
        engine.status = EngineStatus("down", "the engine process died (signal 9)")
        assert (await client.get("/health")).status == 503
        assert (await (await client.get("/ready")).json())["error"]["code"] == "engine_down"


async def test_a_server_that_is_ready_says_what_it_serves(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        assert (await client.get("/ready")).status == 200
        health = await client.get("/health")
        assert (health.status, (await health.json())["exact"]) == (200, "yes")
        models = await (await client.get("/v1/models")).json()
        card = await (await client.get("/v1/models/toy")).json()
        assert models == {"object": "list", "data": [card]}
        assert (card["id"], card["object"], card["max_model_len"]) == ("toy", "model", 512)
        assert (await client.get("/v1/models/org/other")).status == 404
        assert "/v1/models" in (await (await client.get("/")).json())["routes"]


async def test_request_ids_are_echoed_or_made(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        named = await client.post(
            "/v1/completions", json={"prompt": "x", "stream": True}, headers={"X-Request-Id": "r-1"}
        )
        assert named.headers["X-Request-Id"] == "r-1"
        assert (await events(named))[0]["id"] == "cmpl-r-1"
        own = await post(client, "completions", prompt="x", request_id="mine")
        assert (await own.json())["id"] == "cmpl-mine"
        assert len(own.headers["X-Request-Id"]) == 32
        for useless in ("x" * 200, "ü"):
            answer = await client.get("/ready", headers={"X-Request-Id": useless})
            assert answer.headers["X-Request-Id"] != useless
        assert "X-Request-Id" in (await client.get("/nothing")).headers


# -- readers -----------------------------------------------------------------------------------------------------------


async def test_comments_keep_a_quiet_stream_open(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("ab"), pause=0.25)
    async with served(engine, tokenizer, ping_seconds=0.05) as client:
        response = await post(client, "chat/completions", **ASK, max_tokens=2, stream=True)
        first = (await response.content.readuntil(b"\n\n")).decode()
        assert '"role":"assistant"' in first, "the role goes out before the first token when that takes long"
        body = first.encode() + await response.read()
    assert body.count(b": ping\n\n") >= 3
    assert b"data: [DONE]" in body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reader_who_leaves_frees_the_engine(tokenizer, stream):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.02)
    async with served(engine, tokenizer) as client:
        asking = asyncio.create_task(post(client, "completions", prompt="x", max_tokens=200, stream=stream))
        while engine.emitted < 3:
            await asyncio.sleep(0.01)
        if stream:
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(2):
            while not engine.cancelled:
                await asyncio.sleep(0.01)
    assert engine.cancelled == [engine.requests[0].id]


async def test_a_slow_reader_gets_everything_later_in_fewer_events(tokenizer, monkeypatch):
    tokens = tokenizer.encode("abcdefghij")
    engine = ScriptedEngine(tokens, pause=0.001)
    gate = asyncio.Event()
    await_gate_before_second_write(monkeypatch, gate)
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", prompt="x", max_tokens=100, stream=True)
        async with asyncio.timeout(5):
            while engine.emitted < 100:  # nobody reads, and the engine goes on
                await asyncio.sleep(0.01)
        gate.set()
        *chunks, _ = await events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcdefghij" * 10
    assert len(chunks) < 20


async def test_a_reader_too_far_behind_loses_the_stream(tokenizer, monkeypatch):
    engine = ScriptedEngine(tokenizer.encode("abcdefghij"), pause=0.001)
    gate = asyncio.Event()
    await_gate_before_second_write(monkeypatch, gate)
    async with served(engine, tokenizer, most_pending_tokens=20) as client:
        response = await post(client, "completions", prompt="x", max_tokens=200, stream=True)
        async with asyncio.timeout(5):
            while not engine.cancelled:
                await asyncio.sleep(0.01)
        assert engine.emitted < 40
        gate.set()
        *_, error = await events(response)
    assert error["error"]["code"] == "slow_reader"


def await_gate_before_second_write(monkeypatch, gate: asyncio.Event) -> None:
    """A connection whose buffers are full after one event, until the gate opens."""
    from aiohttp import web

    plain_write = web.StreamResponse.write
    writes = 0

    async def write(self, data):
        nonlocal writes
        writes += 1
        if writes > 1:
            await gate.wait()
        await plain_write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", write)


async def test_draining_refuses_new_requests_and_finishes_running_ones(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.05)
    services: list[Service] = []
    async with served(engine, tokenizer, services.append) as client:
        running = asyncio.create_task(post(client, "completions", prompt="x", max_tokens=6))
        while not engine.requests:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(services[0].drain(5))
        await asyncio.sleep(0)
        assert (await client.get("/ready")).status == 503
        refused = await post(client, "completions", prompt="x")
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
        assert (await (await running).json())["choices"][0]["text"] == "abcabc"
        await draining


async def test_draining_ends_what_takes_too_long(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.02)
    services: list[Service] = []
    async with served(engine, tokenizer, services.append) as client:
        streamed = await post(client, "completions", prompt="x", max_tokens=200, stream=True)
        whole = asyncio.create_task(post(client, "completions", prompt="x", max_tokens=200))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        await services[0].drain(0.1)
        *_, error = await events(streamed)
        assert error["error"]["message"] == "the server is shutting down"
        assert (await whole).status == 500
    assert len(engine.cancelled) == 2


async def test_one_broken_choice_ends_the_answer_and_frees_the_others(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"), pause=0.01)
    plain_say = engine._say

    async def say(request, sink):
        if request.id.endswith("-1"):
            sink.fail(EngineFailed("only this one"))
        await plain_say(request, sink)

    engine._say = say  # type: ignore[method-assign]
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", prompt=["a", "b"], max_tokens=200)
        assert response.status == 500
    assert sorted(name[-2:] for name in engine.cancelled) == ["-0"]
