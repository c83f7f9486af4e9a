"""What becomes of a prompt and its settings on the way from HTTP to the engine."""

from __future__ import annotations

from typing import Any

from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import ASK, post


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
