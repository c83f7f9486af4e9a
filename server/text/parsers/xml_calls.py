"""Calls in the way of Qwen 3 Coder and Qwen 3.5: parameters between tags, which become the JSON that clients expect.

::

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is bare text. What it means the function's schema says: text for parameters of type string and for unknown ones,
else JSON, or text again if it is none.
"""

from __future__ import annotations

from typing import Any

import msgspec

from server.text.parsers.calls import Answer, Call
from server.text.parsers.script import Broken, Ended, Reader, Script, passed_over, text_before

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
