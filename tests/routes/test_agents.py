"""Tools and thinking through Anthropic's and Ollama's APIs, with their own clients."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import anthropic
import ollama
import pytest

from tests.server.scripted import END, ScriptedEngine, served

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
ANSWER = f"<think>Which city?</think>Let me look.{CALL}{CALL.replace('Ulm', 'Bonn')}"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TELL: dict[str, Any] = {"role": "user", "content": "Weather?"}
ASK: dict[str, Any] = {"model": "toy", "max_tokens": 250, "messages": [TELL]}
TOOLS: Any = [{"name": "weather", "description": "Tells it", "input_schema": SCHEMA}]
OLLAMA_TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": SCHEMA}}
]


@asynccontextmanager
async def clients(tokenizer, text: str, run: int = 3):
    """The engine that says ``text``, and both clients of its server."""
    engine = ScriptedEngine([*tokenizer.encode(text), END], run)
    async with served(engine, tokenizer) as plain:
        url = str(plain.make_url("/"))
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as messages,
            ollama.AsyncClient(host=url) as chats,
        ):
            yield engine, messages, chats


def seen(tokenizer, engine) -> str:
    """The prompt of the last request as the model saw it."""
    text: str = tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("run", [1, 7, 200])
async def test_messages_think_speak_and_call(agent, run):
    async with clients(agent, ANSWER, run) as (engine, client, _):
        whole = await client.messages.create(**ASK, tools=TOOLS)
        async with client.messages.stream(**ASK, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
        assert '"city"' in seen(agent, engine)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, ulm, bonn = (block.model_dump() for block in whole.content)
    assert (thought["thinking"], text["text"]) == ("Which city?", "Let me look.")
    assert (ulm["name"], ulm["input"], bonn["input"]["city"]) == ("weather", {"city": "Ulm", "days": 2}, "Bonn")
    assert ulm["id"] and ulm["id"] != bonn["id"]
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    without_ids = [block.model_dump(exclude={"id", "parsed_output"}) for block in streamed.content]
    assert without_ids == [block.model_dump(exclude={"id"}) for block in whole.content]


async def test_messages_take_calls_and_their_results(agent):
    turns = [
        TELL,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain"}]},
                {"type": "text", "text": "And then?"},
            ],
        },
    ]
    async with clients(agent, "Dry") as (engine, client, _):
        await client.messages.create(**ASK | {"messages": turns, "max_tokens": 60}, tools=TOOLS)
        prompt = seen(agent, engine)
        turns[2]["content"] = [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "Rain"}]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[2\].content\[0\].tool_use_id"):
            await client.messages.create(**ASK | {"messages": turns, "max_tokens": 60}, tools=TOOLS)
    reported = '<think>Hm</think><tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call><|end|>'
    assert f"<|assistant|>{reported}<|user|>Rain<|end|><|user|>And then?<|end|><|assistant|>" in prompt


async def test_tool_choice_none_hides_the_tools(agent):
    async with clients(agent, CALL) as (engine, client, _):
        message = await client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "none"})
        assert "city" not in seen(agent, engine)
    assert [block.type for block in message.content] == ["text"]


async def test_a_call_that_was_cut_off_has_the_arguments_that_came(agent):
    async with clients(agent, CALL.partition(', "days')[0]) as (_, client, chats):
        message = await client.messages.create(**ASK, tools=TOOLS)
        chat = await chats.chat(model="toy", messages=[TELL], tools=OLLAMA_TOOLS)
    [given] = [block.input for block in message.content if block.type == "tool_use"]
    assert [call.function.arguments for call in chat.message.tool_calls] == [given] and set(given) == {"city"}


async def test_thinking_can_be_switched(agent, tokenizer):
    async with clients(agent, "<think>Hm</think>Yes") as (engine, client, chats):
        await client.messages.create(**ASK, thinking={"type": "disabled"})
        assert seen(agent, engine).endswith("<think></think>")
        await client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
        assert seen(agent, engine).endswith("<|assistant|>")
        await chats.chat(model="toy", messages=[TELL], think=False)
        assert seen(agent, engine).endswith("<think></think>")
        answer = await chats.chat(model="toy", messages=[TELL], think=True)
        assert (answer.message.thinking, answer.message.content) == ("Hm", "Yes")
    async with clients(tokenizer, "Yes") as (_, client, chats):
        reported = await client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [one["param"] for one in reported.warnings] == ["thinking"]
        with pytest.raises(ollama.ResponseError, match="think: this model does not think"):
            await chats.chat(model="toy", messages=[TELL], think=True)
        await client.messages.create(**ASK, thinking={"type": "disabled"})


async def test_ollama_matches_results_with_calls(agent):
    calls = [{"function": {"name": name, "arguments": {"city": "Ulm"}}} for name in ("weather", "time")]
    turns = [
        TELL,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "time", "content": "Noon"},
        {"role": "tool", "content": "Rain"},
    ]
    async with clients(agent, "Dry") as (engine, _, client):
        await client.chat(model="toy", messages=turns, tools=OLLAMA_TOOLS)
        assert "<|user|>Noon<|end|><|user|>Rain<|end|><|assistant|>" in seen(agent, engine)
        with pytest.raises(ollama.ResponseError, match=r"messages\[1\].tool_call_id"):
            await client.chat(model="toy", messages=[TELL, turns[3]], tools=OLLAMA_TOOLS)


async def test_show_lists_what_the_model_can(agent, tokenizer):
    async with clients(agent, "x") as (_, _, client):
        assert (await client.show("toy")).capabilities == ["completion", "tools", "thinking"]
    async with clients(tokenizer, "x") as (_, _, client):
        assert (await client.show("toy")).capabilities == ["completion"]
