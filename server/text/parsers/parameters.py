"""A call's parameters one by one: text between tags, or Python's keywords."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Set
from functools import partial
from typing import Any

from foresay.server.catalog.formats import PLACEHOLDER, Way
from foresay.server.text.parsers.script import Broken, Call, OutputOver, ParsedAnswer, Reader, Script, text_before
from foresay.server.text.parsers.values import due, meant, spelled, value

PIECES = re.compile(r"<[^<>]+>?|\[[A-Z_]+\]|```\w*|\S")


def head_of(way: Way) -> str:
    """What is before the name of the first call."""
    return way.opens + way.call.partition("{")[0]


def word_of(reader: Reader) -> Script[str]:
    """The name of a function, or an id."""
    word, atom = "", (yield from reader.solid())
    while len(atom) == 1 and (atom.isalnum() or atom in "_-.:/"):
        word += atom
        atom = yield from reader.read()
    reader.unread(atom)
    if not word:
        raise Broken
    return word


class _Tags:
    """The tags of parameters. tail: those that may close the call; heads: those before another call's name."""

    def __init__(self, way: Way) -> None:
        self.opening, _, between, _, closing = PLACEHOLDER.split(way.parameter)
        self.between, self.closing = PIECES.findall(between), closing.strip()
        self.padded = between.endswith("\n")
        self.tail = tuple(PIECES.findall(way.call.rpartition("}")[2] + way.closes))
        self.heads = tuple(PIECES.findall(head_of(way)))


def parameters(way: Way, answer: ParsedAnswer, reader: Reader, call: Call) -> Script[None]:
    """All parameters up to what closes the call, emitted as an object."""
    tags, schemas, given = _Tags(way), answer.parameters_of(call.name or ""), set[str]()
    try:
        while (key := (yield from reader.whole(_key(tags, reader)))) is not None:
            call.write(f"{', ' if given else '{'}{spelled(key)}: ")
            given.add(key)
            if tags.opening:
                ends = partial(_end, tags, schemas.keys() - given, answer, reader)
                yield from _value(tags, ends, reader, call, schemas.get(key))
            else:
                yield from value(reader, call.write)
    finally:
        if given:
            call.write("}")
    call.close()


def _key(tags: _Tags, reader: Reader) -> Script[str | None]:
    """The name of the next parameter; None before a tag that closes the call."""
    if not tags.opening:
        if (yield from reader.ahead()) == ",":
            yield from reader.read()
        if (yield from reader.ahead()) == tags.tail[0]:
            return None
        key = yield from _until(reader, tags.between)
        yield from due(reader)
        if not key.isidentifier():
            raise Broken
        return key
    tag = tags.closing
    while tag == tags.closing:  # which may be there twice
        tag = yield from reader.one_of((tags.opening, tags.closing, *tags.tail))
    if tag == tags.opening:
        return (yield from _until(reader, tags.between))
    reader.unread(tag)
    return None


def _until(reader: Reader, tags: list[str]) -> Script[str]:
    """A name, up to the tags after it."""
    name = ""
    while (atom := (yield from reader.read())) not in (tags[0], tags[0][0]):
        if len(atom) > 1 or atom in "<\n":
            reader.unread(atom)
            raise Broken
        name += atom
    reader.unread(atom)
    for tag in tags:
        yield from reader.expect(tag)
    return name.strip()


def _value(
    tags: _Tags, ends: Callable[[str], Script[str | None]], reader: Reader, call: Call, schema: Any
) -> Script[None]:
    """The text of a parameter up to a tag that ``ends`` it; streamed if it is certainly a string."""
    text: list[str] = []
    streams = is_text(schema)
    emit = (lambda piece: call.write(spelled(piece)[1:-1])) if streams else text.append
    if streams:
        call.write('"')
    try:
        first = yield from reader.read()
        if first != "\n" or not tags.padded:
            reader.unread(first)
        rest = None
        while rest is None:
            found = yield from text_before(reader, emit, (tags.closing, tags.opening, *tags.tail))
            rest = yield from ends(found)
            emit(found if rest is None else rest)
    finally:
        call.write('"' if streams else meant("".join(text)))


def _end(tags: _Tags, others: Set[str], answer: ParsedAnswer, reader: Reader, found: str) -> Script[str | None]:
    """What is left of a value if the tag in ``found``, behind white space, ends it; None if it is text of the value.

    It ends at its closing tag, if what follows is none of its text; where that is missing, at the beginning of one of
    the ``others``, or where the call is closed and no such closing tag follows before the next call. The last two are
    left unread.
    """
    tag = found.lstrip()
    white = found.removesuffix(tag)
    line = white.removesuffix("\n")
    if tag == tags.closing:
        closed = yield from _closed(tags, reader)
        return (line if tags.padded else white) if closed else None
    if tag == tags.opening:
        name = yield from reader.seen(_until(reader, tags.between), "")
        more = "" if name in others and line != white else None
    else:
        more = yield from _beyond(tag, tags, answer, reader)
    if more:
        return found + more
    if more is None:
        return None
    reader.unread(tag)
    return line


def _closed(tags: _Tags, reader: Reader) -> Script[bool]:
    """Whether a closing tag, which was just read, is one: something follows that may follow it."""
    after = (tags.opening, tags.closing, *tags.tail, *tags.heads)
    return (yield from reader.seen(reader.one_of(after), over="")) is not None


def _beyond(tag: str, tags: _Tags, answer: ParsedAnswer, reader: Reader) -> Script[str | None]:
    """The rest of a value in which ``tag``, which could close the call, is text, as the value's closing tag shows; ""
    if it does close the call; None if it cannot, because of what follows."""
    after = (*tags.tail, *tags.heads)
    if tag != tags.tail[-1] and (yield from reader.seen(reader.one_of(after), over="")) is None:
        return None
    text: list[str] = []
    reader.mark(math.inf)
    try:
        while True:
            found = yield from text_before(reader, text.append, (tags.closing, *tags.heads))
            next_one = found.lstrip()
            if next_one == tags.closing and (yield from _closed(tags, reader)):
                reader.forget()
                white = found.removesuffix(next_one)
                return "".join(text) + (white.removesuffix("\n") if tags.padded else white)
            if next_one in tags.heads and (yield from reader.seen(_named(next_one, tags, answer, reader), over=True)):
                break
            text.append(found)
    except OutputOver:
        pass
    reader.rewind()
    return ""


def _named(head: str, tags: _Tags, answer: ParsedAnswer, reader: Reader) -> Script[bool]:
    """Whether another call begins with ``head``, which was read."""
    for piece in tags.heads[tags.heads.index(head) + 1 :]:
        yield from reader.expect(piece)
    return (yield from word_of(reader)) in answer.offered


def is_text(schema: Any) -> bool:
    """Whether a parameter with this schema is certainly a string, as one without a schema is."""
    known = isinstance(schema, dict) and any(
        key in schema for key in ("type", "anyOf", "oneOf", "enum", "const", "$ref")
    )
    return not known or schema.get("type") == "string"
