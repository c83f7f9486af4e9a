"""Sampling options on the wire: what reaches the engine, and what comes back of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from server.forks import choice_seed
from server.logprobs import Speller
from server.text import SamplingDefaults
from spec.request import Request, TokenLogprobs
from spec.sampling import SamplingParams
from tests.server.scripted import END, ScriptedEngine, entry, served

STORY = "Once upon a fox there was a 🦊🐍 who said: the end!"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell"}]}
PATHS = ["completions", "chat/completions"]


class Several(ScriptedEngine):
    """Says something else to each seed: the script, begun elsewhere."""

    def script_of(self, request: Request) -> Sequence[int]:
        begin = (request.params.seed or 0) % len(self.tokens)
        return [*self.tokens[begin:], *self.tokens[:begin]]


@pytest.fixture
def script(tokenizer) -> list[int]:
    return [*tokenizer.encode(STORY), END]


async def post(client, path, **fields):
    asked = ({"prompt": "Tell"} if path == "completions" else ASK) | fields
    return await client.post(f"/v1/{path}", json=asked)


async def answer(client, path, **fields) -> dict[str, Any]:
    response = await post(client, path, **fields)
    body: dict[str, Any] = await response.json()
    assert response.status == 200, body
    return body


async def chunks_of(client, path, **fields) -> list[dict[str, Any]]:
    response = await post(client, path, **fields, stream=True)
    *events, done = (await response.text()).split("\n\n")[:-1]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: ")]


async def refusal(client, path, **fields) -> dict[str, Any]:
    for stream in (False, True):
        response = await post(client, path, **fields, stream=stream)
        body: dict[str, dict[str, Any]] = await response.json()
        assert response.status == 400, body
    return body["error"]


# -- what reaches the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_every_option_reaches_the_engine(tokenizer, path):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        await answer(
            client, path, presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.25, min_p=0.1, top_k=7,
            logit_bias={"17": -100, "3": 2.5}, allowed_token_ids=[5, 3, 5], seed=9,
        )  # fmt: skip
    [request] = engine.requests
    assert request.params == SamplingParams(
        presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=1.25, min_p=0.1, top_k=7,
        logit_bias={17: -100.0, 3: 2.5}, allowed_token_ids=(5, 3, 5), seed=9,
        max_tokens=16 if path == "completions" else None,
    )  # fmt: skip


async def test_the_models_repetition_penalty_is_the_default(tokenizer):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer, defaults=SamplingDefaults(repetition_penalty=1.1)) as client:
        await answer(client, "completions")
        await answer(client, "completions", repetition_penalty=1)
    assert [request.params.repetition_penalty for request in engine.requests] == [1.1, 1.0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": "much"}, "presence_penalty"),
        ({"logit_bias": {"17": 101}}, "logit_bias"),
        ({"logit_bias": {"fox": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"330": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": [17]}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": "fox"}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [330]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": 1}, "priority"),
    ],
)
async def test_what_is_out_of_range_is_named(tokenizer, path, fields, param):
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        error = await refusal(client, path, **fields)
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("chat/completions", {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"logprobs": 3}, "logprobs"),
        ("chat/completions", {"echo": True}, "echo"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"top_logprobs": 3}, "top_logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ("completions", {"prompt": ["a"] * 3, "n": 50}, "n"),
    ],
)
async def test_each_api_has_its_own_idea_of_logprobs(tokenizer, path, fields, param):
    async with served(ScriptedEngine([END]), tokenizer) as client:
        assert (await refusal(client, path, **fields))["param"] == param


@pytest.mark.parametrize("path", PATHS)
async def test_options_that_ask_for_nothing_change_nothing(tokenizer, path):
    engine = ScriptedEngine([END])
    nothing: dict[str, Any] = {
        "n": 1, "best_of": 1, "logit_bias": {}, "bad_words": [], "presence_penalty": 0, "frequency_penalty": 0.0,
        "repetition_penalty": 1, "stream_interval": 1, "spaces_between_special_tokens": False, "priority": 0,
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


# -- n -----------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("path", PATHS)
async def test_the_prompt_counts_once_however_many_choices_it_has(tokenizer, script, path):
    async with served(ScriptedEngine(script, run=3), tokenizer) as client:
        one = (await answer(client, path, max_tokens=5, n=1))["usage"]
        four = await answer(client, path, max_tokens=5, n=4)
        chunks = await chunks_of(client, path, max_tokens=5, n=4, stream_options={"include_usage": True})
    assert four["usage"] == chunks[-1]["usage"]
    assert four["usage"] == {
        "prompt_tokens": one["prompt_tokens"],
        "completion_tokens": 4 * one["completion_tokens"],
        "total_tokens": one["prompt_tokens"] + 4 * one["completion_tokens"],
        "prompt_tokens_details": one["prompt_tokens_details"],
    }
    drafted = four["metrics"]["speculative_decoding"]
    assert drafted["num_spec_steps"] == sum(drafted["acceptance_histogram"]) == 4 * 2
    assert drafted["num_accepted_draft_tokens"] == sum(j * n for j, n in enumerate(drafted["acceptance_histogram"]))


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


# -- logprobs ----------------------------------------------------------------------------------------------------------


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
        assert [(top["logprob"], bytes(top["bytes"])) for top in one["top_logprobs"]] == [
            (logprob, tokenizer.token_bytes(top)) for top, logprob in given.top
        ]
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
    ids, said = tokenizer.encode(prompt), script[:4]
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
        assert found["token_logprobs"][len(ids) :] == [entry(token, at, 2).logprob for at, token in enumerate(said)]
        assert choice["text"] == prompt + STORY[: len(choice["text"]) - len(prompt)]
        for token, begin in zip(found["tokens"], found["text_offset"], strict=True):
            assert choice["text"][begin:].startswith(token)
        assert joined(chunks, choice["index"])["logprobs"] == found
        assert joined(chunks, choice["index"])["text"] == choice["text"]
    assert all(request.params.prompt_logprobs in (2, None) for request in engine.requests)


def joined(chunks, index) -> dict[str, Any]:
    """A completion choice of a stream, its pieces joined."""
    whole: dict[str, Any] = {"text": "", "logprobs": None}
    for choice in (one for chunk in chunks for one in chunk["choices"] if one["index"] == index):
        whole["text"] += choice["text"]
        if choice["logprobs"] is not None:
            before = whole["logprobs"] or {name: [] for name in choice["logprobs"]}
            whole["logprobs"] = {name: before[name] + values for name, values in choice["logprobs"].items()}
    return whole


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
async def test_nothing_is_written_where_only_the_prompt_is_asked_for(tokenizer, first, stream):
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
        spelled = Speller(sentencepiece).completion([given], [chosen], [0], 2)
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


# -- chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [2, 4, 100])
async def test_a_chunk_has_at_least_stream_interval_tokens(tokenizer, interval):
    tokens = tokenizer.encode("abcdefghijklmnopqrst")
    async with served(ScriptedEngine(tokens, run=1), tokenizer) as client:
        ask: dict[str, Any] = {"max_tokens": len(tokens), "logprobs": 0}
        chunks = await chunks_of(client, "completions", **ask, stream_interval=interval)
        every = await chunks_of(client, "completions", **ask)
    sizes = [len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks]
    assert sizes[0] == 1
    assert all(size == interval for size in sizes[1:-1])
    assert len(every) == len(tokens)
    assert joined(chunks, 0) == joined(every, 0)


async def test_what_was_held_back_comes_before_an_error(tokenizer):
    engine = ScriptedEngine(tokenizer.encode("abcdef"), fail_after=3)
    async with served(engine, tokenizer) as client:
        response = await post(client, "completions", stream=True, stream_interval=50)
        *chunks, error = [json.loads(event[6:]) for event in (await response.text()).split("\n\n")[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert error["error"]["type"] == "engine_error"
