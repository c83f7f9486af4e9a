"""The grammar of tool calls, in any of the formats of :mod:`foresay.server.catalog.formats`.

If parameters are between tags, those of type string are bare text up to the end tag, others are JSON. So a schema's
constraints on the text itself cannot be enforced and are refused, except for a list of allowed values.

Arguments are written as ``json.dumps`` writes them, like the calls that chat templates show to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from foresay.server.catalog.formats import FORMATS, PLACEHOLDER, TAG, ToolFormat, Way
from foresay.server.schemas.chat import Function
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.schema import guided
from foresay.server.text.parsers.formats import is_text
from foresay.spec.errors import InvalidRequest, Path
from foresay.spec.request import Grammar

_OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXT = {"type", "enum", "const", "format"}
_REMARKS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
_ANYTHING = {"type": "object"}
#: The schema of a function declared without parameters.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}

#: The ids of tags that are single tokens.
Tokens = Mapping[str, int]


def tool_call_grammar(form: str, offer: Offer, tokens: Tokens) -> Grammar:
    """The grammar of calls of the offered functions: one, or any number if they may be parallel.

    form: a name in :data:`~foresay.server.catalog.formats.FORMATS`. tokens: ids of its tags that are single
    tokens. Raises :class:`InvalidRequest` naming the parameters that cannot be enforced.
    """
    ways = FORMATS[form].ways
    way = next((way for way in ways if all(tag in tokens for tag in TAG.findall(way.call))), ways[-1])
    opens, between, closes = (written(text, tokens) for text in (way.opens, way.between, way.closes))
    several = f"call ({between} call)*" if offer.parallel else "call"
    rules = [f"start: {opens} {several} {closes}"]
    rules.append("call: " + " | ".join(f"call{number}" for number in range(len(offer.functions))))
    for number, function in enumerate(offer.functions):
        rules += _call(way, number, function, (*offer.path_of(function), "parameters"), tokens)
    return Grammar(text="\n".join(dict.fromkeys(rules)), param="tool_choice")


def written(text: str, tokens: Tokens, **placeholders: str) -> str:
    """A sequence of literals, tokens, and rules for the placeholders in a format's text."""
    tags = "|".join(map(re.escape, tokens))
    literals, found = PLACEHOLDER.split(text)[::2], PLACEHOLDER.split(text)[1::2]
    parts = []
    for literal, placeholder in zip_longest(literals, found):
        pieces = re.split(f"({tags})", literal) if tags else [literal]
        parts += [f"<[{tokens[piece]}]>" if piece in tokens else _literal(piece) for piece in pieces if piece]
        parts += [placeholders[placeholder]] if placeholder else []
    return " ".join(parts)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _call(way: Way, number: int, function: Function, path: Path, tokens: Tokens) -> Iterator[str]:
    """A rule ``call<number>``, and the rules it needs. path: to the function's parameters."""
    inside = {"arguments": f"arguments{number}", "parameters": f"parameters{number}"}
    yield f"call{number}: {written(way.call, tokens, name=_literal(function.name), index='/[0-9]{1,4}/', **inside)}"
    if not way.parameter:
        schema = guided(function.parameters or _NOTHING, path, closed=True)
        if schema.get("type", "object") != "object":
            raise InvalidRequest(path, f".type must be object, got {schema['type']!r}")
        yield f"arguments{number}: %json {json.dumps(schema | {'type': 'object'})}"
        return
    parameters = _parameters(number, function, path)
    if TAG.search(way.parameter):
        yield from _tagged(way.parameter, number, parameters, tokens)
    else:
        yield from _python(way.parameter, number, parameters)


# -- parameters one by one ---------------------------------------------------------------------------------------------


class _Parameter(msgspec.Struct, frozen=True):
    """One parameter. rule: its name in the grammar; optional: the rule's suffix, ``?`` or ""; path: to its schema."""

    rule: str
    key: str
    optional: str
    schema: Any
    path: Path
    definitions: dict[str, Any]

    @property
    def json(self) -> str:
        """The rule of its value in JSON."""
        schema = guided(self.schema | self.definitions, self.path, closed=True)
        return f"value_{self.rule}: %json {json.dumps(schema)}"


def _parameters(number: int, function: Function, path: Path) -> list[_Parameter] | None:
    """A function's parameters in order; None if any are allowed."""
    schema = function.parameters or {}
    _refuse(schema, _OF_OBJECT, path)
    guided(schema, path)  # refuses what is not a schema
    if schema and "properties" not in schema and schema.get("additionalProperties") is not False:
        return None
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(needed, list):
        raise InvalidRequest(path, ": properties must be an object, and required a list")
    definitions: dict[str, Any] = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    return [
        _Parameter(
            f"parameter{number}_{index}",
            key,
            "" if key in needed else "?",
            one,
            (*path, "properties", key),
            definitions,
        )
        for index, (key, one) in enumerate(properties.items())
    ]


def _refuse(schema: Any, known: set[str], path: Path) -> None:
    for keyword in schema if isinstance(schema, dict) else ():
        if keyword not in known | _REMARKS:
            raise InvalidRequest(path, f": {keyword} cannot be held to in the way this model writes calls")


def _check_key(pattern: str, parameter: _Parameter) -> None:
    if not re.fullmatch(pattern, parameter.key):
        raise InvalidRequest(parameter.path, ": this model cannot write a parameter of this name")


def _tagged(form: str, number: int, parameters: list[_Parameter] | None, tokens: Tokens) -> Iterator[str]:
    """A rule ``parameters<number>`` for parameters between tags; ``text`` is any text and the tag that ends it."""
    head, _, closing = form.partition("{value}")
    end = closing.strip()
    rest = written(closing.partition(end)[2], tokens)
    if end in tokens:
        yield f"text: TEXT? <[{tokens[end]}]>"
        yield f"TEXT: /(.|\\n)+/ & {_without(end)}"
    else:
        yield f"text[lazy]: /(.|\\n)*{_pattern(end)}/"
    for parameter in parameters or ():
        _check_key('[^<>"\n]*' if '"{key}"' in form else "[^<>\n]*", parameter)
        key = _literal(parameter.key)
        if not is_text(parameter.schema):
            yield f"{parameter.rule}: {written(form, tokens, key=key, value=f'value_{parameter.rule}')}"
            yield parameter.json
        elif words := _words(parameter, end):
            yield f"{parameter.rule}: {written(form, tokens, key=key, value=words)}"
        else:
            yield f"{parameter.rule}: {written(head, tokens, key=key)} text {rest}"
    if parameters is None:
        yield f"any: {written(head, tokens, key='/[^<>' + chr(92) + 'n]+/')} text {rest}"
    listed = "any*" if parameters is None else " ".join(one.rule + one.optional for one in parameters)
    yield f"parameters{number}: {listed or _literal('')}"


def _words(parameter: _Parameter, end: str) -> str:
    """A rule for the allowed values of a text; empty if any text is allowed."""
    schema, path = parameter.schema, parameter.path
    _refuse(schema, _OF_TEXT, path)
    if not isinstance(schema, dict) or not schema.keys() & {"enum", "const"}:
        return ""
    words = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise InvalidRequest(path, ".enum must be a list of texts")
    if any(end in word for word in words):
        raise InvalidRequest(path, f": this model cannot write {end} in a parameter")
    return f"({' | '.join(map(_literal, words))})"


def _python(form: str, number: int, parameters: list[_Parameter] | None) -> Iterator[str]:
    """The same for Python's syntax: in order, separated by commas."""
    if parameters is None:
        yield f"any: {written(form, {}, key='/[A-Za-z_][A-Za-z0-9_]*/', value='any_value')}"
        yield "any_value: %json {}"
        yield f'parameters{number}: (any (", " any)*)?'
        return
    firsts, rest = ['""'], ""
    for parameter in reversed(parameters):
        _check_key("[A-Za-z_][A-Za-z0-9_]*", parameter)
        rule = parameter.rule
        yield f"{rule}: {written(form, {}, key=_literal(parameter.key), value=f'value_{rule}')}"
        yield parameter.json
        yield f'rest_{rule}: (", " {rule}){parameter.optional} {rest}'
        firsts = [f"{rule} {rest}"] + (firsts if parameter.optional else [])
        rest = f"rest_{rule}"
    yield f"parameters{number}: {' | '.join(firsts)}"


# -- any text, then valid calls ----------------------------------------------------------------------------------------
# The beginning of a call must be unambiguous: a token that begins calls, or, where calls may be bare, a brace that
# begins the answer.


def strict_grammar(form: str, offer: Offer, tokens: Tokens) -> Grammar | None:
    """Text, or calls of allowed functions, or text and then such calls; calls of strict functions match their schema.

    None if there is nothing to enforce. Raises :class:`InvalidRequest` if something must be enforced, but ``form`` does
    not show where a call begins.
    """
    allowed = len(offer.functions) == len(offer.listed)
    if allowed and not any(function.strict for function in offer.functions):
        return None
    start = _start(FORMATS[form], tokens)
    if start is None:
        if not allowed:
            raise InvalidRequest("tool_choice", "this model's tool calls cannot be told from text before they are made")
        return None
    calls = tool_call_grammar(form, loosened(offer), tokens)
    grammars = [{"lark_grammar": start}, {"name": "calls", "lark_grammar": calls.text}]
    return Grammar(text=json.dumps({"grammars": grammars}), param="tools" if allowed else "tool_choice")


def _start(form: ToolFormat, tokens: Tokens) -> str | None:
    if form.bare:
        return (
            f"start: @calls | TEXT | TEXT? {written(form.begins, tokens)} @calls\n"
            f"TEXT: /[ \\t\\n\\r]*[^{{ \\t\\n\\r](.|\\n)*/ & {_without(form.begins)}\n"
        )
    without = _without(form.begins)
    return f"start: TEXT? @calls | TEXT\nTEXT: /(.|\\n)+/ & {without}\n" if form.begins in tokens else None


def _without(tag: str) -> str:
    return f"~/(.|\\n)*{_pattern(tag)}(.|\\n)*/"


def _pattern(tag: str) -> str:
    return re.escape(tag).replace("/", "\\/")


def loosened(offer: Offer) -> Offer:
    """The same functions, with any arguments for those that are not strict."""
    listed, functions = (
        tuple(one if one.strict else msgspec.structs.replace(one, parameters=_ANYTHING) for one in given)
        for given in (offer.listed, offer.functions)
    )
    return msgspec.structs.replace(offer, listed=listed, functions=functions)
