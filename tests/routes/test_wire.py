"""What others' clients look for, asked of the real server with the bundled pair: llama.cpp's, Ollama's and vLLM's
routes and members, and fields that are not followed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.routes.apis import APIS, at
from tests.server.live import LiveServer
from tests.server.saying import saying

Json = dict[str, Any]
CHAT: Json = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
NATIVE: Json = {"prompt": "Once upon", "n_predict": 4, "seed": 1, "temperature": 0}
#: A schema that has few objects.
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url) as session:
        yield session


async def answer(http: aiohttp.ClientSession, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
    async with http.request("GET" if body is None else "POST", path, json=body, **options) as response:
        return response.status, await response.json(content_type=None)


#: A path, what is sent to it, and some of what comes back; ``any`` stands for anything there is.
ASKED: list[tuple[str, Any, Json]] = [
    ("/completion", NATIVE, {"stop": True, "stop_type": "limit", "tokens": [], "tokens_predicted": 4,
        "prompt": "Once upon", "generation_settings.n_predict": 4, "generation_settings.seed": 1, "truncated": False,
        "timings.predicted_n": 4, "timings.draft_n": any, "timings.draft_n_accepted": any}),
    ("/completions", NATIVE | {"return_tokens": True, "n_probs": 1},
        {"completion_probabilities.3.id": any, "completion_probabilities.3.top_logprobs.0.id": any, "tokens.3": any}),
    # What editors send, as llama.vim does, to have a prompt read beforehand.
    ("/completion", NATIVE | {"n_predict": 0, "response_fields": [""], "t_max_predict_ms": 1, "n_indent": 4},
        {"content": "", "stop_type": "limit", "tokens_predicted": 0, "warnings.0.param": "response_fields",
         "warnings.1.param": "t_max_predict_ms", "warnings.2.param": "n_indent"}),
    ("/completion", NATIVE | {"lora": [{"id": 0}]}, {"error.param": "lora"}),
    ("/tokenize", {"content": "Hi", "add_special": True, "with_pieces": True}, {"tokens.0.piece": "H"}),
    ("/completion", NATIVE | {"n_predict": 30, "json_schema": SCHEMA}, {"content": '{"a": 1}', "stop_type": "eos"}),
    ("/completion", NATIVE | {"n_predict": 9, "grammar": 'root ::= "yes" | "no"'}, {"stop_type": "eos"}),
    ("/completion", NATIVE | {"repeat_penalty": 1.1, "repeat_last_n": 64}, {"error.param": "repeat_last_n"}),
    ("/completion", NATIVE | {"mirostat": 2}, {"error.param": "mirostat"}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, {"error.param": "input_prefix"}),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, {"error.param": "suffix"}),
    ("/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 2}, {"usage.completion_tokens": 2}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 9, "grammar": 'root ::= "yes" | "no"'},
        {"choices.0.finish_reason": "stop"}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 30, "json_schema": SCHEMA},
        {"choices.0.message.content": '{"a": 1}'}),
    ("/v1/chat/completions", CHAT | {"grammar": "root = yes"}, {"error.param": "grammar"}),
    ("/v1/chat/completions", CHAT | {"logit_bias": [[40, 100]], "temperature": 0},
        {"choices.0.message.content": "DDDD"}),
    *(("/v1/completions", {"prompt": "x", "seed": 3, "max_tokens": 60, "structured_outputs": wanted}, found)
        for wanted, found in (
            ({"json": {"type": "objct"}}, {"error.param": "structured_outputs.json"}),
            ({"json": {"type": "string", "not": {"const": "x"}}}, {"error.param": "structured_outputs.json"}),
            ({"json": {"enum": []}}, {"error.param": "structured_outputs.json"}),
            ({"regex": "(a"}, {"error.param": "structured_outputs.regex"}),
            ({"grammar": "start: foo"}, {"error.param": "structured_outputs.grammar"}),
            ({"regex": "ab{2}c"}, {"choices.0.text": "abbc", "choices.0.finish_reason": "stop"}),
            ({"choice": ["<|user|> is no token here"]}, {"choices.0.text": "<|user|> is no token here"}),
            ({"grammar": 'start: "a" B\nB: " fox"'}, {"choices.0.text": "a fox"}),
        )),
    ("/detokenize", {"tokens": [40]}, {"content": "D", "prompt": "D"}),
    ("/props", None,
        {"default_generation_settings.n_ctx": 1024, "total_slots": 4, "chat_template": any, "bos_token": any}),
    ("/slots", None, {"3.id": 3, "0.is_processing": False, "0.n_ctx": 1024}),
    ("/models", None, {"data.0.id": "bundled", "data.0.meta.n_ctx_train": 1024, "data.0.context_length": 1024,
        "data.0.max_input_tokens": 1024, "data.0.lifecycle": "active"}),
    ("/chat/completions", CHAT, {"choices.0.message.content": any, "timings.cache_n": any, "prompt_logprobs": None,
        "prompt_token_ids": None, "choices.0.token_ids": None}),
    ("/responses", {"input": "Hi", "max_output_tokens": 4}, {"object": "response"}),
    ("/messages", CHAT | {"seed": None, "model": "no"}, {"type": "error", "error.type": "not_found_error"}),
    ("/api/show", {"model": "bundled"},
        {"model_info/llama.embedding_length": 256, "model_info/llama.block_count": any}),
    ("/api/pull", {"model": "bundled:latest", "stream": False}, {"status": "success"}),
    ("/api/pull", {"model": "/etc"}, {"error": any}),
    ("/api/pull", {"stream": False}, {"error": any}),
    ("/tokenizer_info", None, {"tokenizer_class": any, "chat_template": any, "model_max_length": 1024}),
    ("/v1/completions/render", {"prompt": [[40, 41], [42]]}, {"0.token_ids": [40, 41], "1.count": 1}),
    ("/v1/completions/render", {"prompt": [-1]}, {"error.param": "prompt"}),
    ("/load", None, {"server_load": 0}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 2},
        {"choices.0.prompt_logprobs": None, "choices.0.token_ids": None}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 2, "return_token_ids": True}, {"choices.0.token_ids.1": any}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 30, "response_format": {"type": "json_object", "schema": SCHEMA}},
        {"choices.0.message.content": '{"a": 1}'}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object", "schema": {"type": 5}}},
        {"error.param": any}),
    ("/v1/chat/completions", CHAT | {"logprob_token_ids": [5]}, {"error.param": "logprob_token_ids"}),
    ("/v1/chat/completions", CHAT | {"dynatemp_range": 0.5}, {"error.param": "dynatemp_range"}),
    ("/v1/chat/completions", CHAT | {"dynatemp_range": 0, "samplers": [], "cache_prompt": True}, {"warnings": ...}),
    ("/v1/chat/completions", CHAT | {"samplers": ["top_k"], "cache_prompt": False},
        {"warnings.0.param": "samplers", "warnings.1.param": "cache_prompt", "warnings.1.code": "not_followed"}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 4, "timings_per_token": True},
        {"warnings.0.param": "timings_per_token"}),
    ("/v1/chat/completions", CHAT | {"store": True}, {"warnings.0.param": "store", "warnings.0.code": "not_followed"}),
    ("/v1/chat/completions", CHAT | {"store": False}, {"warnings": ...}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 4, "store": True}, {"warnings": ...}),
    ("/v1/messages", CHAT | {"seed": None, "model": "bundled", "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"content.0.type": "text", "warnings.0.param": "thinking"}),
    ("/v1/messages", {"model": "bundled", "max_tokens": 4, "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "text", "text": "So"}, {"type": "tool_result", "tool_use_id": "t"}]}]},
        {"error.message": "messages[2].content[1]: tool_result blocks come before the text of their message"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "expected"), ASKED, ids=[path for path, _, _ in ASKED])
async def test_what_is_found(http, path, body, expected):
    status, found = await answer(http, path, body)
    assert (status < 400) == ("error" not in found or found["error"] is None), found
    for place, value in expected.items():
        there = at(found, place)
        assert there is not ... if value is any else there == value, (place, found)


#: What is between a prefix and a suffix, in the special tokens of Qwen's coders and of StarCoder's.
INFILLS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
}


@pytest.fixture(scope="module")
def coders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of models with these tokens, each of which says the same."""
    folder = tmp_path_factory.mktemp("coders")
    targets = {name: saying(folder / name, "return a +", " b;", special=special) for name, special in INFILLS.items()}
    sections = "".join(f'[models.{name}]\ntarget = "{target}"\n' for name, target in targets.items())
    (folder / "foresay.toml").write_text(sections)
    with LiveServer(folder / "log", "--config", str(folder / "foresay.toml"), "--draft", "ngram") as server:
        yield server.wait_for_url()


@pytest.mark.parametrize("model", INFILLS)
async def test_infill_in_the_tokens_of_the_model(coders, model):
    before, hole, after = INFILLS[model]
    asked = {"model": model, "input_prefix": "def f", "prompt": "(", "input_extra": [{"text": "x"}], "seed": 1}
    asked["input_suffix"] = f"end{before}"
    async with aiohttp.ClientSession(coders) as http:
        _, whole = await answer(http, "/infill", asked)
        *pieces, last = await events(http, "/infill", **asked)
        _, cut = await answer(http, "/infill", asked | {"n_predict": 1})
        _, read = await answer(http, "/tokenize", {"model": model, "prompt": whole["prompt"]})
    assert whole["prompt"] == f"{before}--- snippet ---\n\nx\n\ndef f({hole}end{before}{after}"
    assert whole["tokens_evaluated"] > read["count"], "what a file spells is no control token"
    assert (whole["content"], whole["stop_type"]) == ("return a + b;", "eos")
    assert "".join(piece["content"] for piece in pieces) == whole["content"] and last["stop"]
    assert (cut["content"], cut["stop_type"]) == ("return a +", "limit")


@pytest.mark.parametrize("model", INFILLS)
async def test_completions_with_a_suffix_fill_in_what_is_before_it(coders, model):
    before, hole, after = INFILLS[model]
    asked: Json = {"model": model, "prompt": ["def f(", "I"], "suffix": f"end{before}", "seed": 1}
    async with aiohttp.ClientSession(coders) as http:
        _, rendered = await answer(http, "/v1/completions/render", asked)
        _, whole = await answer(http, "/v1/completions", asked | {"return_token_ids": True})
        ids = [one["prompt_token_ids"] for one in whole["choices"]]
        read = [(await answer(http, "/detokenize", {"model": model, "tokens": one}))[1]["content"] for one in ids]
        refused = [
            await answer(http, "/v1/completions", asked | {field: 1}) for field in ("echo", "truncate_prompt_tokens")
        ]
    assert read == [f"{before}{text}{hole}end{before}{after}" for text in ("def f(", "I")]
    assert [one["token_ids"] for one in rendered] == ids and [one["prompt"] for one in rendered] == read
    assert {one["text"] for one in whole["choices"]} == {"return a + b;"}
    assert [(status, body["error"]["param"]) for status, body in refused] == [
        (400, "echo"),
        (400, "truncate_prompt_tokens"),
    ]


@pytest.mark.slow
async def test_a_real_model_says_the_same_through_every_api(smollm2_url):
    asked: Json = {"model": "bundled", "max_tokens": 4, "temperature": 0}
    async with aiohttp.ClientSession(smollm2_url) as http:
        _, rendered = await answer(http, "/v1/chat/completions/render", CHAT)
        whole: Json = {"prompt": rendered["prompt"], "add_special_tokens": False}
        _, found = await answer(http, "/completion", NATIVE | whole)
        texts = [found["content"]]
        for name, api in APIS.items():
            body = api.request(**asked, **whole) if name == "completions" else api.asking("Hi", **asked)
            status, found = await answer(http, api.path, body)
            assert status == 200, found
            texts.append(api.joined([found]).text)
    assert len(set(texts)) == 1 and texts[0].strip(), texts


async def events(http: aiohttp.ClientSession, path: str, **body: Any) -> list[Any]:
    async with http.post(path, json=body | {"stream": True}) as response:
        lines = (await response.text()).split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


async def test_streams_of_llama_cpps_clients(http):
    *pieces, last = await events(http, "/completion", **NATIVE)
    _, whole = await answer(http, "/completion", NATIVE)
    assert "".join(piece["content"] for piece in pieces) == whole["content"] and not last["content"]
    assert [piece["stop"] for piece in pieces] == [False] * len(pieces)
    times = last["timings"]
    assert times["predicted_n"] == 4  # three of them after the prompt
    assert times["predicted_per_second"] * times["predicted_ms"] == pytest.approx(3000, rel=0.01)
    chunks = await events(http, "/v1/chat/completions", **CHAT)
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize(
    ("asked", "has"), [({}, []), ({"continuous_usage_stats": True}, []), ({"include_usage": True}, [None, 4])]
)
async def test_usage_of_chunks(http, asked, has):
    """In one more chunk, without choices."""
    chunks = await events(http, "/v1/chat/completions", **CHAT, stream_options=asked)
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert [*dict.fromkeys(counts)] == has and (chunks[-1]["choices"] == []) == bool(has)


async def test_continuous_usage_counts_up(http):
    asked = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(http, "/v1/chat/completions", **CHAT, stream_options=asked)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4


async def test_the_chosen_token_leads(http):
    _, body = await answer(http, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3, "temperature": 2})
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert (entry["top_logprobs"][0]["token"], len(entry["top_logprobs"])) == (entry["token"], 3)


@pytest.mark.parametrize(
    ("kind", "status"),
    [("application/json", 200), ("application/x-www-form-urlencoded", 200), ("text/plain", 415), ("text/xml", 415)],
)
async def test_what_is_no_json(http, kind, status):
    async with http.post("/v1/chat/completions", data=json.dumps(CHAT), headers={"Content-Type": kind}) as response:
        assert response.status == status
        assert status == 200 or (await response.json())["error"]["param"] == "Content-Type"


async def test_ollamas_clients_find_it_running(http):
    async with http.get("/", headers={"User-Agent": "ollama-python/0.6"}) as response:
        assert await response.text() == "Ollama is running"
