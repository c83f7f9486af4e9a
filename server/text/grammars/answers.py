"""The grammar of a whole chat answer: tool calls, the format asked for, and the thinking before both.

Where parameters stand between tags, one of type string is bare text up to the end tag, others are JSON. So what a
schema says of the text itself cannot be held to and is refused, but for a list of what it may be.

Arguments are written as ``json.dumps`` writes them, like the calls that chat templates show to the model.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from foresay.server.schemas.chat import ChatRequest, Function
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.fields import bounded, refuse_lengths, wanted
from foresay.server.text.grammars.schema import guided
from foresay.server.text.parsers.chat_format import FORMATS, ChatFormat
from foresay.server.text.parsers.formats import (
    ARGS,
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    PYTHON,
    TOOL_CALLS,
    is_text,
)
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar

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


#: A function called without parameters takes none.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
#: The id of a tag that is a single token; None for one that is text.
Tokens = Mapping[str, int]


def tool_call_grammar(form: str, offer: Offer, tokens: Tokens) -> Grammar:
    """The answer is calls of the offered functions: one, or as many as the model likes where they may be parallel.

    form: a name in :data:`~foresay.server.text.parsers.chat_format.FORMATS`. tokens: ids of its tags that are
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


#: Of a grammar that holds the schemas of tools.
MOST_BYTES_WITH_CALLS = 256 * 1024


class Beginning(msgspec.Struct, frozen=True):
    """How the answer begins. prompt: its text. opened: it ends inside reasoning. continues: inside an answer."""

    prompt: str
    opened: bool
    continues: bool


async def chat_grammar(
    request: ChatRequest, offer: Offer, chat_format: ChatFormat, tokenizer: Tokenizer, beginning: Beginning
) -> Grammar | None:
    """What the answer must match; None if it may be anything. Raises :class:`InvalidRequest` naming the field."""
    grammar = await wanted(request)
    form = chat_format.calls if offer.functions else None
    if form is not None and offer.required:
        refuse_lengths(request, "tool_choice")
        grammar = await asyncio.to_thread(tool_call_grammar, form, offer, _tokens(form, tokenizer))
    elif form is not None and grammar is None:
        grammar = await asyncio.to_thread(strict_grammar, form, offer, _tokens(form, tokenizer))
        if grammar is not None:
            refuse_lengths(request, grammar.param)
    elif form is not None and grammar is not None:
        calls = await asyncio.to_thread(tool_call_grammar, form, offer, _tokens(form, tokenizer))
        grammar = _either(calls, grammar, form)
    return (
        None
        if grammar is None
        else _behind_thinking(bounded(grammar, MOST_BYTES_WITH_CALLS), chat_format, tokenizer, beginning)
    )


def _tokens(form: str, tokenizer: Tokenizer) -> dict[str, int]:
    """The tags of a format that are single tokens."""
    ids = {tag: tokenizer.added_id(tag) for tag in FORMATS[form].tags}
    return {tag: token for tag, token in ids.items() if token is not None}


def _either(calls: Grammar, answer: Grammar, form: str) -> Grammar:
    """Calls or an answer, as the model likes. They must differ in their first token."""
    if form == "llama3":
        field = answer.param.partition(".")[0]
        raise InvalidRequest(
            field, f"this model's tool calls look like any JSON: {field} goes with tool_choice none or required only"
        )
    second = answer.text
    given = json.loads(second)["grammars"][0] if second.startswith("{") else {"lark_grammar": second}
    grammars = [
        {"lark_grammar": "start: @calls | @answer"},
        {"name": "calls", "lark_grammar": calls.text},
        given | {"name": "answer"},
    ]
    return msgspec.structs.replace(answer, text=json.dumps({"grammars": grammars}))


def _behind_thinking(grammar: Grammar, chat_format: ChatFormat, tokenizer: Tokenizer, beginning: Beginning) -> Grammar:
    """The grammar begins where the reasoning ends, if the prompt has opened it or the model opens it first of all."""
    if chat_format.thinks is None:
        return grammar
    opening, closing = (tokenizer.added_id(tag) for tag in chat_format.thinks)
    if beginning.opened and closing is None:
        raise InvalidRequest(
            grammar.param, f"{grammar.param}: the tags of this model's reasoning are no tokens; ask it not to reason"
        )
    done = beginning.continues or beginning.prompt.rstrip().endswith(chat_format.thinks[1])
    if beginning.opened:
        return msgspec.structs.replace(grammar, after=closing)
    if done or opening is None or closing is None:
        return grammar
    return msgspec.structs.replace(grammar, after=closing, opens=opening)


# -- any text, then right calls ----------------------------------------------------------------------------------------
# Where the text ends and a call begins must be plain to see: at a token that begins calls, or, in Llama's way, at a
# brace that begins the answer.


_BEGINS = {"hermes": CALL, "qwen3_coder": CALL, "mistral": TOOL_CALLS}
_ANYTHING = {"type": "object"}


def strict_grammar(form: str, offer: Offer, tokens: Tokens) -> Grammar | None:
    """Text, or calls of the functions that are allowed, or text and then such calls; strict functions are called right.

    None if there is nothing to hold the model to. Raises :class:`InvalidRequest` if ``form`` does not show where a call
    begins, but what is allowed depends on it.
    """
    allowed = len(offer.functions) == len(offer.listed)
    if allowed and not any(function.strict for function in offer.functions):
        return None
    start = _start(form, tokens)
    if start is None:
        if not allowed:
            raise InvalidRequest("tool_choice", "this model's tool calls cannot be told from text before they are made")
        return None
    calls = tool_call_grammar(form, _loosened(offer), tokens)
    grammars = [{"lark_grammar": start}, {"name": "calls", "lark_grammar": calls.text}]
    return Grammar(text=json.dumps({"grammars": grammars}), param="tools" if allowed else "tool_choice")


def _start(form: str, tokens: Tokens) -> str | None:
    if form == "llama3":
        tag = f"<[{tokens[PYTHON]}]>" if PYTHON in tokens else json.dumps(PYTHON)
        return (
            f"start: @calls | TEXT | TEXT? {tag} @calls\n"
            f"TEXT: /[ \\t\\n\\r]*[^{{ \\t\\n\\r](.|\\n)*/ & {_without(PYTHON)}\n"
        )
    tag = _BEGINS[form]
    return f"start: TEXT? @calls | TEXT\nTEXT: /(.|\\n)+/ & {_without(tag)}\n" if tag in tokens else None


def _without(tag: str) -> str:
    return f"~/(.|\\n)*{re.escape(tag)}(.|\\n)*/"


def _loosened(offer: Offer) -> Offer:
    """The same functions, those that are not strict with any arguments."""
    loose = {function.name: _loose(function) for function in offer.listed}
    return msgspec.structs.replace(
        offer,
        listed=tuple(loose[function.name] for function in offer.listed),
        functions=tuple(loose[function.name] for function in offer.functions),
    )


def _loose(function: Function) -> Function:
    return function if function.strict else msgspec.structs.replace(function, parameters=_ANYTHING)
