"""From the fields of a request to a grammar, or to an error that names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foresay.server.schemas.chat import CompletionRequest
from foresay.server.text.grammars.answers import wanted
from foresay.server.text.grammars.fields import MOST_REGEX_BYTES
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar
from tests.grammar.oracle import accepts

INTEGER = {"type": "integer"}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


async def grammar(**fields: Any) -> Grammar | None:
    return await wanted(msgspec.convert({"prompt": "x", **fields}, CompletionRequest))


@pytest.mark.parametrize(
    ("fields", "param", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", '{"a": 1}', "3"),
        (schema(name="n", schema=INTEGER), "response_format.json_schema.schema", "3", '"3"'),
        (schema(schema=INTEGER, strict=False), "response_format.json_schema.schema", "3", '"3"'),
        (structured(json=INTEGER), "structured_outputs.json", "3", '"3"'),
        (structured(json='{"type": "integer"}'), "structured_outputs.json", "3", '"3"'),
        (structured(json_object=True), "structured_outputs.json_object", '{\n"a": 1}', "3"),
        (
            structured(json_object=True, disable_any_whitespace=True),
            "structured_outputs.json_object",
            '{"a":1}',
            '{"a": 1}',
        ),
        (
            structured(json={"properties": {"a": {}}}, disable_additional_properties=True),
            "structured_outputs.json",
            '{"a": 1}',
            '{"b": 1}',
        ),
        (structured(regex="a|b+"), "structured_outputs.regex", "bb", "ab"),
        (structured(choice=["a.b", "c|d", "é\n"]), "structured_outputs.choice", "c|d", "axb"),
        (structured(choice=["a.b", "<|end|>"]), "structured_outputs.choice", "a.b", "c"),
        (structured(grammar='start: "x" NUMBER\nNUMBER: /[0-9]+/'), "structured_outputs.grammar", "x12", "x"),
        (structured(grammar='root ::= "x" num\nnum ::= [0-9]+'), "structured_outputs.grammar", "x12", "x"),
    ],
)
async def test_what_can_be_requested(fields: dict[str, Any], param: str, good: str, bad: str):
    made = await grammar(**fields)
    assert made is not None and made.param == param
    assert accepts(made.text, good)
    assert not accepts(made.text, bad)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "structured_outputs": None},
        {"response_format": {"type": "text"}},
        structured(json_object=False),
    ],
)
async def test_any_text(fields: dict[str, Any]):
    assert await grammar(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "must be text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        (schema(name="n"), "response_format.json_schema.schema", "is required"),
        (structured(), "structured_outputs", "must hold one of"),
        (structured(regex="a", choice=["b"]), "structured_outputs", "one of regex, choice"),
        (structured(structural_tag={}), "structured_outputs.structural_tag", "not supported"),
        (structured(json="{"), "structured_outputs.json", "not valid JSON"),
        (structured(json="3"), "structured_outputs.json", "must be a JSON schema"),
        (structured(regex=""), "structured_outputs.regex", "must not be empty"),
        (structured(choice=[]), "structured_outputs.choice", "at least one text"),
        (structured(choice=["a", ""]), "structured_outputs.choice", "none that is empty"),
        (structured(choice=["a"] * 2001), "structured_outputs.choice", "at most 2000"),
        (structured(grammar="what?"), "structured_outputs.grammar", "neither Lark"),
        (structured(grammar="("), "structured_outputs.grammar", "neither Lark"),
        (structured(grammar="root ::= " + "(" * 5000), "structured_outputs.grammar", "too deeply|neither"),
        (
            structured(grammar='start: t\nt[max_tokens=3, capture="x"]: /.*/'),
            "structured_outputs.grammar",
            "option max_tokens",
        ),
        (structured(grammar='start: t "b"\nt[stop="x"]: /.*/'), "structured_outputs.grammar", "option stop"),
        (structured(regex="a" * (MOST_REGEX_BYTES + 1)), "structured_outputs.regex", "at most 4096"),
        (structured(grammar="a" * 16385), "structured_outputs.grammar", "at most 16384"),
        (structured(choice=["a" * 300] * 300), "structured_outputs.choice", "at most 65,536"),
        (
            structured(regex="a", whitespace_pattern=" "),
            "structured_outputs.whitespace_pattern",
            "goes with structured_outputs.json",
        ),
        (
            structured(json={}, whitespace_pattern=" ", disable_any_whitespace=True),
            "structured_outputs.whitespace_pattern",
            "cannot be combined",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "cannot be combined",
        ),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "says where the text ends"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "says where the text ends"),
    ],
)
async def test_what_is_refused(fields: dict[str, Any], param: str, reason: str):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await grammar(**fields)
    assert caught.value.param == param
