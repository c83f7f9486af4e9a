"""Answers of the HTTP layer over a scripted engine, streamed and whole: chunk rules, intervals, usage, metrics."""

from __future__ import annotations

import pytest

from tests.server.asking import post
from tests.server.scripted import ScriptedEngine, served
from tests.server.wire import ASK, STORY, events


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


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_usage_comes_in_one_extra_chunk_only_on_request(tokenizer, script, path):
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
