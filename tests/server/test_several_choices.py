"""Several choices of one prompt: their seeds, their order, what they count."""

from __future__ import annotations

from typing import Any

import pytest

from foresay.server.text.options import choice_seed
from tests.server.asking import PATHS, Several, answer, chunks_of
from tests.server.scripted import END, ScriptedEngine, served


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
