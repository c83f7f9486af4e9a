"""Parsers written as straight-line generators that read one character at a time.

A script cannot see how the output was cut into pieces, so its result depends only on the whole. It reads atoms: single
characters, and marker tokens as whole tags (``[TOOL_CALLS]``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
from itertools import chain
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
    """A script's input, with backtracking. text: all of it, if that is known."""

    def __init__(self, text: str | None = None) -> None:
        self._again = list(reversed(text or ""))
        self._tape: list[str] = []  # what was read since the first of the marks
        self._marks: list[int] = []
        self._longest: float = LONGEST_PRELUDE
        self._over = text is not None

    def read(self) -> Script[str]:
        """The next atom. Raises :class:`OutputOver` if there is none."""
        atom = self._again.pop() if self._again else "" if self._over else (yield)
        if not atom:
            self._over = True
            raise OutputOver
        if self._marks:
            if len(self._tape) >= self._longest:
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

    def white(self) -> Script[str]:
        """The white space that follows."""
        white = ""
        while (atom := (yield from self.read())).isspace():
            white += atom
        self.unread(atom)
        return white

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
        if self._marks:
            del self._tape[len(self._tape) - len(atoms) :]

    def mark(self, longest: float = LONGEST_PRELUDE) -> None:
        """Remember what is read from here on. longest: how much of it may be read, if this is the only mark."""
        if not self._marks:
            self._longest = longest
        self._marks.append(len(self._tape))

    def forget(self) -> None:
        """Drop the last mark."""
        self._marks.pop()
        if not self._marks:
            self._tape.clear()

    def rewind(self) -> None:
        """Back to the last mark, which is dropped."""
        self.unread(*self._tape[self._marks[-1] :])
        self.forget()

    def whole(self, script: Script[T]) -> Script[T]:
        """The result of ``script``; where it raises, nothing is consumed."""
        self.mark()
        try:
            result = yield from script
        except (Broken, OutputOver):
            self.rewind()
            raise
        self.forget()
        return result

    def seen(self, script: Script[T], over: T) -> Script[T | None]:
        """The result of ``script``, consuming nothing; None if it breaks off. over: the result if the output ends."""
        self.mark(math.inf)
        try:
            return (yield from script)
        except Broken:
            return None
        except OutputOver:
            return over
        finally:
            self.rewind()

    def passed_over(self, tag: str, unless: tuple[type[Exception], ...] = (Broken,)) -> Script[bool]:
        """Skip white space and ``tag``, if that follows. unless: errors that mean that it does not."""
        try:
            yield from self.whole(self.expect(tag))
        except unless:
            return False
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


# -- reading JSON, a character at a time -------------------------------------------------------------------------------
# Valid JSON is passed on as it is. Read as well, and written as JSON: Python's literals, commas before a closing
# bracket, bare keys and words, control characters in strings; and ``{city:<|"|>Paris<|"|>,days:3}``, as Gemma 4 writes,
# where a string ends at its mark as it began, as a token or spelled, so that nothing has to be escaped in it.
# Whatever ends a value, what was written of it is valid; only an unfinished key is left out.


Write = Callable[[str], None]

_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
#: Words end at these.
_ENDS = ',{}[]()<"'
#: No value begins with these.
_NEVER = frozenset(",:=)]}>")
_ESCAPE = re.compile(r"""\\(["\\/bfnrt]|u[0-9a-f]{0,4}(\\(u[0-9a-f]{0,4})?)?)""", re.IGNORECASE)


def value(reader: Reader, write: Write, mark: str = "") -> Script[None]:
    """One value, after white space; its JSON is streamed to ``write``. mark: what is around strings in Gemma 4's
    notation, in which round brackets are an object's."""
    written = {"}": "}", "]": "]", ")": "}" if mark else "]"}
    closers: list[str] = []
    try:
        while True:
            first = (yield from reader.ahead()) in _CLOSERS
            if first:
                closers.append(_CLOSERS[(yield from reader.read())])
                write("{" if written[closers[-1]] == "}" else "[")
            else:
                yield from _scalar(reader, write, mark)
            while closers:
                end = written[closers[-1]]
                between, another = yield from reader.whole(_between(reader, closers[-1], end, first, mark))
                write(between)
                if another:
                    break
                closers.pop()
                first = False
            else:
                return
    except (Broken, OutputOver):
        if closers:
            write("".join(written[closer] for closer in reversed(closers)))
        raise


def _between(reader: Reader, closer: str, end: str, first: bool, mark: str) -> Script[tuple[str, bool]]:
    """What is before the next value inside brackets, a comma and a key; or their end. Returns which, too: whether there
    is a value. first: it would be the first."""
    before, after = (yield from reader.white()), ""
    char = yield from reader.read()
    comma = "," if char == "," and not first else ""
    if comma:
        after = yield from reader.white()
        char = yield from reader.read()
    if char == closer:
        return ("" if mark else before + after) + end, False
    reader.unread(char)
    if not first and not comma:
        raise Broken
    key = "" if end == "]" else (yield from _key(reader, mark, ":=" if closer == ")" else ":"))
    yield from due(reader, mark)
    return (comma and ", " if mark else before + comma + after) + key, True


def due(reader: Reader, mark: str = "") -> Script[None]:
    """Raise :class:`Broken` if no value can follow."""
    first = yield from reader.ahead()
    if first in _NEVER or (first == "<" and not mark) or (len(first) > 1 and first != mark):
        raise Broken


def _key(reader: Reader, mark: str, ends: str) -> Script[str]:
    """A key as JSON, with what is between it and its value. ends: what may end it."""
    key: list[str] = []
    if (yield from reader.ahead()) in (mark, mark[:1], '"', "'"):
        yield from _scalar(reader, key.append, mark)
    else:
        key.append(spelled((yield from _word(reader, key.append, _ENDS + ends))))
    before = yield from reader.white()
    if (char := (yield from reader.read())) not in ends:
        reader.unread(char)
        raise Broken
    after = yield from reader.white()
    return "".join(key) + (": " if mark else f"{before}:{after}")


def _scalar(reader: Reader, write: Write, mark: str) -> Script[None]:
    """A string, a number or a word."""
    begin = yield from reader.ahead()
    if begin in (mark, mark[:1]):
        yield from _marked(reader, write, mark)
    elif begin in ('"', "'"):
        yield from _quoted(reader, write, (yield from reader.read()))
    else:
        write(meant((yield from _word(reader, write, _ENDS))))


def _word(reader: Reader, write: Write, ends: str) -> Script[str]:
    """The text before one of ``ends``, which is left unread. write: gets what there is if more is missing."""
    text = ""
    try:
        while (char := (yield from reader.char())) not in ends:
            text += char
    except (OutputOver, Broken):
        if text.strip():
            write(meant(text.strip()))
        raise
    word = text.strip()
    reader.unread(*text[len(text.rstrip()) :], char)
    if not word:
        raise Broken
    return word


def _quoted(reader: Reader, write: Write, quote: str) -> Script[None]:
    """The rest of a string, written in double quotes."""
    write('"')
    try:
        while (char := (yield from reader.char())) != quote:
            if char == "\\":
                write((yield from _escape(reader)))
            else:
                write(spelled(char)[1:-1] if char == '"' or char < " " else char)
    finally:
        write('"')


def _escape(reader: Reader) -> Script[str]:
    """What a backslash escapes; one that escapes nothing is itself."""
    escape = "\\"
    while text_of(f'"{escape}"') is None:
        char = yield from reader.char()
        if not _ESCAPE.fullmatch(escape + char):
            if escape + char == "\\'":
                return "'"
            reader.unread(char)
            return spelled(escape)[1:-1]
        escape += char
    return escape


def _marked(reader: Reader, write: Write, mark: str) -> Script[None]:
    """A string between two marks. If they are tokens, their spelling is text."""
    token = (yield from reader.ahead()) == mark
    try:
        yield from reader.expect(mark)
    except (Broken, OutputOver):
        write("null")
        raise
    write('"')
    held = ""
    try:
        while held != mark and (atom := (yield from reader.char(mark))) != mark:
            held += atom
            spelling = next((at for at in range(len(held)) if mark.startswith(held[at:])), len(held))
            certain = len(held) if token else spelling
            write(spelled(held[:certain])[1:-1])
            held = held[certain:]
    finally:
        write(f'{spelled("" if held == mark else held)[1:-1]}"')


def string(reader: Reader) -> Script[str]:
    """The value of the next string, after white space."""
    yield from reader.expect('"')
    raw: list[str] = []
    yield from _quoted(reader, raw.append, '"')
    return text_of("".join(raw)) or ""


def text_of(raw: str) -> str | None:
    """The value of a string in quotes; None if it is invalid."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def object_of(text: str) -> str:
    """The JSON of the object that is all of ``text``; its end may be missing. Raises :class:`Broken` for all else."""
    reader, written = Reader(text), list[str]()
    try:
        for _ in chain(value(reader, written.append), reader.ahead()):
            raise AssertionError("all of the text is known")
    except OutputOver:
        if text.lstrip().startswith("{"):
            return "".join(written)
    raise Broken


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
