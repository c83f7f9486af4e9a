"""Tokenizing, detokenizing and rendering say what the model would see."""

from __future__ import annotations

import pytest

from tests.server.scripted import INFO, ScriptedEngine, served

ASK = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Once 🦊"}]
RENDERED = "<|system|>Be kind<|end|><|user|>Once 🦊<|end|><|assistant|>"


@pytest.fixture
async def client(tokenizer):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        yield client


async def said(client, path, **fields):
    response = await client.post(path, json=fields)
    return response.status, await response.json()


async def test_a_text_and_back(client, tokenizer):
    status, body = await said(client, "/tokenize", model="toy", prompt="Once 🦊", return_token_strs=True)
    assert status == 200
    assert body["tokens"] == tokenizer.encode("Once 🦊")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["token_strs"][0].startswith("On")
    assert body["max_model_len"] == INFO.max_model_len
    assert await said(client, "/detokenize", model="toy", tokens=body["tokens"]) == (
        200,
        {"prompt": "Once 🦊", "content": "Once 🦊"},  # vLLM's name and llama.cpp's
    )


async def test_token_strings_only_on_request(client):
    assert (await said(client, "/tokenize", prompt="Once"))[1]["token_strs"] is None
    assert (await said(client, "/tokenize", content="Once"))[1]["count"] == 1, "as llama.cpp's clients ask"


async def test_special_tokens_are_written_out(client):
    assert (await said(client, "/detokenize", tokens=[2, 0]))[1]["prompt"] == "<|user|><|end|>"


async def test_a_conversation_has_the_tokens_of_its_rendering(client, tokenizer):
    status, body = await said(client, "/tokenize", messages=ASK)
    assert (status, body["tokens"]) == (200, tokenizer.encode(RENDERED))
    _, bare = await said(client, "/tokenize", messages=ASK, add_generation_prompt=False)
    assert bare["tokens"] == body["tokens"][:-1]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/apply-template"])
async def test_rendering_shows_what_a_completion_begins_with(client, tokenizer, path):
    status, body = await said(client, path, messages=ASK, temperature=0.5, max_tokens=3)
    assert status == 200
    assert body["prompt"] == RENDERED
    assert body["token_ids"] == tokenizer.encode(RENDERED)
    _, answer = await said(client, "/v1/chat/completions", messages=ASK, max_tokens=3, return_token_ids=True)
    assert answer["prompt_token_ids"] == body["token_ids"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": ASK}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": ASK, "tools": True}, "tools"),
        ("/tokenize", {"messages": ASK, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/tokenize", {"messages": ASK, "chat_template": "{{ x }}"}, "chat_template"),
        ("/detokenize", {"tokens": [330]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/apply-template", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ],
)
async def test_errors_name_the_field(client, path, fields, param):
    status, body = await said(client, path, **fields)
    assert (status, body["error"]["param"]) == (400, param)


async def test_another_model_is_not_found(client):
    status, body = await said(client, "/tokenize", model="other", prompt="x")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
