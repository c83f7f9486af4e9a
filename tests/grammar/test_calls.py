"""Grammars of forced tool calls: what they allow is what the parsers of the same formats read as calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from foresay.server.schemas.chat import Function
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.answers import tool_call_grammar
from foresay.spec.errors import InvalidRequest
from tests.grammar.oracle import accepts, compiler

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
