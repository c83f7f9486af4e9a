"""The ways in which families of models write their calls, each as a script.

::

    hermes   text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text      Hermes, Qwen 2.5, Qwen 3
    llama3   {"name": "f", "parameters": {...}}; {...}    <|python_tag|>{...}        Llama 3.1 and later
    mistral  text [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]               Mistral up to tokenizer v7
             text [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}                   and since v11
    xml      <tool_call>(newline)<function=f>(newline)<parameter=city>(newline)      Qwen 3 Coder, Qwen 3.5
             Paris(newline)</parameter>(newline)</function>(newline)</tool_call>

A value of the last is bare text. What it means the function's schema says: text for parameters of type string and for
unknown ones, else JSON, or text again if it is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from foresay.server.text.parsers.parser import Answer, Call, arguments, json_call
from foresay.server.text.parsers.script import Broken, Ended, Reader, Script, passed_over, text_before

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def plain(reader: Reader, answer: Answer) -> Script[None]:
    """Only text."""
    while True:
        answer.text((yield from reader.read()))


def hermes(reader: Reader, answer: Answer) -> Script[None]:
    """An object between tags; text around the tags."""
    called = False
    while not answer.full:
        tag = yield from text_before(reader, answer.text, CALL, trim=called)
        called = yield from answer.attempt(reader, json_call)
        if called:
            yield from passed_over(reader, CALL_END)
        else:
            answer.text(tag)


def llama3(reader: Reader, answer: Answer) -> Script[None]:
    """Objects at the very beginning or behind the tag, with semicolons between them.

    Nothing marks such an object as a call but its name, which must be that of an offered function.
    """
    called = yield from _objects(reader, answer)
    while not answer.full:
        tag = yield from text_before(reader, answer.text, PYTHON, trim=called)
        called = yield from _objects(reader, answer)
        if not called:
            answer.text(tag)


def _objects(reader: Reader, answer: Answer) -> Script[bool]:
    """Calls in a row; whether there was one."""
    called = more = yield from answer.attempt(reader, json_call, answer.offered)
    while more and not answer.full:
        more = yield from answer.attempt(reader, _next_object, answer.offered)
    return called


def _next_object(reader: Reader, call: Call) -> Script[None]:
    following = yield from reader.solid()
    if following != ";":
        reader.unread(following)
    yield from json_call(reader, call)


def mistral(reader: Reader, answer: Answer) -> Script[None]:
    """An array of objects behind the tag, or the name and then the arguments."""
    called = False
    while not answer.full:
        tag = yield from text_before(reader, answer.text, TOOL_CALLS, trim=called)
        called = (yield from answer.attempt(reader, _named_call)) or (yield from _array(reader, answer))
        if not called:
            answer.text(tag)


def _array(reader: Reader, answer: Answer) -> Script[bool]:
    """An array of calls; whether there was one in it."""
    called = more = yield from answer.attempt(reader, _element("["))
    while more and not answer.full:
        more = yield from answer.attempt(reader, _element(","))
    if called:
        yield from passed_over(reader, "]")
    return called


def _element(before: str) -> Callable[[Reader, Call], Script[None]]:
    """A call in an array, behind what comes before it."""

    def read(reader: Reader, call: Call) -> Script[None]:
        yield from reader.expect(before)
        yield from json_call(reader, call)

    return read


def _named_call(reader: Reader, call: Call) -> Script[None]:
    """``f[ARGS]{...}``, ``f[CALL_ID]id[ARGS]{...}`` or ``f{...}``."""
    name, mark = yield from _word(reader)
    if mark == CALL_ID:
        call.id, mark = yield from _word(reader)
    if mark not in (ARGS, "{"):
        raise Broken
    call.named(name)
    yield from arguments(reader, call)


def _word(reader: Reader) -> Script[tuple[str, str]]:
    """A name, and what ends it: a tag, as one marker or spelled out, or an opening brace, which is unread."""
    word, atom = "", (yield from reader.solid())
    while len(atom) == 1 and (atom.isalnum() or atom in "_-.:/"):
        word += atom
        atom = yield from reader.read()
    if not word:
        raise Broken
    if atom == "[":
        while not atom.endswith("]"):
            atom += yield from reader.char()
    elif atom == "{":
        reader.unread(atom)
    return word, atom


CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def xml(reader: Reader, answer: Answer) -> Script[None]:
    """Functions between tags; text around them."""
    called = False

    def read(reader: Reader, call: Call) -> Script[None]:
        yield from _function(reader, call, answer)

    while not answer.full:
        tag = yield from text_before(reader, answer.text, CALL, trim=called)
        called = yield from answer.attempt(reader, read)
        if called:
            yield from passed_over(reader, CALL_END)
        else:
            answer.text(tag)


def _function(reader: Reader, call: Call, answer: Answer) -> Script[None]:
    yield from reader.expect(FUNCTION)
    call.named((yield from _name(reader)))
    schemas = answer.parameters_of(call.name or "")
    before = "{"
    while True:
        tag = yield from _tag(reader)
        if tag == FUNCTION_END:
            call.write("}" if before == ", " else "{}")
            return
        key = yield from _name(reader)
        call.write(f"{before}{_spelled(key)}: ")
        before = ", "
        yield from _value(reader, call, schemas.get(key))


def _name(reader: Reader) -> Script[str]:
    """What stands before the next ``>``."""
    name = ""
    while True:
        char = yield from reader.char()
        if char == ">":
            return name.strip()
        if char in "<\n":
            reader.unread(char)
            raise Broken
        name += char


def _tag(reader: Reader) -> Script[str]:
    """The beginning of a parameter, or the end of the function, behind white space."""
    tag = yield from reader.solid()
    while tag not in (PARAMETER, FUNCTION_END):
        char = yield from reader.char()
        if not (PARAMETER.startswith(tag + char) or FUNCTION_END.startswith(tag + char)):
            reader.unread(*tag, char)
            raise Broken
        tag += char
    return tag


def _value(reader: Reader, call: Call, schema: Any) -> Script[None]:
    """The text up to the end tag, without the line ends next to the tags; as it comes if it is text for sure."""
    streams = is_text(schema)
    if streams:
        call.write('"')
    text, held = "", ""
    first = yield from reader.read()
    if first != "\n":
        reader.unread(first)
    while not held.endswith(PARAMETER_END):
        try:
            held += yield from reader.char()
        except Ended:
            call.write(_spelled(held)[1:-1] if streams else text + held)
            raise
        certain = _certain(held)
        if streams:
            call.write(_spelled(held[:certain])[1:-1])
        text, held = text + held[:certain], held[certain:]
    call.write('"' if streams else _meant(text))


def _certain(held: str) -> int:
    """How much of ``held`` cannot be the line end before the end tag, or that tag."""
    ends = ("\n" + PARAMETER_END, PARAMETER_END)
    return next(at for at in range(len(held) + 1) if any(end.startswith(held[at:]) for end in ends))


def is_text(schema: Any) -> bool:
    """Whether a parameter of this schema is text for sure."""
    known = isinstance(schema, dict) and any(
        key in schema for key in ("type", "anyOf", "oneOf", "enum", "const", "$ref")
    )
    return not known or schema.get("type") == "string"


def _meant(text: str) -> str:
    """``text`` as JSON."""
    text = _PYTHON.get(text.strip(), text)
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return _spelled(text)
    return text.strip()


def _spelled(text: str) -> str:
    return msgspec.json.encode(text).decode()
