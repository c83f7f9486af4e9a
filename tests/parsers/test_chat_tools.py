"""Tools over HTTP with a scripted engine: what the model is shown, and what the client gets."""

from __future__ import annotations

import functools
import json
import operator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.parsers.asking import CALLED, RESULT, SCHEMA, TOOL, USER, ask, chunks_of, engine_saying, official, prompt_of
from tests.server.scripted import served

CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
ARGUMENTS = '{"city": "Paris", "days": 3}'
TWO = f"Sure.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
THOUGHT = f"<think>\nHm.\n</think>\n\n{TWO}"
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


# -- what the client gets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3"])
@pytest.mark.parametrize("run", [1, 3, 1000])
async def test_a_stream_of_calls_obeys_the_chunk_rules(tokenizer, run):
    async with served(engine_saying(tokenizer, THOUGHT, run), tokenizer) as client:
        chunks = await chunks_of(client, tools=[TOOL])
        _, whole = await ask(client, tools=[TOOL])
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": None}
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    kinds = [next(iter(choice["delta"])) for choice in middle]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    assert all(choice["delta"].pop("reasoning", text) == text for choice in middle
               for text in [choice["delta"].get("reasoning_content")])  # fmt: skip
    assert all(len(choice["delta"]) == 1 and choice["finish_reason"] is None for choice in middle)
    deltas = [call for choice in middle for call in choice["delta"].get("tool_calls", [])]
    heads = [call for call in deltas if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in heads] == [
        (0, "function", "get_weather"),
        (1, "function", "get_weather"),
    ]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in deltas
               if call not in heads)  # fmt: skip
    message = whole["choices"][0]["message"]
    for index, call in enumerate(message["tool_calls"]):
        assert call["id"] != heads[index]["id"], "two requests"
        assert call["function"]["arguments"] == ARGUMENTS
        assert "".join(delta["function"]["arguments"] for delta in deltas if delta["index"] == index) == ARGUMENTS
    for field in ("content", "reasoning_content"):
        assert message[field] == "".join(choice["delta"].get(field, "") for choice in middle)
    assert (message["content"], message["reasoning_content"]) == ("Sure.", "Hm.")
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < 10
    if run == 1:
        assert len(deltas) > 10, "arguments come while they are written"


async def test_a_call_alone_has_no_content(tokenizer):
    async with served(engine_saying(tokenizer, f"<tool_call>{CALL}</tool_call>"), tokenizer) as client:
        _, body = await ask(client, tools=[TOOL])
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message
    assert "completion_tokens_details" not in body["usage"]


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}])
async def test_without_tools_there_are_no_calls(tokenizer, fields):
    engine = engine_saying(tokenizer, TWO)
    async with served(engine, tokenizer) as client:
        _, body = await ask(client, **fields)
    assert body["choices"][0]["message"]["content"] == TWO
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "get_weather" not in prompt_of(engine, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_only_where_parallel_calls_are_not_wanted(tokenizer, stream):
    async with served(engine_saying(tokenizer, TWO, run=5), tokenizer) as client:
        fields = {"tools": [TOOL], "parallel_tool_calls": False}
        if stream:
            chunks = [chunk["choices"][0] for chunk in await chunks_of(client, **fields)]
            indexes = {call["index"] for choice in chunks for call in choice["delta"].get("tool_calls", [])}
            assert (indexes, chunks[-1]["finish_reason"]) == ({0}, "tool_calls")
        else:
            _, body = await ask(client, **fields)
            choice = body["choices"][0]
            assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize("family", ["qwen3"])
async def test_reasoning_can_be_left_out(tokenizer):
    async with served(engine_saying(tokenizer, "<think>Hm.</think>Yes."), tokenizer) as client:
        _, body = await ask(client, include_reasoning=False)
        chunks = await chunks_of(client, include_reasoning=False)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)


@pytest.mark.parametrize("family", ["deepseek"])
async def test_reasoning_that_the_prompt_has_opened(tokenizer):
    async with served(engine_saying(tokenizer, "Hm.</think>Yes."), tokenizer) as client:
        _, body = await ask(client)
        _, closed = await ask(client, add_generation_prompt=False)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert "reasoning_content" not in closed["choices"][0]["message"]


# -- the official client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "text"), [
    ("qwen3", THOUGHT),
    ("llama3", f"<|python_tag|>{CALL}; {CALL}".replace("arguments", "parameters")),
    ("mistral", f"Sure.[TOOL_CALLS][{CALL}, {CALL}]"),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}" * 2),
])  # fmt: skip
@pytest.mark.parametrize("run", [1, 4, 1000])
async def test_the_clients_own_accumulating_stream(tokenizer, text, run):
    ask_for: dict[str, Any] = {"model": "toy", "messages": [USER], "tools": [TOOL]}
    async with served(engine_saying(tokenizer, text, run), tokenizer) as http, official(http) as client:
        deltas, done = {0: "", 1: ""}, []
        async with client.chat.completions.stream(**ask_for) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    deltas[event.index] += event.arguments_delta
                if event.type == "tool_calls.function.arguments.done":
                    done.append((event.index, event.name, event.arguments))
            final = await stream.get_final_completion()
        whole = await client.chat.completions.create(**ask_for)
    assert deltas == {0: ARGUMENTS, 1: ARGUMENTS}
    assert done == [(0, "get_weather", ARGUMENTS), (1, "get_weather", ARGUMENTS)]
    message: Any = final.choices[0].message
    plain: Any = whole.choices[0].message
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert (message.content or None) == plain.content
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS] * 2
    assert [call.function.arguments for call in plain.tool_calls] == [ARGUMENTS] * 2
    assert getattr(message, "reasoning_content", None) == getattr(plain, "reasoning_content", None)
    assert len({call.id for call in message.tool_calls}) == 2


async def test_the_clients_parser_reads_strict_arguments(tokenizer):
    strict: Any = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": SCHEMA}}
    async with served(engine_saying(tokenizer, TWO), tokenizer) as http, official(http) as client:
        parsed = await client.chat.completions.parse(model="toy", messages=[USER], tools=[strict])
    assert [call.function.parsed_arguments for call in parsed.choices[0].message.tool_calls or []] == [
        {"city": "Paris", "days": 3}
    ] * 2


@pytest.mark.parametrize("family", ["qwen3"])
async def test_langchain_binds_tools_and_adds_up_chunks(tokenizer):
    async with served(engine_saying(tokenizer, THOUGHT, 3), tokenizer) as http:
        chat = ChatOpenAI(model="toy", base_url=str(http.make_url("/v1")), api_key=SecretStr("none")).bind_tools([TOOL])
        whole = await chat.ainvoke("Weather?")
        chunks = [chunk async for chunk in chat.astream("Weather?")]
    added = functools.reduce(operator.add, chunks)
    for message in (whole, added):
        assert message.content == "Sure."
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [
            ("get_weather", {"city": "Paris", "days": 3})
        ] * 2
        assert message.response_metadata["finish_reason"] == "tool_calls"


# -- what the model is shown ---------------------------------------------------------------------------------------


async def test_the_template_gets_tools_and_calls(tokenizer):
    engine = engine_saying(tokenizer, "ok")
    async with served(engine, tokenizer) as client:
        status, _ = await ask(client, [USER, CALLED, RESULT], tools=[TOOL, OTHER])
    assert status == 200
    listed = json.dumps(TOOL), json.dumps({"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {}}}})  # fmt: skip
    assert prompt_of(engine, tokenizer) == (
        f"<|system|>{''.join(listed)}<|end|><|user|>Weather?<|end|>"
        '<|assistant|><tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call><|end|>'
        "<|tool|>sunny<|end|><|assistant|>"
    )


@pytest.mark.parametrize(("arguments", "shown"), [("", "{}"), ('{"a": cut', '"{\\"a\\": cut"'), ("5", '"5"')])
async def test_arguments_that_are_no_object_are_shown_as_they_are(tokenizer, arguments, shown):
    engine = engine_saying(tokenizer, "ok")
    called = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": {
        "name": "f", "arguments": arguments}}]}  # fmt: skip
    async with served(engine, tokenizer) as client:
        status, _ = await ask(client, [USER, called, RESULT])
    assert status == 200
    assert f'"arguments": {shown}' in prompt_of(engine, tokenizer)


async def test_an_answer_that_was_cut_off_in_its_reasoning_can_be_sent_back(tokenizer):
    async with served(engine_saying(tokenizer, "ok"), tokenizer) as client:
        cut = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
        status, _ = await ask(client, [USER, cut, USER])
    assert status == 200


@pytest.mark.parametrize("family", ["qwen3"])
async def test_thinking_can_be_switched_off(tokenizer):
    engine = engine_saying(tokenizer, "Yes.")
    async with served(engine, tokenizer) as client:
        _, body = await ask(client, chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(engine, tokenizer).endswith("<think>\n\n</think>\n\n")
    assert body["choices"][0]["message"]["content"] == "Yes."


@pytest.mark.parametrize("family", ["effort", "hermes"])
async def test_the_effort_is_for_templates_that_know_it(tokenizer, family):
    engine = engine_saying(tokenizer, "Yes.")
    async with served(engine, tokenizer) as client:
        status, body = await ask(client, reasoning_effort="high")
    if family == "effort":
        assert prompt_of(engine, tokenizer).startswith("<|system|>effort high<|end|>")
    else:
        assert (status, body["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize("family", ["plain"])
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
async def test_a_template_without_tools_gets_them_in_a_general_format(tokenizer, choice):
    engine = engine_saying(tokenizer, TWO)
    sent = {"messages": [USER, CALLED, RESULT, RESULT], "tools": [TOOL], "tool_choice": choice}
    async with served(engine, tokenizer) as client:
        _, body = await ask(client, **sent)
    message, prompt = body["choices"][0]["message"], prompt_of(engine, tokenizer)
    assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] == (
        [] if choice == "none" else [ARGUMENTS, ARGUMENTS]
    )
    assert (message["content"].strip() == "Sure.") == (choice != "none")
    assert (engine.requests[-1].grammar is not None) == (choice == "required")
    assert ('"get_weather", "description"' in prompt or '{"name": "get_weather", "para' in prompt) == (choice != "none")
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert prompt.count("<tool_response>\nsunny\n</tool_response>") == 2
    assert [one["code"] for one in body.get("warnings", ())] == ([] if choice == "none" else ["generic_tools"])


async def test_only_some_of_the_tools_may_be_allowed(tokenizer):
    engine = engine_saying(tokenizer, "ok")
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    async with served(engine, tokenizer) as client:
        status, _ = await ask(client, tools=[TOOL, OTHER], tool_choice=choice)
    assert status == 200
    assert "get_weather" in prompt_of(engine, tokenizer), "the prompt, and so the cached prefix, stays the same"


# -- what the engine gets -----------------------------------------------------------------------------------------


async def grammar_for(tokenizer, **fields):
    engine = engine_saying(tokenizer, "ok")
    async with served(engine, tokenizer) as client:
        status, body = await ask(client, **fields)
        assert status == 200, body
    return engine.requests[-1].grammar


STRICT: dict[str, Any] = {"type": "function", "function": TOOL["function"] | {"strict": True}}


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "llama3", "mistral"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, None),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
        ({"tools": [STRICT, OTHER]}, "tools"),
    ],
)
async def test_forced_and_strict_calls_have_a_grammar(tokenizer, fields, param):
    grammar = await grammar_for(tokenizer, **fields)
    assert getattr(grammar, "param", None) == param
    if param is not None:
        assert "get_weather" in grammar.text


async def test_parameters_that_are_no_schema_are_named(tokenizer):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    async with served(engine_saying(tokenizer, "ok"), tokenizer) as client:
        status, body = await ask(client, tools=[TOOL, bad], tool_choice="required")
        free, _ = await ask(client, tools=[TOOL, bad])
    assert status == 400
    assert body["error"]["param"].startswith("tools[1].function.parameters")
    assert free == 200, "under auto nothing is made of it"
