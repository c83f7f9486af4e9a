"""Parsers written as straight-line generators that read one character at a time.

A script cannot see how the output was cut into pieces, so what it says depends on the whole alone. It reads atoms:
single characters, and marker tokens as the whole tag they stand for (``[TOOL_CALLS]``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: A generator that takes atoms and returns a T.
Script = Generator[None, str, T]

#: What looks like a call but does not say which within this many characters is text.
LONGEST_PRELUDE = 2000


class Ended(Exception):
    """The output is over."""


class Broken(Exception):
    """What follows is not what the script reads; the atom that shows it is unread."""


class Reader:
    """Where a script reads from, with a way back."""

    def __init__(self) -> None:
        self._again: list[str] = []
        self._tape: list[str] | None = None
        self._over = False

    def read(self) -> Script[str]:
        """The next atom; :class:`Ended` if there is none."""
        atom = self._again.pop() if self._again else "" if self._over else (yield)
        if not atom:
            self._over = True
            raise Ended
        if self._tape is not None:
            if len(self._tape) == LONGEST_PRELUDE:
                self._again.append(atom)
                raise Broken
            self._tape.append(atom)
        return atom

    def char(self) -> Script[str]:
        """The next atom, which must be a character."""
        atom = yield from self.read()
        if len(atom) > 1:
            self.unread(atom)
            raise Broken
        return atom

    def solid(self) -> Script[str]:
        """The next atom behind white space."""
        while True:
            atom = yield from self.read()
            if not atom.isspace():
                return atom

    def expect(self, text: str) -> Script[None]:
        """``text``, written as characters or told as one marker, possibly behind white space."""
        atom = yield from self.solid()
        for wanted in text[1:] if atom == text[0] else "":
            following = yield from self.read()
            if following != wanted:
                self.unread(following)
                raise Broken
        if atom not in (text, text[0]):
            self.unread(atom)
            raise Broken

    def unread(self, *atoms: str) -> None:
        """Read these again."""
        self._again.extend(reversed(atoms))
        if self._tape is not None:
            del self._tape[len(self._tape) - len(atoms) :]

    def mark(self) -> None:
        """Remember what is read from here on."""
        self._tape = []

    def forget(self) -> None:
        """There will be no way back."""
        self._tape = None

    def rewind(self) -> None:
        """Back to the mark."""
        assert self._tape is not None, "nothing was marked"
        tape, self._tape = self._tape, None
        self.unread(*tape)

    def rest(self) -> list[str]:
        """What was unread and not read again, once the script is over."""
        rest, self._again = self._again[::-1], []
        return rest


def text_before(reader: Reader, say: Callable[[str], None], tag: str, trim: bool = False) -> Script[str]:
    """Say the text up to ``tag``; returns the tag and the white space before it, which is not said.

    Holds back white space and what could be the tag. trim: leave out white space at the beginning too.
    """
    held = ""
    try:
        while True:
            atom = yield from reader.read()
            if atom == tag:
                _say(say, held.rstrip())
                return held[len(held.rstrip()) :] + tag
            if trim and not held and atom.isspace():
                continue
            held += atom
            if held.endswith(tag):
                return held
            begin = next((at for at in range(len(held)) if tag.startswith(held[at:].lstrip())), len(held))
            trim = trim and begin == 0
            _say(say, held[:begin])
            held = held[begin:]
    except Ended:
        _say(say, held)
        raise


def passed_over(reader: Reader, tag: str) -> Script[bool]:
    """Pass over white space and ``tag`` if that is what follows, whole or cut off; if not, nothing is passed over."""
    reader.mark()
    try:
        yield from reader.expect(tag)
    except Broken:
        reader.rewind()
        return False
    finally:
        reader.forget()
    return True


def _say(say: Callable[[str], None], text: str) -> None:
    if text:
        say(text)


# -- reading JSON a character at a time --------------------------------------------------------------------------------
# Lenient inside a value: brackets must match and strings must end, the rest is passed on as it was written.


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
