"""The grammar of a whole chat answer: tool calls, the requested format, and the reasoning before both; or messages on
channels (:mod:`foresay.server.text.parsers.chat_format`): the model may think, and say what it does, and then it calls,
or answers in the requested form.

Tool calls may be in any of the formats of :mod:`foresay.server.catalog.formats`. If parameters are between tags, those
of type string are bare text up to the end tag, others are JSON. So a schema's constraints on the text itself cannot be
enforced and are refused, except for a list of allowed values. All other arguments are JSON as ``json.dumps`` writes it,
like most calls that chat templates show to the model; Gemma 4's are read in this form, too.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from foresay.server.catalog.formats import FORMATS, PLACEHOLDER, TAG, ToolFormat, Way
from foresay.server.schemas.chat import ChatRequest, Function
from foresay.server.schemas.shared import GenerationRequest
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.fields import bounded, grammar_of, guided, refuse_lengths
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.parsers.parameters import is_text
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest, Path
from foresay.spec.request import Grammar

_OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXT = {"type", "enum", "const"}
_ANYTHING = {"type": "object"}
#: The schema of a function declared without parameters.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}

#: Keywords that restrict nothing.
_REMARKS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "format"}

#: The ids of tags that are single tokens.
Tokens = Mapping[str, int]


def literal(text: str) -> str:
    """A rule for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def _refuse(schema: Any, known: set[str], path: Path) -> None:
    """Raise for a keyword that is not known."""
    for keyword in schema if isinstance(schema, dict) else ():
        if keyword not in known | _REMARKS:
            raise InvalidRequest(path, f": {keyword} cannot be held to in the way this model writes calls")


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
    for between, placeholder in zip_longest(literals, found):
        pieces = re.split(f"({tags})", between) if tags else [between]
        parts += [f"<[{tokens[piece]}]>" if piece in tokens else literal(piece) for piece in pieces if piece]
        parts += [placeholders[placeholder]] if placeholder else []
    return " ".join(parts)


def _call(way: Way, number: int, function: Function, path: Path, tokens: Tokens) -> Iterator[str]:
    """A rule ``call<number>``, and the rules it needs. path: to the function's parameters."""
    inside = {"arguments": f"arguments{number}", "parameters": f"parameters{number}"}
    yield f"call{number}: {written(way.call, tokens, name=literal(function.name), index='/[0-9]{1,4}/', **inside)}"
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
        key = literal(parameter.key)
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
    yield f"parameters{number}: {listed or literal('')}"


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
    return f"({' | '.join(map(literal, words))})"


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
        yield f"{rule}: {written(form, {}, key=literal(parameter.key), value=f'value_{rule}')}"
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


#: Most bytes of a grammar with the schemas of tools.
MOST_BYTES_WITH_CALLS = 256 * 1024


async def wanted(request: GenerationRequest) -> Grammar | None:
    """The grammar that a request's fields ask for, made in a thread; None if any text is allowed."""
    kinds = (request.response_format, request.structured_outputs, request.json_schema, request.grammar or None)
    return None if kinds == (None,) * len(kinds) else await asyncio.to_thread(grammar_of, request)


async def chat_grammar(
    request: ChatRequest, offer: Offer, chat_format: ChatFormat, tokenizer: Tokenizer, prompt: str, opened: bool
) -> Grammar | None:
    """The grammar that the answer must match; None if it may be anything. prompt: its text. opened: it ends inside
    reasoning. Raises :class:`InvalidRequest` naming the field."""
    grammar, continues = await wanted(request), bool(request.continue_final_message)
    if chat_format.form.channels and not continues:
        tokens = _ids(chat_format.form.control, tokenizer)
        made = await asyncio.to_thread(channel_grammar, chat_format.calls, grammar, offer, tokens)
        if made is not None and grammar is None:
            refuse_lengths(request, made.param)
        return None if made is None else bounded(made, MOST_BYTES_WITH_CALLS)
    form = chat_format.calls if offer.functions else None
    if form is not None:
        make = tool_call_grammar if offer.required or grammar is not None else strict_grammar
        calls = await asyncio.to_thread(make, form, offer, _ids(FORMATS[form].tags, tokenizer))
        if calls is not None and grammar is not None and not offer.required:
            grammar = _either(calls, grammar, form)
        elif calls is not None:
            refuse_lengths(request, calls.param)
            grammar = calls
    if grammar is None:
        return None
    done = continues or (chat_format.thinks is not None and prompt.rstrip().endswith(chat_format.thinks[1]))
    return _behind_thinking(bounded(grammar, MOST_BYTES_WITH_CALLS), chat_format, tokenizer, opened, done)


def _ids(tags: Iterable[str], tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of those tags that are single tokens."""
    found = ((tag, tokenizer.added_id(tag)) for tag in tags)
    return {tag: id for tag, id in found if id is not None}


def _either(calls: Grammar, answer: Grammar, form: str) -> Grammar:
    """Calls or an answer, at the model's choice. They must differ in their first token."""
    if FORMATS[form].bare:
        field = answer.param.partition(".")[0]
        before = "this model's tool calls look like any JSON: "
        raise InvalidRequest(field, " goes with tool_choice none or required only", before)
    grammars = [
        {"lark_grammar": "start: @calls | @answer"},
        {"name": "calls", "lark_grammar": calls.text},
        named(answer, "answer"),
    ]
    return msgspec.structs.replace(answer, text=json.dumps({"grammars": grammars}))


def _behind_thinking(
    grammar: Grammar, chat_format: ChatFormat, tokenizer: Tokenizer, opened: bool, done: bool
) -> Grammar:
    """The grammar applied after reasoning, if the prompt has opened reasoning or the model starts with it. done: the
    prompt has closed it."""
    if chat_format.thinks is None:
        return grammar
    opening, closing = (tokenizer.added_id(TAG.findall(tag)[0]) for tag in chat_format.thinks)
    if opened and closing is None:
        raise InvalidRequest(grammar.param, ": the tags of this model's reasoning are no tokens; ask it not to reason")
    if opened:
        return msgspec.structs.replace(grammar, after=closing)
    if done or opening is None or closing is None:
        return grammar
    return msgspec.structs.replace(grammar, after=closing, opens=opening)


def channel_grammar(form: str | None, answer: Grammar | None, offer: Offer, tokens: Tokens) -> Grammar | None:
    """What all messages must match; None: they may be anything. form: of calls. answer: what the last one must match,
    if it calls nothing."""
    answer = None if offer.required else answer
    free = len(offer.functions) == len(offer.listed) and not any(one.strict for one in offer.functions)
    if answer is None and free and not offer.required:
        return None
    channel, message, next_one = (written(tags, tokens) for tags in ("<|channel|>", "<|message|>", "<|end|><|start|>"))
    ends = [] if offer.required else [f'{channel} "final" {message} {"TEXT?" if answer is None else "@answer"}']
    grammars = list[dict[str, str]]()
    if offer.functions and form is not None:
        held = loosened(offer) if answer is None and not offer.required else offer
        calls = tool_call_grammar(form, held, tokens)
        ends.append("@calls")
        grammars.append({"name": "calls", "lark_grammar": calls.text})
    if answer is not None:
        grammars.append(named(answer, "answer"))
    rules = (
        f"start: before* ({' | '.join(ends)})",
        f'before: {channel} ("analysis" | "commentary") {message} TEXT? {next_one} "assistant"',
        "TEXT: /(.|\\n)+/",
    )
    text = json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *grammars]})
    field = "tool_choice" if offer.required or len(offer.functions) < len(offer.listed) else "tools"
    return Grammar(text=text, param=field if answer is None else answer.param)


def named(grammar: Grammar, name: str) -> dict[str, str]:
    """A grammar as a part of another one."""
    text = grammar.text
    given: dict[str, str] = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return given | {"name": name}
