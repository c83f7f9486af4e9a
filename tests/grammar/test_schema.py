"""JSON schemas: their layout, and those that take long."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import openai
import pytest

from foresay.server.schemas.shared import StructuredOutputs
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.server.text.grammars.constraint import BURST_SECONDS, GrammarFailed
from foresay.server.text.grammars.fields import (
    ANY_OBJECT,
    BOUNDED,
    COMPACT,
    FLEXIBLE,
    MOST_PROPERTIES,
    bounded,
    json_grammar,
    lark_grammar,
    of_outputs,
    schema_grammar,
)
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar
from tests.grammar.oracle import TARGET, accepts, compiler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("layout", "good", "bad"),
    [
        ({}, '{"name": "A", "ages": [1, 2]}', '{"name":"A","ages":[1,2]}'),
        (COMPACT, '{"name":"A","ages":[1,2]}', '{"name": "A", "ages": [1, 2]}'),
        (FLEXIBLE, '{\n  "name": "A",\n  "ages": [\n1 ,2]\n}', '{"name": "A"}'),
        ({"whitespace_pattern": " {1,2}"}, '{"name":  "A", "ages": [1, 2]}', '{"name":   "A", "ages": []}'),
    ],
)
def test_layouts(layout: dict[str, Any], good: str, bad: str):
    text = schema_grammar(PERSON, "s", layout) if layout else schema_grammar(PERSON, "s")
    assert accepts(text, good)
    assert not accepts(text, bad)


def test_any_object_may_be_laid_out_but_not_over_pages():
    text = schema_grammar(ANY_OBJECT, "s", BOUNDED)
    assert accepts(text, '{\n    "a": [1, {"b": null}],\n\t"c\\u0001": 1e9 }')
    assert not accepts(text, "[1]")
    assert not accepts(text, "{" + " " * 60 + "}")


def test_a_property_has_one_name_only():
    """llguidance alone would take ``"\\u0061"`` for another name than ``"a"``, and its value for anything."""
    text = schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}}, "s")
    assert accepts(text, '{"a": 1, "b": "x\\n"}')
    assert not accepts(text, '{"\\u0061": "x"}')
    assert not accepts(text, '{"a": 1, "a": 2}')


def test_other_names_can_be_ruled_out_for_all_objects_that_list_theirs():
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}, "b": {"type": "object"}}}
    text = schema_grammar(schema, "s", closed=True)
    assert accepts(text, '{"a": {}, "b": {"x": 1}}')
    assert not accepts(text, '{"a": {"x": 1}}')
    assert not accepts(text, '{"x": 1}')


@pytest.mark.parametrize("harmless", [{"uniqueItems": False}, {"nullable": False}, {"title": "T", "examples": [1]}])
def test_keywords_that_ask_for_nothing_are_taken(harmless: dict[str, Any]):
    assert accepts(schema_grammar({"type": "array", "items": {"type": "integer"}} | harmless, "s"), "[1, 1]")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (True, "must be a JSON schema that is an object"),
        ([], "must be a JSON schema that is an object"),
        ({"disallow": "string"}, "the keyword disallow"),
        ({"anyOf": [{"items": {"nullable": True}}]}, "the keyword nullable"),
        ({"$defs": {"a": {"extends": {}}}}, "the keyword extends"),
        ({"properties": {"a": {"divisibleBy": 2}}}, "the keyword divisibleBy"),
        ({"x-guidance": {"lenient": True}}, "the keyword x-guidance"),
        ({"type": "object", "minProperties": 2, "required": ["a"]}, "minProperties"),
        ({"properties": {f"p{n}": {} for n in range(MOST_PROPERTIES + 1)}}, "at most 500"),
        ({"properties": {"a": {"const": "\x01"}}}, "control characters"),
        ({"type": "string", "pattern": "a?" * 1001}, "more than 2000"),
        ({"type": "object", "patternProperties": {"a?" * 1001: {}}}, "more than 2000"),
    ],
)
def test_what_would_be_ignored_is_refused(schema: object, reason: str):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        schema_grammar(schema, "the.field")
    assert caught.value.param == "the.field"


def test_names_of_properties_are_no_keywords():
    schema = {
        "type": "object",
        "properties": {"nullable": {"type": "boolean"}, "extends": {"enum": [{"nullable": True}]}},
        "additionalProperties": False,
    }
    assert accepts(schema_grammar(schema, "s"), '{"nullable": true, "extends": {"nullable": true}}')


def test_deep_schemas_are_refused():
    schema: dict[str, Any] = {}
    for _ in range(150):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        schema_grammar(schema, "s")


def test_as_many_properties_as_are_allowed_can_be_held_to():
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(MOST_PROPERTIES)}}
    assert accepts(
        schema_grammar(schema, "s", closed=True), json.dumps({"p3": 1, "p77": 2, f"p{MOST_PROPERTIES - 1}": 3})
    )


def test_a_long_chain_of_references_does_not_run_out_of_stack():
    chain: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(800)
    }
    schema = {"$defs": chain | {"d800": {"type": "string"}}, "$ref": "#/$defs/d0"}
    constraint = compiler().compile(Grammar(text=schema_grammar(schema, "s", closed=True)))
    assert constraint.masks([9], [-1]) is not None


# -- slow ones ---------------------------------------------------------------------------------------------------------


#: Of some 40 bytes: every text has as many readings as it has bracketings.
AMBIGUOUS = ("start: x\nx: /[a-z ]/ | x x | x x x", "start: x\nx: /./ | x x", 'start: x\nx: "" | /./ | x x x')
TEXT = "once upon a time there was a small fox who said so to the bear of the wood and the bear said no " * 4


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("text", AMBIGUOUS)
def test_an_ambiguous_grammar_fails_before_it_holds_anybody_up(text):
    compiler = GrammarCompiler.load(TARGET, 4096, [0])
    assert compiler is not None
    constraint = compiler.compile(Grammar(text=lark_grammar(text, "g"), param="g"))
    worst = 0.0
    with pytest.raises(GrammarFailed, match="takes too long"):  # noqa: PT012
        for token in compiler._tokenizer.tokenize_str(TEXT):
            for work in (partial(constraint.masks, [5], [-1]), partial(constraint.advance, [token])):
                began = time.thread_time()
                try:
                    work()
                finally:
                    worst = max(worst, time.thread_time() - began)
    assert worst < 2 * BURST_SECONDS


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]},
        {"properties": {f"p{number}": {"type": "integer", "multipleOf": 5003} for number in range(9)}},
    ],
    ids=["one", "together", "many"],
)
def test_numbers_that_take_minutes_to_compile_are_refused(schema):
    with pytest.raises(InvalidRequest, match="multipleOf") as caught:
        json_grammar(schema, "format")
    assert caught.value.param == "format"


def test_the_same_hidden_in_a_grammar_is_refused():
    hidden = 'start: j\nj: %json {"type": "integer", "multiple\\u004ff": 999983}'
    with pytest.raises(InvalidRequest, match="multipleOf"):
        of_outputs(StructuredOutputs(grammar=hidden))


@pytest.mark.parametrize("number", ["1e99999999999999999999", "1e999999999999999999", "9" * 60_000, "0.0001234567"])
def test_numbers_that_no_decimal_holds_are_refused_or_served(number):
    grammar = f'start: %json {{"multipleOf": {number}}}'
    if number.startswith("1e"):
        of_outputs(StructuredOutputs(grammar=grammar))  # one step: what llguidance makes of it is for it to say
    else:
        with pytest.raises(InvalidRequest):
            of_outputs(StructuredOutputs(grammar=grammar))


def test_many_numbers_are_refused_before_they_are_multiplied():
    numbers = ", ".join(f'{{"multipleOf": {10**18 + 2 * index + 1}}}' for index in range(20_000))
    began = time.thread_time()
    with pytest.raises(InvalidRequest):
        bounded(Grammar(text=numbers, param="tools"), 1 << 21)
    assert time.thread_time() - began < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("grammar", AMBIGUOUS)
async def test_a_stream_goes_on_next_to_an_ambiguous_grammar(client: openai.AsyncOpenAI, grammar: str):
    """The grammar's request ends with an error that names the field; the other stream is whole."""
    ask: dict[str, Any] = {"model": "bundled", "prompt": "Once upon a time", "seed": 1}
    stream = await client.completions.create(**ask, max_tokens=240, stream=True, extra_body={"ignore_eos": True})
    chunks = [await anext(stream)]
    with pytest.raises(openai.APIStatusError, match=r"structured_outputs\.grammar"):
        await client.with_options(max_retries=0).completions.create(
            **ask, max_tokens=200, extra_body={"structured_outputs": {"grammar": grammar}}
        )
    chunks += [chunk async for chunk in stream]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
