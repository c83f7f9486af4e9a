"""Sampling options on the wire: what reaches the engine (tests/routes/test_refusals.py has what is refused)."""

from __future__ import annotations

from typing import Any

import pytest

from foresay.server.schemas.chat import CompletionRequest
from foresay.server.text.options import check_echoed
from foresay.spec.errors import InvalidRequest
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.wire import PATHS, answer


@pytest.mark.parametrize("path", PATHS)
async def test_llama_cpps_list_of_biases(tokenizer, path):
    """Ids and texts, whose tokens all get the bias; false is never."""
    engine, fox = ScriptedEngine([END]), tokenizer.encode("a fox", False)
    given = [[17, -1.5], ["a fox", 2], [17, 0.5], [5, False], ["b", False]]
    async with served(engine, tokenizer) as client:
        await answer(client, path, logit_bias=given, bad_words=["zz"])
        await answer(client, path, bad_words=["zz"])
    listed, plain = (request.params for request in engine.requests)
    assert listed.logit_bias == {17: -1.0} | dict.fromkeys(fox, 2.0)
    assert listed.bad_words == (*plain.bad_words, (5,), *((token,) for token in tokenizer.encode("b", False)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value"), [("grammar", 'root ::= "a" | "b"'), ("json_schema", {"const": "a"})])
async def test_llama_cpps_names_of_what_an_answer_must_match(tokenizer, path, field, value):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        for said in ({field: value}, {"structured_outputs": {field.removesuffix("_schema"): value}}, {"grammar": ""}):
            await answer(client, path, **said)
    own, ours, none = (request.grammar for request in engine.requests)
    assert own is not None and ours is not None and own.text == ours.text and none is None
    assert own.param == field


async def test_prompts_are_repeated_within_bounds(tokenizer):
    body = CompletionRequest(prompt="", echo=True)
    for echo, ids, field in ((True, None, "echo"), (False, True, "return_token_ids"), (True, True, "echo")):
        body.echo, body.return_token_ids = echo, ids
        with pytest.raises(InvalidRequest, match=f"{field}: all choices would repeat 1,048,584 tokens") as refused:
            check_echoed(body, [range(131_073)], 8)
        assert refused.value.param == field
        check_echoed(body, [range(131_072)], 8)
        check_echoed(body, [range(2_000_000)], 1)
    body.echo = body.return_token_ids = None
    check_echoed(body, [range(131_073)] * 8, 16)


@pytest.mark.parametrize("path", PATHS)
async def test_options_that_ask_for_nothing_change_nothing(tokenizer, path):
    engine = ScriptedEngine([END])
    nothing: dict[str, Any] = {
        "n": 1, "best_of": 1, "logit_bias": {}, "bad_words": [], "presence_penalty": 0, "frequency_penalty": 0.0,
        "repetition_penalty": 1, "spaces_between_special_tokens": False, "priority": 0,
        "return_tokens_as_token_ids": False, "user": "me", "store": True, "metadata": {"a": "b"},
    }  # fmt: skip
    async with served(engine, tokenizer) as client:
        plain = await answer(client, path)
        same = await answer(client, path, **nothing)
    assert engine.requests[0].params == engine.requests[1].params
    assert [set(choice) for choice in same["choices"]] == [set(choice) for choice in plain["choices"]]
    assert same["choices"][0]["logprobs"] is None


def spelled(tokenizer, ids) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in ids).decode()


async def test_bad_words_are_spelled_at_the_beginning_and_after_a_space(tokenizer, sentencepiece):
    for used, expected in ((tokenizer, {"fox", " fox"}), (sentencepiece, {"fox", " fox"})):
        engine = ScriptedEngine([END])
        async with served(engine, used) as client:
            await answer(client, "completions", bad_words=["fox", " fox"])
        [request] = engine.requests
        assert {spelled(used, ids) for ids in request.params.bad_words} == expected
        assert len(set(request.params.bad_words)) == len(request.params.bad_words)


async def test_truncation_keeps_the_end_of_the_prompt(tokenizer):
    engine = ScriptedEngine([END])
    long = list(range(20, 320)) * 2
    async with served(engine, tokenizer) as client:
        await answer(client, "completions", prompt=long, truncate_prompt_tokens=5)
        await answer(client, "completions", prompt=long, truncate_prompt_tokens=-1, max_tokens=12)
        await answer(client, "completions", prompt=long[:9], truncate_prompt_tokens=10)
        await answer(client, "chat/completions", truncate_prompt_tokens=3)
        echo = await answer(client, "completions", prompt="Once upon a fox", truncate_prompt_tokens=2, echo=True)
    given = [request.prompt for request in engine.requests]
    assert given[:3] == [long[-5:], long[-500:], long[:9]]
    assert len(given[3]) == 3
    assert echo["choices"][0]["text"] == tokenizer.decode(tokenizer.encode("Once upon a fox")[-2:])
