"""Reading JSON a character at a time: where a value ends, and what a string says.

Lenient inside a value: brackets must match and strings must end, the rest is passed on as it was written.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from server.text.parsers.script import Broken, Reader, Script

Write = Callable[[str], None]

_CLOSERS = {"{": "}", "[": "]"}
_AFTER_SCALAR = frozenset(",]} \t\r\n")


def value(reader: Reader, write: Write) -> Script[None]:
    """One value, behind white space; its text goes to ``write`` as it comes."""
    first = yield from reader.solid()
    reader.unread(first)
    if first in _CLOSERS:
        yield from _bracketed(reader, write)
    elif first == '"':
        yield from _quoted(reader, write)
    else:
        yield from _scalar(reader, write)


def string(reader: Reader) -> Script[str]:
    """What the string that comes next, behind white space, says."""
    first = yield from reader.solid()
    reader.unread(first)
    if first != '"':
        raise Broken
    raw: list[str] = []
    yield from _quoted(reader, raw.append)
    said = text_of("".join(raw))
    if said is None:
        raise Broken
    return said


def text_of(raw: str) -> str | None:
    """What a string in quotes says; None if it is no right string."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def _bracketed(reader: Reader, write: Write) -> Script[None]:
    closers: list[str] = []
    while True:
        char = yield from reader.char()
        if char == '"':
            reader.unread(char)
            yield from _quoted(reader, write)
            continue
        if char in _CLOSERS:
            closers.append(_CLOSERS[char])
        elif char in "]}" and char != closers.pop():
            reader.unread(char)
            raise Broken
        write(char)
        if not closers:
            return


def _quoted(reader: Reader, write: Write) -> Script[None]:
    write((yield from reader.char()))
    escaped = False
    while True:
        char = yield from reader.char()
        write(char)
        if char == '"' and not escaped:
            return
        escaped = char == "\\" and not escaped


def _scalar(reader: Reader, write: Write) -> Script[None]:
    length = 0
    while True:
        char = yield from reader.char()
        if char in _AFTER_SCALAR or not (char.isalnum() or char in "+-."):
            reader.unread(char)
            if not length:
                raise Broken
            return
        write(char)
        length += 1
