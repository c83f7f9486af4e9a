"""Sampling options through the official client, against the real server with the bundled pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

MODEL = "bundled"
PROMPT = "Once upon a time there was a fox"
ASK: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 3}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 12,
    "seed": 3,
}
IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def blocking(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_completions_with_every_option_blocking(blocking):
    ask = ASK | {"n": 2, "logprobs": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"300": -100}}
    extra = IDS | {"repetition_penalty": 1.1, "min_p": 0.01, "bad_words": ["wolf"], "top_k": 50}
    whole = blocking.completions.create(**ask, extra_body=extra)
    chunks = list(blocking.completions.create(**ask, extra_body=extra, stream=True))
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].token_ids != whole.choices[1].token_ids
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices) == 24
    assert whole.usage.prompt_tokens == whole.usage.total_tokens - 24
    for choice in whole.choices:
        pieces = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        found = choice.logprobs
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            output = [getattr(piece.logprobs, field) for piece in pieces if piece.logprobs]
            assert [value for values in output for value in values] == getattr(found, field)
            assert len(getattr(found, field)) == len(choice.token_ids) == 12
        assert "".join(found.tokens) == choice.text
        assert 300 not in choice.token_ids


async def test_the_clients_own_accumulating_stream_adds_logprobs_up(client):
    ask = CHAT | {"n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 40, "stop": ["."]}
    whole = await client.chat.completions.create(**ask)
    async with client.chat.completions.stream(**ask) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert [one.logprobs.content for one in final.choices] == [one.logprobs.content for one in whole.choices]
    assert [one.message.content for one in final.choices] == [one.message.content for one in whole.choices]


async def test_logprobs_do_not_depend_on_how_the_tokens_were_drawn(client):
    """They are the model's own: a continuation has the entries that the same text has as an echoed prompt."""
    ask = {"temperature": 1.3, "presence_penalty": 1.0, "logprobs": 2}
    output = (await client.completions.create(**ASK | ask, extra_body=IDS)).choices[0]
    prompt = (await client.completions.create(**ASK, extra_body=IDS)).choices[0].prompt_token_ids
    again = await client.completions.create(
        model=MODEL, prompt=prompt + output.token_ids, max_tokens=0, echo=True, logprobs=2
    )
    echoed = again.choices[0].logprobs
    assert echoed.token_logprobs[len(prompt) :] == output.logprobs.token_logprobs
    assert echoed.top_logprobs[len(prompt) :] == output.logprobs.top_logprobs
    assert again.choices[0].finish_reason == "length"
    assert again.usage.completion_tokens == 0


async def test_options_hold(client):
    """Each does what it is for, as far as the text shows."""
    greedy: dict[str, Any] = ASK | {"temperature": 0, "max_tokens": 24}

    async def ids(**fields) -> list[int]:
        body = await client.completions.create(**greedy, extra_body=IDS | fields)
        return list(body.choices[0].token_ids)

    plain = await ids()
    assert plain[0] not in await ids(logit_bias={str(plain[0]): -100})
    assert await ids(logit_bias={"305": 100}) == [305] * 24
    assert set(await ids(allowed_token_ids=plain[:3])) <= set(plain[:3])
    repeated = await ids(presence_penalty=-2, frequency_penalty=-2)
    varied = await ids(presence_penalty=2, frequency_penalty=2)
    assert len(set(repeated)) < len(set(varied))
    assert len(set(await ids(repetition_penalty=5))) == 24
    word = (await client.completions.create(**greedy)).choices[0].text.split()[1]
    banned = await client.completions.create(**greedy, extra_body={"bad_words": [word]})
    assert word not in banned.choices[0].text.split()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_what_leaves_no_token_is_refused_before_a_prompt_is_scored(blocking, more, stream):
    nothing = {"allowed_token_ids": [300], "structured_outputs": {"regex": "[0-9]{3}"}}
    with pytest.raises(openai.APIError, match="no token is allowed here"):  # behind an echo in mid-stream
        list(blocking.completions.create(**ASK, stream=stream, extra_body=nothing | more))
