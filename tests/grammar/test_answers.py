"""The grammar of a chat answer: forced calls, calls or the requested format, and the thinking before them.

Special tokens of the bundled pair stand in for the tags of reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import pytest

from foresay.server.schemas.chat import ChatRequest, Function
from foresay.server.text.conversation import Offer, offered
from foresay.server.text.grammars.answers import chat_grammar, tool_call_grammar
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar
from tests.grammar.oracle import DONE, TARGET, THINK, accepts, compiler

TOOLS = [{"type": "function", "function": {"name": "time"}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
TAGS = ("<|system|>", "<|user|>")
CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TARGET)


async def grammar(
    chat_format: ChatFormat, prompt: str = "Hi", opened: bool = False, continues: bool = False, **fields: Any
) -> Grammar | None:
    given = {"messages": [{"role": "user", "content": "x"}], "continue_final_message": continues, **fields}
    request = msgspec.convert(given, ChatRequest)
    return await chat_grammar(request, offered(request), chat_format, tokenizer(), prompt, opened)


async def test_any_answer_without_a_format():
    assert await grammar(ChatFormat(calls="hermes", thinks=TAGS), tools=TOOLS) is None


async def test_required_calls():
    forced = await grammar(ChatFormat(calls="hermes"), tools=TOOLS, tool_choice="required", response_format=FORMAT)
    assert forced is not None and forced.param == "tool_choice"
    assert accepts(forced.text, CALL)
    assert not accepts(forced.text, "3")


async def test_calls_or_an_answer_in_the_format():
    either = await grammar(ChatFormat(calls="hermes"), tools=TOOLS, response_format=FORMAT)
    assert either is not None
    assert accepts(either.text, CALL)
    assert accepts(either.text, "3")
    assert not accepts(either.text, "three")
    answer = await grammar(ChatFormat(calls="hermes"), tools=TOOLS, tool_choice="none", response_format=FORMAT)
    assert answer is not None
    assert not accepts(answer.text, CALL)


async def test_calls_or_an_answer_by_a_lark_grammar():
    lark = {"grammar": 'start: "yes" | "no"'}
    either = await grammar(ChatFormat(calls="mistral"), tools=TOOLS, structured_outputs=lark)
    assert either is not None
    assert accepts(either.text, '[TOOL_CALLS][{"name": "time", "arguments": {}}]')
    assert accepts(either.text, "no")


async def test_calls_that_look_like_json_and_a_format_exclude_each_other():
    with pytest.raises(InvalidRequest, match="tool_choice none or required") as caught:
        await grammar(ChatFormat(calls="llama3"), tools=TOOLS, response_format=FORMAT)
    assert caught.value.param == "response_format"


async def test_forced_calls_and_a_least_length_exclude_each_other():
    with pytest.raises(InvalidRequest, match="says where the text ends") as caught:
        await grammar(ChatFormat(calls="hermes"), tools=TOOLS, tool_choice="required", min_tokens=3)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("prompt", "opened", "continues", "after", "opens"),
    [
        ("Hi<|system|>\n", True, False, DONE, None),
        ("Hi", False, False, DONE, THINK),
        ("Hi<|system|>\n\n<|user|>\n\n", False, False, None, None),
        ("Hi: so", False, True, None, None),
    ],
)
async def test_where_the_grammar_begins(
    prompt: str, opened: bool, continues: bool, after: int | None, opens: int | None
):
    made = await grammar(ChatFormat(thinks=TAGS), prompt, opened, continues, response_format=FORMAT)
    assert made is not None
    assert (made.after, made.opens) == (after, opens)


async def test_reasoning_whose_end_is_no_token():
    spelled = ChatFormat(thinks=("<think>", "</think>"))
    with pytest.raises(InvalidRequest, match="are no tokens"):
        await grammar(spelled, "Hi<think>", opened=True, response_format=FORMAT)
    made = await grammar(spelled, response_format=FORMAT)
    assert made is not None
    assert made.after is None


# -- calls -------------------------------------------------------------------------------------------------------------


WEATHER = Function(
    name="get_weather",
    parameters={
        "$defs": {"city": {"type": "string"}},
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
TIME = Function(name="time")
ARGUMENTS = {"city": "Überlingen", "days": 3}


def offer(*functions: Function, parallel: bool = True) -> Offer:
    return Offer(listed=functions, functions=functions, required=True, parallel=parallel)


def call(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


FORMS = {
    "hermes": ("<tool_call>\n{}\n</tool_call>", "\n", "arguments"),
    "llama3": ("{}", "; ", "parameters"),
    "mistral": ("{}", ", ", "arguments"),
}


def written(form: str, *calls: tuple[str, Mapping[str, Any]]) -> str:
    around, between, key = FORMS[form]
    text = between.join(around.format(call(*one, key)) for one in calls)
    return f"[TOOL_CALLS][{text}]" if form == "mistral" else text


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_offered_functions_with_arguments_that_match(form: str):
    both = tool_call_grammar(form, offer(WEATHER, TIME), {})
    assert both.param == "tool_choice"
    assert accepts(both.text, written(form, ("get_weather", ARGUMENTS)))
    assert accepts(both.text, written(form, ("time", {})))
    assert accepts(both.text, written(form, ("time", {}), ("get_weather", {"city": "X"})))
    for wrong in (("get_weather", {"days": 1}), ("get_weather", {"city": 1}), ("time", {"x": 1}), ("other", {})):
        assert not accepts(both.text, written(form, wrong))
    assert not accepts(both.text, "It is sunny.")


@pytest.mark.parametrize("form", FORMS)
def test_one_call_where_they_must_not_be_parallel(form: str):
    single = tool_call_grammar(form, offer(WEATHER, TIME, parallel=False), {})
    assert accepts(single.text, written(form, ("time", {})))
    assert not accepts(single.text, written(form, ("time", {}), ("time", {})))


def test_tags_that_are_tokens_are_written_as_tokens():
    """Tokens 2, 3 and 4 of the bundled pair stand in for the tags."""
    hermes = compiler().compile(tool_call_grammar("hermes", offer(TIME), {"<tool_call>": 2, "</tool_call>": 3}))
    forced = hermes.forced(60)
    assert forced[0] == 2 and 3 in forced
    hermes.advance(forced)
    named = tool_call_grammar("mistral", offer(TIME, WEATHER), {"[TOOL_CALLS]": 2, "[ARGS]": 4})
    mistral = compiler().compile(named)
    assert mistral.forced(1) == [2]
    mistral.advance([2])
    assert mistral.legal([2, 2, 4], [-1, 0, 0]) == [True, False, False]


def test_parameters_that_cannot_be_held_to_are_named():
    bad = Function(name="bad", parameters={"type": "object", "nullable": True})
    with pytest.raises(InvalidRequest, match="nullable") as caught:
        tool_call_grammar("hermes", offer(TIME, bad), {})
    assert caught.value.param == "tools[1].function.parameters"
    with pytest.raises(InvalidRequest, match="must be object"):
        tool_call_grammar("hermes", offer(Function(name="s", parameters={"type": "string"})), {})
