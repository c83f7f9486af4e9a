"""Logprobs on the wire, of the output and of the prompt, in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from foresay.server.api.common.answer import TokenDecoder
from foresay.spec.request import TokenLogprobs
from tests.server.scripted import END, ScriptedEngine, entry, served
from tests.server.wire import PATHS, STORY, answer, chunks_of, joined


async def test_chat_logprobs_in_openais_shape(tokenizer, script):
    async with served(ScriptedEngine(script, run=3), tokenizer) as client:
        plain = (await answer(client, "chat/completions", logprobs=True))["choices"][0]
        body = await answer(client, "chat/completions", logprobs=True, top_logprobs=2, return_token_ids=True)
        as_ids = await answer(client, "chat/completions", logprobs=True, return_tokens_as_token_ids=True)
    [choice] = body["choices"]
    assert set(choice["logprobs"]) == {"content", "refusal"}
    content = choice["logprobs"]["content"]
    assert len(content) == len(script) == body["usage"]["completion_tokens"] == len(choice["token_ids"])
    for place, (one, token) in enumerate(zip(content, script, strict=True)):
        given = entry(token, place, 2)
        assert set(one) == {"token", "logprob", "bytes", "top_logprobs"}
        assert (one["logprob"], bytes(one["bytes"])) == (given.logprob, tokenizer.token_bytes(token))
        likeliest = [(logprob, tokenizer.token_bytes(top)) for top, logprob in given.top]
        first, *others = [(top["logprob"], bytes(top["bytes"])) for top in one["top_logprobs"]]
        assert first == (one["logprob"], bytes(one["bytes"])) and others == [top for top in likeliest if top != first]
    assert b"".join(bytes(one["bytes"]) for one in content[:-1]).decode() == choice["message"]["content"] == STORY
    assert content[-1]["token"] == "<|end|>"
    halves = [one for one in content if one["token"].startswith("\\x")]
    assert halves
    assert all(one["token"] == "".join(f"\\x{byte:02x}" for byte in one["bytes"]) for one in halves)
    assert all(one["top_logprobs"] == [] for one in plain["logprobs"]["content"])
    assert [one["token"] for one in as_ids["choices"][0]["logprobs"]["content"]] == [f"token_id:{t}" for t in script]


async def test_completion_logprobs_in_openais_shape(tokenizer, script):
    async with served(ScriptedEngine(script, run=3), tokenizer) as client:
        body = await answer(client, "completions", max_tokens=100, logprobs=2)
        chosen = await answer(client, "completions", max_tokens=100, logprobs=0)
        as_ids = await answer(client, "completions", max_tokens=100, logprobs=3, return_tokens_as_token_ids=True)
    [choice] = body["choices"]
    found = choice["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in found.values()} == {len(script)}
    assert found["token_logprobs"] == [entry(token, place, 2).logprob for place, token in enumerate(script)]
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert token in top
        assert 1 <= len(top) <= 3
    partial = [token for token in found["tokens"] if token.startswith("bytes:")]
    assert partial
    assert all("\\x" in token for token in partial)
    whole = [(token, begin) for token, begin in zip(found["tokens"], found["text_offset"], strict=True)]
    assert all(STORY[begin:].startswith(token) for token, begin in whole[:-1] if "bytes:" not in token)
    assert whole[-1] == ("<|end|>", len(STORY))
    assert [list(top) for top in chosen["choices"][0]["logprobs"]["top_logprobs"]] == [[one] for one in found["tokens"]]
    top = as_ids["choices"][0]["logprobs"]["top_logprobs"][4]
    assert set(top) == {f"token_id:{token}" for token, _ in entry(script[4], 4, 3).top}


async def test_echo_puts_the_prompts_logprobs_in_front(tokenizer, script):
    engine = ScriptedEngine(script, run=3)
    prompt = "Once upon a fox"
    ids, output = tokenizer.encode(prompt), script[:4]
    async with served(engine, tokenizer) as client:
        body = await answer(client, "completions", prompt=prompt, max_tokens=4, echo=True, logprobs=2, n=2)
        chunks = await chunks_of(client, "completions", prompt=prompt, max_tokens=4, echo=True, logprobs=2, n=2)
        from_ids = await answer(client, "completions", prompt=ids, max_tokens=4, echo=True, logprobs=2)
    assert from_ids["choices"][0]["logprobs"] == body["choices"][0]["logprobs"]
    for choice in body["choices"]:
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(ids) + 4
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        expected = [entry(token, place, 2).logprob for place, token in enumerate(ids)][1:]
        assert found["token_logprobs"][1 : len(ids)] == expected
        assert found["token_logprobs"][len(ids) :] == [entry(token, at, 2).logprob for at, token in enumerate(output)]
        assert choice["text"] == prompt + STORY[: len(choice["text"]) - len(prompt)]
        for token, begin in zip(found["tokens"], found["text_offset"], strict=True):
            assert choice["text"][begin:].startswith(token)
        assert joined(chunks, choice["index"])["logprobs"] == found
        assert joined(chunks, choice["index"])["text"] == choice["text"]
    assert all(request.params.prompt_logprobs in (2, None) for request in engine.requests)


async def test_logprobs_of_a_long_prompt_are_the_same_streamed(tokenizer, script):
    """There are so many that they are spelled in a thread."""
    prompt = [20 + place % 300 for place in range(400)]
    async with served(ScriptedEngine(script, run=3), tokenizer) as client:
        ask: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 1}
        body = await answer(client, "completions", **ask)
        chunks = await chunks_of(client, "completions", **ask)
    assert joined(chunks, 0)["logprobs"] == body["choices"][0]["logprobs"]
    assert joined(chunks, 0)["text"] == body["choices"][0]["text"]
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [END, 40])
async def test_nothing_is_written_where_only_the_prompt_is_requested(tokenizer, first, stream):
    """As lm-eval asks: ``echo``, ``logprobs``, ``max_tokens`` 0."""
    engine = ScriptedEngine([first])
    async with served(engine, tokenizer) as client:
        ask: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 0, "echo": True, "logprobs": 1}
        if stream:
            *chunks, last = await chunks_of(client, "completions", **ask, stream_options={"include_usage": True})
            [ending] = chunks[-1]["choices"]
            choice, usage = ending | joined(chunks, 0), last["usage"]
        else:
            body = await answer(client, "completions", **ask)
            choice, usage = body["choices"][0], body["usage"]
    ids = tokenizer.encode("Once upon")
    assert (choice["text"], choice["finish_reason"]) == ("Once upon", "length")
    assert {len(values) for values in choice["logprobs"].values()} == {len(ids)}
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, len(ids))
    assert engine.requests[0].params.max_tokens == 1


async def test_what_the_tokenizer_puts_in_front_takes_no_room_in_the_echo(sentencepiece):
    async with served(ScriptedEngine([30]), sentencepiece) as client:
        body = await answer(client, "completions", prompt="a b", max_tokens=1, echo=True, logprobs=0)
    [choice] = body["choices"]
    assert choice["text"].startswith("a b")
    assert choice["logprobs"]["tokens"][:2] == [" a", " b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 3]


def test_of_tokens_that_are_spelled_alike_the_likeliest_is_listed(sentencepiece):
    letter, byte = sentencepiece.encode("\na", False)[-1], 3 + ord("a")
    assert sentencepiece.token_bytes(letter) == sentencepiece.token_bytes(byte) == b"a"
    for chosen, top in ((byte, [(letter, -1.0), (byte, -2.0)]), (letter, [(byte, -0.5), (letter, -1.0)])):
        given = TokenLogprobs(chosen, dict(top)[chosen], top)
        spelled = TokenDecoder(sentencepiece).completion([given], [chosen], [0], 2)
        assert spelled.top_logprobs == [{"a": top[0][1]}]


@pytest.mark.parametrize("path", PATHS)
async def test_prompt_logprobs_in_vllms_shape(tokenizer, script, path):
    async with served(ScriptedEngine(script, run=3), tokenizer) as client:
        body = await answer(client, path, max_tokens=3, prompt_logprobs=2, return_token_ids=True)
        bare = await answer(client, path, max_tokens=3, prompt_logprobs=0)
        chunks = await chunks_of(client, path, max_tokens=3, prompt_logprobs=2)
    holder = body["choices"][0] if path == "completions" else body
    prompt, found = holder["prompt_token_ids"], holder["prompt_logprobs"]
    assert len(found) == len(prompt)
    assert found[0] is None
    for place, (token, one) in enumerate(zip(prompt, found, strict=True)):
        if place:
            given = entry(token, place, 2)
            assert set(one) == {str(token), *(str(top) for top, _ in given.top)}
            assert one[str(token)]["rank"] == 2
            assert one[str(token)]["decoded_token"] == tokenizer.spelled(token).text
    alone = bare["choices"][0] if path == "completions" else bare
    assert [set(one) for one in alone["prompt_logprobs"][1:]] == [{str(token)} for token in prompt[1:]]
    holders = [chunk["choices"][0] if path == "completions" else chunk for chunk in chunks if chunk["choices"]]
    assert [one["prompt_logprobs"] for one in holders if "prompt_logprobs" in one] == [found]
