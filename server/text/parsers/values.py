"""Reading JSON and calls in it, a character at a time.

Valid JSON is passed on as it is. Read as well, and written as JSON: Python's literals, commas before a closing
bracket, bare keys and words, control characters in strings; and ``{city:<|"|>Paris<|"|>,days:3}``, as Gemma 4 writes,
where a string ends at its mark as it began, as a token or spelled, so that nothing has to be escaped in it.
Whatever ends a value, what was written of it is valid; only an unfinished key is left out.

Wherever a call ends, its arguments are the JSON of an object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from itertools import chain

import msgspec

from foresay.server.text.parsers.script import Broken, Call, OutputOver, Reader, Script

#: Models' names for the arguments.
ARGUMENTS = ("arguments", "parameters")

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


# -- calls -------------------------------------------------------------------------------------------------------------


def json_call(reader: Reader, call: Call, name: str, names: Collection[str] = ()) -> Script[None]:
    """``{"name": ..., "arguments": {...}}``: the keys in any order, other keys ignored. name: the name's key. names: if
    given, it has both keys and no others, and one of these names."""
    yield from reader.expect("{")
    following = ","
    while following == ",":
        yield from _entry(reader, call, name, names)
        following = yield from reader.solid()
    if following != "}" or (names and not call.given):
        reader.unread(following)
        raise Broken
    call.close()


def _entry(reader: Reader, call: Call, name: str, names: Collection[str]) -> Script[None]:
    key = yield from _one_of((name, *ARGUMENTS) if names else (), reader)
    yield from reader.expect(":")
    if key == name:
        call.named((yield from _one_of(names, reader)))
    elif key in ARGUMENTS and not call.given:
        yield from arguments(reader, call)
    else:
        yield from value(reader, lambda _: None)


def _one_of(texts: Collection[str], reader: Reader) -> Script[str]:
    """A string; if there are ``texts``, one of them."""
    if not texts:
        return (yield from string(reader))
    return (yield from reader.one_of(tuple(f'"{text}"' for text in texts)))[1:-1]


def arguments(reader: Reader, call: Call, mark: str = "") -> Script[None]:
    """Arguments: an object, streamed; or an object inside a string; or null for none. mark: see :func:`value`."""
    first = yield from reader.ahead()
    if first in ("{", mark and "("):
        yield from value(reader, call.write, mark)
        return
    raw: list[str] = []
    over = False
    try:
        yield from value(reader, raw.append)
    except OutputOver:
        over = True
    text = "".join(raw)
    if first == '"' and text != '""':
        call.write(object_of(text_of(text) or ""))
    elif text not in ('""', "null") and not over:
        raise Broken
    if over:
        raise OutputOver
