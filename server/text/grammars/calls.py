"""Grammars of tool calls, for answers that must hold some, in the ways that :mod:`server.text.parsers.formats` reads.

Arguments are written as ``json.dumps`` writes them, like the calls that chat templates show to the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from server.schemas.tools import Function
from server.text.grammars.bare import bare_rules
from server.text.grammars.schema import guided
from server.text.parsers.formats import ARGS, CALL, CALL_END, TOOL_CALLS
from server.text.tools import Offer
from spec.errors import InvalidRequest
from spec.request import Grammar

#: A function called without parameters takes none.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
#: The id of a tag that is a single token; None for one that is text.
Tokens = Mapping[str, int]


def tool_call_grammar(form: str, offer: Offer, tokens: Tokens) -> Grammar:
    """The answer is calls of the offered functions: one, or as many as the model likes where they may be parallel.

    form: a name in :data:`~server.text.parsers.chat_format.FORMATS`. tokens: ids of its tags that are
    single tokens.
    Raises :class:`InvalidRequest` naming the parameters that cannot be held to.
    """
    start, call = _FORMS[form](offer, tokens)
    rules = bare_rules(offer) if form == "qwen3_coder" else _rules(offer, call)
    either = " | ".join(f"call{number}" for number in range(len(offer.functions)))
    return Grammar(text="\n".join([f"start: {start}", f"call: {either}", *rules]), param="tool_choice")


def _rules(offer: Offer, call: Callable[[int, Function], str]) -> list[str]:
    calls = [f"call{number}: {call(number, function)}" for number, function in enumerate(offer.functions)]
    return calls + [_arguments(number, function, offer) for number, function in enumerate(offer.functions)]


Shape = tuple[str, Callable[[int, Function], str]]


def _hermes(offer: Offer, tokens: Tokens) -> Shape:
    opened, closed = _tag(CALL, tokens), _tag(CALL_END, tokens)
    call = f'{opened} "\\n" call "\\n" {closed}'
    return _several(f"({call})", '"\\n"', offer), _object("arguments")


def _llama3(offer: Offer, tokens: Tokens) -> Shape:
    return _several("call", '"; "', offer), _object("parameters")


def _mistral(offer: Offer, tokens: Tokens) -> Shape:
    tag = _tag(TOOL_CALLS, tokens)
    if ARGS not in tokens:
        return f'{tag} "[" {_several("call", chr(34) + ", " + chr(34), offer)} "]"', _object("arguments")
    call = f"({tag} call)"
    return (
        f"{call}+" if offer.parallel else call
    ), lambda number, function: f"{_literal(function.name)} {_tag(ARGS, tokens)} arguments{number}"


_FORMS: dict[str, Callable[[Offer, Tokens], Shape]] = {
    "hermes": _hermes,
    "qwen3_coder": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}


def _several(one: str, between: str, offer: Offer) -> str:
    return f"{one} ({between} {one})*" if offer.parallel else one


def _object(key: str) -> Callable[[int, Function], str]:
    """``{"name": "f", "arguments": {...}}``, with ``key`` before the arguments."""

    def call(number: int, function: Function) -> str:
        head = f'{{"name": {json.dumps(function.name)}, "{key}": '
        return f'{_literal(head)} arguments{number} "}}"'

    return call


def _arguments(number: int, function: Function, offer: Offer) -> str:
    place = f"{offer.place_of(function)}.parameters"
    schema = guided(function.parameters or _NOTHING, place, closed=True)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(place, f"{place}.type must be object, got {schema['type']!r}")
    return f"arguments{number}: %json {json.dumps(schema | {'type': 'object'})}"


def _tag(tag: str, tokens: Tokens) -> str:
    token = tokens.get(tag)
    return _literal(tag) if token is None else f"<[{token}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
