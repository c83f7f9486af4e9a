"""Grammars of calls whose parameters stand between tags, as :mod:`server.text.parsers.xml_calls` reads them.

A parameter of type string is bare text up to the end tag, others are JSON. So what a schema says of the text itself
cannot be held to and is refused, but for a list of what it may be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from server.schemas.tools import Function
from server.text.grammars.schema import guided
from server.text.parsers.xml_calls import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, is_text
from server.text.tools import Offer
from spec.errors import InvalidRequest

_TEXT = r"[lazy]: /(.|\n)*<\/parameter>/"
_OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXT = {"type", "enum", "const", "format"}
_REMARKS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}


def bare_rules(offer: Offer) -> list[str]:
    """A rule ``call<i>`` for each function that may be called, and those it needs."""
    return [rule for number, function in enumerate(offer.functions) for rule in _function(number, function, offer)]


def _function(number: int, function: Function, offer: Offer) -> Iterator[str]:
    place = f"{offer.place_of(function)}.parameters"
    schema = function.parameters or {}
    _refuse(schema, _OF_OBJECT, place)
    guided(schema, place)  # refuses what is no schema
    head, end = _literal(f"{FUNCTION}{function.name}>\n"), _literal(FUNCTION_END)
    if schema and "properties" not in schema and schema.get("additionalProperties") is not False:
        yield f"call{number}: {head} any{number}* {end}"
        yield f'any{number}: "{PARAMETER}" /[^<>\\n]+/ ">\\n" value{number} "\\n"'
        yield f"value{number}{_TEXT}"
        return
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(needed, list):
        raise InvalidRequest(place, f"{place}: properties must be an object, and required a list")
    names = [f"parameter{number}_{index}" for index in range(len(properties))]
    for name, key in zip(names, properties, strict=True):
        yield from _parameter(name, key, schema, f"{place}.properties.{key}")
    wanted = [name if key in needed else f"{name}?" for name, key in zip(names, properties, strict=True)]
    yield f"call{number}: {head} {' '.join(wanted)} {end}"


def _parameter(name: str, key: str, function: dict[str, Any], place: str) -> Iterator[str]:
    if set(key) & set("<>\n"):
        raise InvalidRequest(place, f"{place}: this model cannot write a parameter of this name")
    schema = function["properties"][key]
    head, end = _literal(f"{PARAMETER}{key}>\n"), _literal(f"\n{PARAMETER_END}\n")
    if not is_text(schema):
        definitions = {word: function[word] for word in ("$defs", "definitions") if word in function}
        yield f"{name}: {head} value_{name} {end}"
        yield f"value_{name}: %json {json.dumps(guided(schema | definitions, place, closed=True))}"
        return
    _refuse(schema, _OF_TEXT, place)
    words = _words(schema, place)
    if words:
        yield f"{name}: {head} ({' | '.join(_literal(word) for word in words)}) {end}"
    else:
        yield f'{name}: {head} value_{name} "\\n"'
        yield f"value_{name}{_TEXT}"


def _words(schema: Any, place: str) -> list[str]:
    """What the text may be; empty: anything."""
    if not isinstance(schema, dict) or not schema.keys() & {"enum", "const"}:
        return []
    words = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise InvalidRequest(place, f"{place}.enum must be a list of texts")
    if any(PARAMETER_END in word for word in words):
        raise InvalidRequest(place, f"{place}: this model cannot write {PARAMETER_END} in a parameter")
    return words


def _refuse(schema: Any, known: set[str], place: str) -> None:
    for keyword in schema if isinstance(schema, dict) else ():
        if keyword not in known | _REMARKS:
            raise InvalidRequest(place, f"{place}: {keyword} cannot be held to in the way this model writes calls")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
