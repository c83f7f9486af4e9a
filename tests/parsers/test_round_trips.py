"""A call and its result in every API, whole and streamed: the client gets what the model wrote, and the model reads it
again, whichever API it came through."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from tests.parsers.asking import SCHEMA, TOOL, USER, engine_saying, prompt_of
from tests.routes.apis import APIS
from tests.server.scripted import served

Json = dict[str, Any]
PARIS = '{"city": "Paris"}'


class Said(NamedTuple):
    """What a client gets. calls: names with arguments. finish: as OpenAI's chats say it."""

    thought: str
    text: str
    calls: list[tuple[str, Any]]
    finish: str = "tool_calls"


class Case(NamedTuple):
    """What a model of the family writes, how a client gets it, and what of that the next prompt ends with."""

    family: str
    output: str
    said: Said
    shown: str


CALL = f'{{"name": "get_weather", "arguments": {PARIS}}}'
MADE = ("get_weather", json.loads(PARIS))
HERMES = f"<tool_call>{CALL}</tool_call>"
AGAIN = "<|end|>{}<|assistant|>".format("<|tool|>sunny<|end|>")
ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
OF_HARMONY = (
    f"{ANALYSIS}We look.{NEXT}<|channel|>commentary<|message|>Wait.{NEXT}"
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>"
)
OF_GEMMA = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
CASES: dict[str, Case] = {
    "alone": Case("hermes", HERMES, Said("", "", [MADE]), f"<|assistant|>{HERMES}{AGAIN}"),
    "thought, text and two": Case(
        "qwen3", f"<think>\nHm.\n</think>\n\nSure.\n{HERMES}\n{HERMES}", Said("Hm.", "Sure.", [MADE, MADE]),
        f"<|assistant|>{HERMES}{HERMES}Sure.<|end|><|tool|>sunny<|end|>{AGAIN.removeprefix('<|end|>')}",
    ),
    "objects in a row": Case(
        "llama3", f"<|python_tag|>{CALL}; {CALL}".replace("arguments", "parameters"), Said("", "", [MADE, MADE]), AGAIN
    ),
    "a list": Case("mistral", f"Sure.[TOOL_CALLS][{CALL}, {CALL}]", Said("", "Sure.", [MADE, MADE]), AGAIN),
    "names and arguments": Case("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", Said("", "", [MADE]), AGAIN),
    "channels": Case(
        "harmony", OF_HARMONY, Said("We look.", "Wait.", [MADE]),
        f"<|start|>assistant{ANALYSIS}We look.\n\nWait.<|end|><|start|>assistant to=functions.get_weather<|channel|>"
        f"commentary json<|message|>{PARIS}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary"
        '<|message|>"sunny"<|end|><|start|>assistant',
    ),
    "a notation of its own": Case(
        "gemma4", f"<|channel>thought\nWe look.\n<channel|>Wait.\n{OF_GEMMA}", Said("We look.", "Wait.", [MADE]),
        f'Wait.{OF_GEMMA}<|tool_response>response:get_weather{{value:<|"|>sunny<|"|>}}<tool_response|>'
        "<|channel>thought\n<channel|>",
    ),
    "an answer that is a call": Case("hermes", f"```json\n{CALL}\n```", Said("", "", [MADE]), AGAIN),
    "no opening": Case("qwen3_coder", CODER.removeprefix("<tool_call>\n"), Said("", "", [MADE]), AGAIN),
    "no end of the value": Case("qwen3_coder", CODER.replace("</parameter>\n", ""), Said("", "", [MADE]), AGAIN),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def family(case: Case) -> str:
    return case.family


# -- what each API says ------------------------------------------------------------------------------------------------

FINISHES = {"tool_use": "tool_calls", "completed": "tool_calls", "stop": "tool_calls"}


def of_chat(chunks: list[Json]) -> Said:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = [choice["delta"] if "delta" in choice else choice["message"] for choice in choices]
    calls: dict[int, list[str]] = {}
    for place, call in ((place, call) for piece in pieces for place, call in enumerate(piece.get("tool_calls") or ())):
        made = calls.setdefault(call.get("index", place), ["", ""])
        made[0] += call["function"].get("name", "")
        made[1] += call["function"].get("arguments", "")
    return Said(
        joined(piece.get("reasoning_content") for piece in pieces), joined(piece.get("content") for piece in pieces),
        [(name, json.loads(arguments)) for name, arguments in calls.values()], choices[-1]["finish_reason"],
    )  # fmt: skip


def of_messages(chunks: list[Json]) -> Said:
    if len(chunks) > 1:
        blocks = [chunk["content_block"] | {"input": ""} for chunk in chunks if chunk["type"] == "content_block_start"]
        for chunk in chunks:
            for name, value in chunk["delta"].items() if chunk["type"] == "content_block_delta" else ():
                field = "input" if name == "partial_json" else name
                if name != "type":
                    blocks[chunk["index"]][field] = blocks[chunk["index"]].get(field, "") + value
        calls = [(one["name"], json.loads(one["input"])) for one in blocks if one["type"] == "tool_use"]
        [finish] = [chunk["delta"]["stop_reason"] for chunk in chunks if chunk["type"] == "message_delta"]
    else:
        blocks, finish = chunks[0]["content"], chunks[0]["stop_reason"]
        calls = [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
    thought, text = (joined(one.get(name) for one in blocks) for name in ("thinking", "text"))
    return Said(thought, text, calls, finish)


def of_responses(chunks: list[Json]) -> Said:
    whole = chunks[-1].get("response", chunks[-1])
    kinds = {kind: [one for one in whole["output"] if one["type"] == kind] for kind in ("reasoning", "message")}
    thought, text = (joined(part["text"] for one in kinds[kind] for part in one["content"]) for kind in kinds)
    calls = [one for one in whole["output"] if one["type"] == "function_call"]
    for kind, wanted in (("output_text", text), ("function_call_arguments", joined(one["arguments"] for one in calls))):
        deltas = [chunk["delta"] for chunk in chunks if chunk.get("type") == f"response.{kind}.delta"]
        assert len(chunks) == 1 or joined(deltas) == wanted
    return Said(thought, text, [(one["name"], json.loads(one["arguments"])) for one in calls], whole["status"])


def of_ollama(chunks: list[Json]) -> Said:
    pieces = [chunk["message"] for chunk in chunks]
    calls = [call["function"] for piece in pieces for call in piece.get("tool_calls") or ()]
    thought, text = (joined(piece.get(name) for piece in pieces) for name in ("thinking", "content"))
    return Said(thought, text, [(one["name"], one["arguments"]) for one in calls], chunks[-1]["done_reason"])


def joined(texts: Iterable[str | None]) -> str:
    return "".join(filter(None, texts))


# -- what is sent back -------------------------------------------------------------------------------------------------


def chat_again(whole: Json) -> Json:
    message = whole["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "sunny"} for one in message["tool_calls"]]
    return {"messages": [USER, message, *results]}


def messages_again(whole: Json) -> Json:
    calls = [one["id"] for one in whole["content"] if one["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": id, "content": "sunny"} for id in calls]
    return {
        "messages": [USER, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": results}]
    }


def responses_again(whole: Json) -> Json:
    calls = [one["call_id"] for one in whole["output"] if one["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": id, "output": "sunny"} for id in calls]
    return {"input": [USER, *whole["output"], *results]}


def ollama_again(whole: Json) -> Json:
    message = whole["message"]
    results = [{"role": "tool", "content": "sunny"} for _ in message["tool_calls"]]
    return {"messages": [USER, message, *results]}


class Road(NamedTuple):
    """tool: as this API has it. read: what it says. again: its next request."""

    tool: Json
    read: Callable[[list[Json]], Said]
    again: Callable[[Json], Json]


OF_ANTHROPIC = {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}
ROADS = {
    "chat": Road(TOOL, of_chat, chat_again),
    "messages": Road(OF_ANTHROPIC, of_messages, messages_again),
    "responses": Road({"type": "function", **TOOL["function"]}, of_responses, responses_again),
    "ollama": Road(TOOL, of_ollama, ollama_again),
}


@pytest.mark.parametrize("run", [1, 3, 1000])
async def test_every_api_gets_the_calls_and_the_model_its_own_words(tokenizer, case: Case, run: int) -> None:
    engine, prompts = engine_saying(tokenizer, case.output, run), {}
    async with served(engine, tokenizer) as client:
        for name, road in ROADS.items():
            api, asked = APIS[name], {"tools": [road.tool]}
            [whole] = await api.exchange(client, api.asking("Weather?") | asked)
            chunks = await api.exchange(client, api.asking("Weather?", True) | asked)
            for answer in ([whole], chunks):
                said = road.read(answer)
                assert said._replace(finish=FINISHES.get(said.finish, said.finish)) == case.said, name
            if case.said.thought and name in ("chat", "responses"):
                assert re.search(r"'reasoning_tokens': [1-9]", str(whole["usage"]))
            await api.exchange(client, api.request() | asked | road.again(whole))
            prompts[name] = prompt_of(engine, tokenizer)
    assert set(prompts.values()) == {prompts["chat"]} and prompts["chat"].endswith(case.shown), prompts
