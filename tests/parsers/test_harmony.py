"""gpt-oss's answers: messages on channels, separated by tokens; in every API, and at every cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from foresay.server.catalog.formats import FORMATS
from foresay.server.text.parsers.chat_format import begun, messages
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, joined
from tests.parsers.asking import CALLED, RESULT, SCHEMA, TOOL, USER, ask, engine_saying, prompt_of
from tests.parsers.reading import CHANNELS, marked, pieces
from tests.server.scripted import served


def read(text: str, cuts: Sequence[int] = (), offered: bool = True, **more: Any) -> list[Part]:
    """text: marked where its tags are tokens."""
    script = partial(messages, begun(more.get("prompt", "<|start|>assistant")), more.get("thinks", True))
    functions = {"get_weather": SCHEMA} if offered else {}
    found = pieces(script, text, cuts, CHANNELS, functions, more.get("parallel", True))
    return joined([part for piece in found for part in piece])


ANALYSIS = "<|channel|>analysis<|message|>"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
MADE = ToolCallPart(index=0, id="id0", name="get_weather", arguments='{"city": "Paris"}')
CASES: dict[str, tuple[str, list[Part]]] = {
    "thought and answer": (
        f"{ANALYSIS}Hm.{NEXT}<|channel|>final<|message|> Hello <|return|>", [ReasoningPart("Hm."), TextPart(" Hello ")],
    ),
    "a call": (f'{ANALYSIS}Hm.{NEXT}{CALL}{{"city": "Paris"}}<|call|>', [ReasoningPart("Hm."), MADE]),
    "a call of the role": (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>', [MADE],
    ),
    "between messages": (
        f"{ANALYSIS}One.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{ANALYSIS}Two.{NEXT}"
        f'{CALL}{{"city": "Paris"}}{NEXT}<|channel|>final<|message|>Done.',
        [ReasoningPart("One."), TextPart("I look."), ReasoningPart("\n\nTwo."), MADE, TextPart("\n\nDone.")],
    ),
    "no arguments": (f"{CALL}<|call|>", [ToolCallPart(index=0, id="id0", name="get_weather", arguments="{}")]),
    "arguments that break off": (
        f'{CALL}{{"city": "Pa', [ToolCallPart(index=0, id="id0", name="get_weather", arguments='{"city": "Pa"}')],
    ),
    "no arguments, and the tag ends the answer": (
        CALL, [ToolCallPart(index=0, id="id0", name="get_weather", arguments="{}")],
    ),
    "more than arguments": (f'{CALL}{{"city": "Paris"}} so<|call|>', [MADE, TextPart("so")]),
    "no object": (f"{CALL}Paris<|call|>", [TextPart("Paris")]),
    "behind a call nothing is read": (f'{CALL}{{"city": "Paris"}}<|call|><|start|>assistant{ANALYSIS}More', [MADE]),
    "no channel": ("<|message|>Hello<|return|>", [TextPart("Hello")]),
    "no tag at all": ("Hello", [TextPart("Hello")]),
    "a tool of its own": ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [ReasoningPart("1 + 1")]),
    "cut in a header": (f"{ANALYSIS}Hm.{NEXT}<|channel|>fin", [ReasoningPart("Hm.")]),
    "cut in a recipient": (" to=functions.get", []),
    "a tag where none belongs": ("<|channel|>final<|message|>A<|message|>B<|end|>", [TextPart("A<|message|>B")]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_messages_become_parts(case) -> None:
    output, parts = CASES[case]
    assert read(marked(output)) == parts


def test_what_spells_a_tag_is_text() -> None:
    spelled = "a <|end|><|start|>assistant<|channel|>final<|message|> b"
    assert read(marked("<|channel|>final<|message|>") + spelled) == [TextPart(spelled)]


def test_without_functions_a_call_is_text_and_without_reasoning_thoughts_are() -> None:
    assert read(marked(f"{CALL}{{}}<|call|>"), offered=False) == [TextPart("{}")]
    assert read(marked(f"{ANALYSIS}Hm.<|end|>"), thinks=False) == [TextPart("Hm.")]


def test_a_message_that_the_prompt_began_goes_on() -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hel"
    assert read("lo", prompt=prompt) == [TextPart("lo")]
    more = marked("<|start|>assistant<|channel|>final<|message|>Hello")
    assert read(more, prompt=f"{prompt}lo<|end|>") == [TextPart("Hello")]


WORDS = ("final", " to=", "get_weather", "{}", "é🦊", "<|end")


@settings(max_examples=200)
@given(
    output=st.lists(st.sampled_from([*FORMATS["harmony"].control, ANALYSIS, CALL, NEXT, *WORDS]), max_size=16),
    cuts=st.lists(st.integers(0, 400), max_size=30),
    offered=st.booleans(),
    parallel=st.booleans(),
)
def test_any_split_gives_the_same_parts(output, cuts, offered, parallel) -> None:
    found = marked("".join(output))
    how = {"offered": offered, "parallel": parallel}
    assert read(found, cuts, **how) == read(found, **how)


# -- a server -----------------------------------------------------------------------------------------------------

ARGUMENTS = '{"city": "Paris"}'
ASKED = f"{ANALYSIS}We look.{NEXT}<|channel|>commentary<|message|>Wait.{NEXT}{CALL}{ARGUMENTS}<|call|>"
ANSWERED = f"{ANALYSIS}Sunny.{NEXT}<|channel|>final<|message|>It is sunny.<|return|>"


@pytest.fixture
def family() -> str:
    return "harmony"


#: Of each API, with an effort.
EFFORTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [TOOL], "reasoning_effort": "high"},
    "/v1/messages": {"model": "toy", "max_tokens": 99, "messages": [USER], "output_config": {"effort": "high"}},
    "/v1/responses": {"input": "Weather?", "instructions": "You code.", "reasoning": {"effort": "high"}},
    "/api/chat": {"model": "toy", "messages": [USER], "think": "high", "stream": False},
}


async def test_the_prompt_has_tools_and_effort_and_no_thought_behind_an_answer(tokenizer) -> None:
    engine, prompts = engine_saying(tokenizer, ANSWERED), []
    async with served(engine, tokenizer) as client:
        for path, sent in EFFORTS.items():
            assert (await client.post(path, json=sent)).status == 200
            prompts.append(prompt_of(engine, tokenizer))
        off = await (await client.post("/api/chat", json=EFFORTS["/api/chat"] | {"think": False})).json()
        answer = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "Sunny."}
        await ask(client, [USER, CALLED | {"reasoning_content": "We look."}, RESULT, answer, USER], tools=[TOOL])
    assert all("Reasoning: high<|end|>" in prompt for prompt in prompts)
    assert "<|message|>// Weather\ntype get_weather = (_: {city: string,}) => any;<|end|>" in prompts[0]
    assert all(prompt.endswith("<|start|>user<|message|>Weather?<|end|><|start|>assistant") for prompt in prompts)
    assert [(one["code"], one["param"]) for one in off["warnings"]] == [("hint_left_out", "think")]
    assert ANALYSIS not in prompt_of(engine, tokenizer)


async def test_several_calls_stand_before_their_results(tokenizer) -> None:
    engine = engine_saying(tokenizer, ANSWERED)
    calls = [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": name})}}
        for name in ("Paris", "Rome")
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("Rome", "Paris")]
    late = {"role": "system", "content": "Be brief."}
    async with served(engine, tokenizer) as client:
        status, body = await ask(
            client, [USER, {"role": "assistant", "tool_calls": calls}, *results, late], tools=[TOOL]
        )
    assert status == 200 and [one["code"] for one in body["warnings"]] == ["system_moved"]
    prompt = prompt_of(engine, tokenizer)
    assert re.findall(r'"city": "(\w+)"|"of (\w+)"', prompt) == [
        ("Paris", ""),
        ("", "Paris"),
        ("Rome", ""),
        ("", "Rome"),
    ]
    assert "<|start|>user<|message|>Be brief.<|end|><|start|>assistant" in prompt


async def test_an_effort_that_the_template_does_not_know_is_left_out(tokenizer) -> None:
    engine = engine_saying(tokenizer, ANSWERED)
    async with served(engine, tokenizer) as client:
        _, body = await ask(client, reasoning_effort="xhigh")
        assert [(one["code"], one["param"]) for one in body["warnings"]] == [("hint_left_out", "reasoning_effort")]
        sent = {"input": "Hi", "reasoning": {"effort": "xhigh"}}
        body = await (await client.post("/v1/responses", json=sent)).json()
        assert [(one["code"], one["param"]) for one in body["warnings"]] == [("hint_left_out", "reasoning.effort")]
        assert "Reasoning: medium" in prompt_of(engine, tokenizer)
        off = {"type": "disabled"}
        switched: dict[str, Any] = {"model": "toy", "max_tokens": 99, "messages": [USER], "thinking": off}
        body = await (await client.post("/v1/messages", json=switched)).json()
        assert [(one["code"], one["param"]) for one in body["warnings"]] == [("hint_left_out", "thinking")]


async def test_headers_hold_no_stop_string(tokenizer) -> None:
    engine = engine_saying(tokenizer, ANSWERED)
    async with served(engine, tokenizer) as client:
        for stop, content in ("l", "It is sunny."), ("su", "It is "):
            _, body = await ask(client, stop=stop)
            assert body["choices"][0]["message"]["content"] == content


async def test_a_call_may_follow_text_that_is_continued(tokenizer) -> None:
    engine, begun = engine_saying(tokenizer, "lo"), {"role": "assistant", "content": "Hel"}
    async with served(engine, tokenizer) as client:
        more = {"continue_final_message": True, "add_generation_prompt": False}
        status, _ = await ask(client, [USER, begun], **STRICT, **more)
    (request,) = engine.requests
    assert status == 200 and request.grammar is not None
    matcher = LLMatcher(from_tokenizer(tokenizer._templates), request.grammar.text)
    tokens = tokenizer.encode(f"lo{CALL}{ARGUMENTS}", add_special_tokens=False)
    assert matcher.try_consume_tokens(tokens) == len(tokens)


FINAL = "<|channel|>final<|message|>"
ANSWER: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
STRICT = {"tools": [TOOL | {"function": TOOL["function"] | {"strict": True}}]}
#: The request, what fits, and what does not.
HELD: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a call": (
        {"tools": [TOOL], "tool_choice": "required"},
        [f"{CALL}{ARGUMENTS}", f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>So.{NEXT}{CALL}{ARGUMENTS}"],
        [f"{FINAL}Hello", f'{CALL}{{"city": 1}}', f"{CALL.replace('weather', 'rain')}{ARGUMENTS}"],
    ),
    "a schema": (ANSWER, [f"{ANALYSIS}Hm.{NEXT}{FINAL}{ARGUMENTS}", FINAL + ARGUMENTS], [FINAL + "Hello", ARGUMENTS]),
    "either": (ANSWER | {"tools": [TOOL]}, [CALL + ARGUMENTS, FINAL + ARGUMENTS], [FINAL + "Hello", CALL + "{}"]),
    "strict": (STRICT, [CALL + ARGUMENTS, FINAL + "Hello", f"{ANALYSIS}{NEXT}{FINAL}"], [CALL + "{}"]),
}


@pytest.mark.parametrize("case", HELD)
async def test_grammars_hold_behind_the_channel(tokenizer, case) -> None:
    fields, fitting, others = HELD[case]
    engine = engine_saying(tokenizer, ANSWERED)
    async with served(engine, tokenizer) as client:
        status, body = await ask(client, **fields)
    assert status == 200, body
    grammar, vocabulary = engine.requests[-1].grammar, from_tokenizer(tokenizer._templates)
    assert grammar is not None and grammar.after is None
    for text in (*fitting, *others):
        matcher = LLMatcher(vocabulary, grammar.text)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert taken is (text in fitting), (text, matcher.get_error())


async def test_without_anything_to_hold_to_there_is_no_grammar(tokenizer) -> None:
    engine = engine_saying(tokenizer, ANSWERED)
    async with served(engine, tokenizer) as client:
        await ask(client, tools=[TOOL])
    assert engine.requests[-1].grammar is None
