"""OpenAI's routes over HTTP: prompts, streams, several choices, errors, and the ids of requests."""

from __future__ import annotations

from typing import Any

import pytest

from foresay.server.schemas.errors import EngineFailed
from foresay.server.text.options import choice_seed
from foresay.spec.request import Delta
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import ASK, PATHS, STORY, Several, answer, chunks_of, events, post

# -- prompts -----------------------------------------------------------------------------------------------------------


async def test_prompts_as_token_ids(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"))
    async with served(engine, tokenizer) as client:
        one = await (await post(client, "completions", prompt=[50, 51], max_tokens=3, echo=True)).json()
        two = await (await post(client, "completions", prompt=[[50], [51, 52]], max_tokens=3)).json()
    assert [request.prompt for request in engine.requests] == [[50, 51], [50], [51, 52]]
    assert one["choices"][0]["text"] == tokenizer.decode([50, 51]) + "abc"
    assert [choice["text"] for choice in two["choices"]] == ["abc", "abc"]


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


async def test_what_is_not_stored_is_private(tokenizer):
    engine = ScriptedEngine([END])
    wanted: dict[str, Any] = {"chat/completions": ASK, "responses": {"input": "Hi"}}
    async with served(engine, tokenizer) as client:
        for path, body in wanted.items():
            for store in ({}, {"store": None}, {"store": True}, {"store": False}):
                assert (await post(client, path, **body, **store)).status == 200
    assert [request.private for request in engine.requests] == [False, False, False, True] * 2


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [1, 3, 7, 50])
async def test_a_chat_stream_obeys_the_chunk_rules(tokenizer, script, run):
    async with served(ScriptedEngine(script, run), tokenizer) as client:
        response = await post(client, "chat/completions", **ASK, stream=True)
        assert response.status == 200
        *chunks, done = await events(response)
        whole = await (await post(client, "chat/completions", **ASK)).json()
    assert done == "[DONE]"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": STORY, "refusal": None}
    assert whole["system_fingerprint"] == chunks[-1]["system_fingerprint"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": None}
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


async def test_metrics_in_vllms_shape(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abcdefghij"), run=4)
    async with served(engine, tokenizer) as client:
        ask = {"prompt": "x", "max_tokens": 10}
        summary = (await (await post(client, "completions", **ask)).json())["metrics"]
        detailed = (await (await post(client, "completions", **ask, spec_decode_metrics="detailed")).json())["metrics"]
        none = await (await post(client, "completions", **ask, spec_decode_metrics="none")).json()
    assert set(summary) == {
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
        "tokens_per_step", "exact", "resumed", "speculative_decoding",
    }  # fmt: skip
    assert summary["tokens_per_step"] == 2.5, "ten tokens in four decoding steps"
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


# -- several choices of one prompt: their seeds, their order -----------------------------------------------------------


async def test_choices_of_one_prompt_are_forks_with_seeds_of_their_own(tokenizer):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        await answer(client, "completions", prompt=["a", "b"], n=3, seed=5, logprobs=1, echo=True)
    first, *forks = engine.requests[:3]
    assert [request.fork_of for request in engine.requests] == [None, first.id, first.id] + [
        None if place == 3 else engine.requests[3].id for place in range(3, 6)
    ]
    assert len({request.id for request in engine.requests}) == 6
    seeds = [request.params.seed or 0 for request in engine.requests]
    assert seeds == [choice_seed(5, number) for number in range(3)] * 2
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert [request.params.prompt_logprobs for request in engine.requests] == [1, None, None] * 2
    assert all(fork.prompt == first.prompt and fork.salt == first.salt for fork in forks)


@pytest.mark.parametrize("path", PATHS)
async def test_a_seed_that_was_drawn_repeats_all_choices_and_each_repeats_alone(tokenizer, script, path):
    async with served(Several(script, run=2), tokenizer) as client:
        ask: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        first = (await answer(client, path, **ask, n=4))["choices"]
        again = (await answer(client, path, **ask, n=4, seed=first[0]["seed"]))["choices"]
        alone = [(await answer(client, path, **ask, seed=choice["seed"]))["choices"][0] for choice in first]
    assert [choice["index"] for choice in first] == [0, 1, 2, 3]
    assert again == first
    assert [one["token_ids"] for one in alone] == [choice["token_ids"] for choice in first]


async def test_prompts_times_n_are_in_openais_order(tokenizer, script):
    async with served(ScriptedEngine(script, run=2), tokenizer) as client:
        ask = {"prompt": ["one", "two"], "n": 2, "max_tokens": 3, "echo": True}
        body = await answer(client, "completions", **ask)
        chunks = await chunks_of(client, "completions", **ask)
    texts = [choice["text"] for choice in body["choices"]]
    assert [text[:3] for text in texts] == ["one", "one", "two", "two"]
    streamed = [""] * 4
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


# -- errors and ids ----------------------------------------------------------------------------------------------------


async def test_a_body_that_is_not_utf8_is_told_so(tokenizer):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        response = await client.post("/v1/completions", data='{"prompt": "ä"}'.encode("latin-1"))
        told = (await response.json())["error"]["message"]
    assert (response.status, told) == (400, "The body is not valid JSON: it is not in UTF-8")


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


async def test_a_request_whose_own_options_leave_no_token_is_at_fault(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abc"))

    async def say(request, sink):
        sink.put(
            Delta(
                id=request.id,
                tokens=[],
                finish_reason="error",
                error="none is left",
                fault=(("bad_words",), "none is left", ""),
            )
        )

    engine._say = say  # type: ignore[method-assign]
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", prompt="a")
        assert response.status == 400
        error = (await response.json())["error"]
        assert (error["param"], error["message"], error["type"]) == (
            *("bad_words", "none is left"),
            "invalid_request_error",
        )


@pytest.mark.parametrize("given", ["a b", "x" * 129, "a\tb", 'a" key=root', "ü", "id=1 key=alice"])
async def test_a_request_id_that_could_write_into_a_log_is_replaced(tokenizer, script, given):
    async with served(ScriptedEngine(script), tokenizer) as client:
        response = await client.get("/health", headers={"X-Request-Id": given})
        assert len(response.headers["X-Request-Id"]) == 32
        assert response.headers["X-Request-Id"].isalnum()


@pytest.mark.parametrize("given", ["", "x" * 900_000, "a b", "a\nb"])
async def test_a_request_id_in_the_body_is_short_and_plain(tokenizer, script, given):
    async with served(ScriptedEngine(script), tokenizer) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "request_id": given})
        output = await response.read()
        assert response.status == 400
        assert b'"param":"request_id"' in output
        assert len(output) < 3000


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
        assert "X-Request-Id" in (await client.get("/nothing")).headers
