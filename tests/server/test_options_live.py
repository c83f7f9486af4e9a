"""Sampling options through the official client, against the real server with the bundled pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

MODEL = "bundled"
PROMPT = "Once upon a time there was a fox"
ASK: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 3}
IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def blocking(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


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
