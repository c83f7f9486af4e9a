"""Parsers written as straight-line generators that read one character at a time.

A script cannot see how the output was cut into pieces, so its result depends only on the whole. It reads atoms: single
characters, and marker tokens as whole tags (``[TOOL_CALLS]``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: A generator that receives atoms and returns a T.
Script = Generator[None, str, T]

#: What looks like a call but names no function within this many characters is text.
LONGEST_PRELUDE = 2000


class OutputOver(Exception):
    """The output has ended."""


class Broken(Exception):
    """The input is not what the script expects; the unexpected atom is unread."""


class Reader:
    """A script's input, with backtracking."""

    def __init__(self) -> None:
        self._again: list[str] = []
        self._tape: list[str] | None = None
        self._over = False

    def read(self) -> Script[str]:
        """The next atom. Raises :class:`OutputOver` if there is none."""
        atom = self._again.pop() if self._again else "" if self._over else (yield)
        if not atom:
            self._over = True
            raise OutputOver
        if self._tape is not None:
            if len(self._tape) == LONGEST_PRELUDE:
                self._again.append(atom)
                raise Broken
            self._tape.append(atom)
        return atom

    def char(self, tag: str = "") -> Script[str]:
        """The next atom, which must be a character or ``tag``."""
        atom = yield from self.read()
        if len(atom) > 1 and atom != tag:
            self.unread(atom)
            raise Broken
        return atom

    def solid(self) -> Script[str]:
        """The next atom after white space."""
        while True:
            atom = yield from self.read()
            if not atom.isspace():
                return atom

    def ahead(self) -> Script[str]:
        """The next atom after white space, left unread."""
        atom = yield from self.solid()
        self.unread(atom)
        return atom

    def one_of(self, tags: tuple[str, ...]) -> Script[str]:
        """Which of ``tags`` follows, as characters or as one marker, possibly after white space."""
        read = [(yield from self.solid())]
        while (tag := "".join(read)) not in tags:
            if not any(one.startswith(tag) for one in tags):
                self.unread(*read)
                raise Broken
            read.append((yield from self.read()))
        return tag

    def expect(self, tag: str) -> Script[None]:
        """Read ``tag``, which must follow, possibly after white space."""
        yield from self.one_of((tag,))

    def unread(self, *atoms: str) -> None:
        """Put these back, to be read again."""
        self._again.extend(reversed(atoms))
        if self._tape is not None:
            del self._tape[len(self._tape) - len(atoms) :]

    def mark(self) -> None:
        """Remember what is read from here on."""
        self._tape = []

    def forget(self) -> None:
        """Drop the mark."""
        self._tape = None

    def rewind(self) -> None:
        """Back to the mark."""
        assert self._tape is not None, "nothing was marked"
        tape, self._tape = self._tape, None
        self.unread(*tape)

    def passed_over(self, tag: str, unless: tuple[type[Exception], ...] = (Broken,)) -> Script[bool]:
        """Skip white space and ``tag``, if that follows. unless: errors that mean that it does not."""
        self.mark()
        try:
            yield from self.expect(tag)
        except unless:
            self.rewind()
            return False
        finally:
            self.forget()
        return True


def text_before(reader: Reader, emit: Callable[[str], None], tags: tuple[str, ...], trim: bool = False) -> Script[str]:
    """Emit the text up to one of ``tags``; returns the tag and the white space before it, which is not emitted.

    Holds back white space and what could be a tag. trim: leave out white space at the beginning too.
    """
    held = ""
    try:
        while True:
            atom = yield from reader.read()
            if atom in tags:
                _emit(emit, held.rstrip())
                return held[len(held.rstrip()) :] + atom
            if trim and not held and atom.isspace():
                continue
            held += atom
            if held.endswith(tags):
                return held
            ends = (at for at in range(len(held)) for tag in tags if tag.startswith(held[at:].lstrip()))
            begin = next(ends, len(held))
            trim = trim and begin == 0
            _emit(emit, held[:begin])
            held = held[begin:]
    except OutputOver:
        _emit(emit, held)
        raise


def _emit(emit: Callable[[str], None], text: str) -> None:
    if text:
        emit(text)


# -- reading JSON, or Python's literals, a character at a time ---------------------------------------------------------
# Lenient inside a value: brackets must match and strings must end, the rest of JSON is passed on unchanged.
# Python's literals are rewritten as JSON; of these only strings and brackets stream.


Write = Callable[[str], None]

_CLOSERS = {"{": "}", "[": "]"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = frozenset('"\\/bfnrtu')


def value(reader: Reader, write: Write, python: bool = False) -> Script[None]:
    """One value, after white space; its JSON is streamed to ``write``. python: it is a Python literal."""
    brackets = _CLOSERS | {"(": ")"} if python else _CLOSERS
    closers: list[str] = []
    held = ""  # in Python a comma may precede a closing bracket
    yield from reader.ahead()
    while True:
        char = yield from reader.char()
        if char in brackets:
            closers.append(brackets[char])
            write(held + ("[" if char == "(" else char))
        elif char in brackets.values():
            if not closers or char != closers.pop():
                reader.unread(char)
                raise Broken
            write("]" if char == ")" else char)
        elif char == '"' or (python and char == "'"):
            write(held + '"')
            yield from _quoted(reader, write, char, python)
        elif closers and not python:
            write(char)
        elif closers and (char.isspace() or char in ",:"):
            held += char
            continue
        else:
            reader.unread(char)
            write(held)
            yield from _scalar(reader, write, python)
        held = ""
        if not closers:
            return


def _quoted(reader: Reader, write: Write, quote: str = '"', python: bool = False) -> Script[None]:
    """The rest of a string, written in double quotes."""
    while (char := (yield from reader.char())) != quote:
        if char == "\\" and python:
            char = yield from reader.char()
            char = char if char == "'" else "\\" + char if char in _ESCAPES else "\\\\" + char
        elif char == "\\":
            write(char)
            char = yield from reader.char()
        elif char == '"':
            char = '\\"'
        write(char)
    write('"')


def _scalar(reader: Reader, write: Write, python: bool) -> Script[None]:
    """A number, or a word such as true."""
    word = ""
    try:
        while (char := (yield from reader.char())).isalnum() or char in "+-.":
            word += char
    except OutputOver:
        write(word)
        raise
    reader.unread(char)
    if not word:
        raise Broken
    write(meant(word) if python else word)


def string(reader: Reader) -> Script[str]:
    """The value of the next string, after white space."""
    yield from reader.expect('"')
    raw = ['"']
    yield from _quoted(reader, raw.append)
    value = text_of("".join(raw))
    if value is None:
        raise Broken
    return value


def text_of(raw: str) -> str | None:
    """The value of a string in quotes; None if it is invalid."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def meant(text: str) -> str:
    """``text`` as JSON: itself if it is valid JSON, else a string."""
    text = _WORDS.get(text.strip(), text)
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return spelled(text)
    return text.strip()


def spelled(text: str) -> str:
    """``text`` as a JSON string."""
    return msgspec.json.encode(text).decode()


# -- Gemma 4's notation ------------------------------------------------------------------------------------------------
# ``{city:<|"|>Paris<|"|>,days:3}``, written as JSON. A string ends at its mark as it began: as a token, or spelled. So
# nothing has to be escaped in it. Read as well: JSON's strings, words without marks, ``(city=..)``.


_MARKED = {"{": ("{", "}"), "(": ("{", ")"), "[": ("[", "]")}
_CLOSING = {")": "}"}


def marked(reader: Reader, write: Write, mark: str) -> Script[None]:
    """One object, after white space, with ``mark`` around its strings; its JSON is streamed to ``write``."""
    if (yield from reader.ahead()) not in "{(":
        raise Broken
    closers: list[str] = []
    while True:
        bracket = yield from reader.ahead()
        first = bracket in _MARKED
        if first:
            write(_MARKED[(yield from reader.read())][0])
            closers.append(_MARKED[bracket][1])
        else:
            yield from _marked_scalar(reader, write, mark)
        while not (yield from _goes_on(reader, write, mark, closers[-1], first)):
            first = False
            closers.pop()
            if not closers:
                return


def _goes_on(reader: Reader, write: Write, mark: str, closer: str, first: bool) -> Script[bool]:
    """Whether brackets have another value, whose comma and key are written; else they are closed. first: it would be
    the first."""
    char = yield from reader.solid()
    if not first and char == ",":
        char = yield from reader.solid()
    elif not first and char != closer:
        reader.unread(char)
        raise Broken
    if char == closer:
        write(_CLOSING.get(closer, closer))
        return False
    reader.unread(char)
    key = "" if closer == "]" else (yield from _key(reader, mark, ":=" if closer == ")" else ":"))
    write(("" if first else ", ") + key)
    return True


def _key(reader: Reader, mark: str, ends: str) -> Script[str]:
    """A key as JSON, up to one of ``ends``, which is read too."""
    quoted: list[str] = []
    if (yield from reader.ahead()) in (mark, mark[0], '"'):
        yield from _marked_scalar(reader, quoted.append, mark)
        name = text_of("".join(quoted)) or ""
    else:
        name = yield from _bare(reader, ends + ",{}[]()<")
    end = yield from reader.solid()
    if end not in ends:
        reader.unread(end)
        raise Broken
    return f"{spelled(name)}: "


def _marked_scalar(reader: Reader, write: Write, mark: str) -> Script[None]:
    """A string, a number or a word."""
    begin = yield from reader.ahead()
    if begin in (mark, mark[0]):
        yield from reader.expect(mark)
        yield from _between(reader, write, mark, begin == mark)
    elif begin == '"':
        write((yield from reader.read()))
        yield from _quoted(reader, write)
    else:
        write(meant((yield from _bare(reader, ",{}[]()<", write))))


def _bare(reader: Reader, ends: str, write: Write = lambda _: None) -> Script[str]:
    """The text before one of ``ends``, which is left unread. write: gets what there is if the output ends."""
    text = ""
    try:
        while (char := (yield from reader.char())) not in ends:
            text += char
    except (OutputOver, Broken):
        write(text)
        raise
    reader.unread(char)
    if not text.strip():
        raise Broken
    return text.strip()


def _between(reader: Reader, write: Write, mark: str, token: bool) -> Script[None]:
    """The rest of a string up to ``mark``. token: the mark is a token, and its spelling is text."""
    write('"')
    held = ""
    try:
        while held != mark and (atom := (yield from reader.char(mark))) != mark:
            held += atom
            spelling = next((at for at in range(len(held)) if mark.startswith(held[at:])), len(held))
            certain = len(held) if token else spelling
            write(spelled(held[:certain])[1:-1])
            held = held[certain:]
    except OutputOver:
        write(spelled(held)[1:-1])
        raise
    write(f'{spelled("" if held == mark else held)[1:-1]}"')
