"""The parser of the formats in :mod:`foresay.server.catalog.formats` in which calls are within text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from foresay.server.catalog.formats import PLACEHOLDER, TAG, ToolFormat, Way
from foresay.server.text.parsers.parameters import PIECES, head_of, parameters, word_of
from foresay.server.text.parsers.parser import Call, ParsedAnswer, arguments, json_call
from foresay.server.text.parsers.script import Broken, OutputOver, Reader, Script, text_before

_KEY_OF_NAME = re.compile(r'"(\w+)": "\{name\}"')


def output(
    form: ToolFormat, thinks: tuple[str, str] | None, opened: bool, reader: Reader, answer: ParsedAnswer
) -> Script[None]:
    """Reasoning between the tags in ``thinks``, which may be ``opened``, and text with calls if functions were offered.

    Only the beginning can be reasoning, unless one of the format's tags around text begins it: a later tag is text.
    """
    begins = tuple(_begins(form, answer)) if answer.offered else ()
    if thinks and (opened or (yield from _passed(reader, thinks[0]))):
        yield from _thought(form, thinks, begins, reader, answer)
    tags = (*form.wraps, *form.ends, *begins)
    if begins and form.alone and answer.free:
        yield from answer.alone(reader, partial(_alone, form.ways[0], answer))
    called = begins and form.bare and (yield from _calls(form, form.begins, reader, answer))
    while not answer.full:
        tag = yield from text_before(reader, answer.text, tags, trim=bool(called))
        name = tag.strip()
        if name in form.ends:
            return
        if name not in form.wraps:
            called = yield from _calls(form, name, reader, answer)
            if not called:
                answer.text(tag)
        elif thinks and thinks[0].startswith(name) and (yield from _passed(reader, thinks[0].removeprefix(name))):
            answer.apart()
            yield from _thought(form, thinks, begins, reader, answer)


def _begins(form: ToolFormat, answer: ParsedAnswer) -> Iterator[str]:
    """The tags at which calls begin: the format's, and the one that follows it, if calls may lack the first."""
    if form.begins:
        yield form.begins
    for way in form.ways if answer.free else ():
        piece, *_ = [*PIECES.findall(head_of(way).removeprefix(form.begins)), ""]
        if piece.startswith("<"):
            yield piece


def _passed(reader: Reader, tag: str) -> Script[bool]:
    """Skip ``tag``, if that follows; output that ends inside it does not."""
    return (yield from reader.passed_over(tag, unless=(Broken, OutputOver)))


def _thought(
    form: ToolFormat, thinks: tuple[str, str], begins: tuple[str, ...], reader: Reader, answer: ParsedAnswer
) -> Script[None]:
    """Reasoning up to its end; where the end is a tag that may be around any text, up to a call that lacks it, too."""
    answer.thinking = True
    ends = (thinks[1], *begins) if thinks[1] in form.wraps else thinks[1:]
    tag = yield from text_before(reader, answer.reasoning, ends, trim=True)
    answer.thinking = False
    if tag.strip() in begins:
        reader.unread(tag.strip())
    yield from reader.ahead()


def _calls(form: ToolFormat, tag: str, reader: Reader, answer: ParsedAnswer) -> Script[bool]:
    """Consecutive calls behind ``tag``, written in one of the ways; returns whether there was one."""
    for way in form.ways:
        if (yield from _in_a_row(form, way, tag, reader, answer)):
            return True
    return False


def _in_a_row(form: ToolFormat, way: Way, tag: str, reader: Reader, answer: ParsedAnswer) -> Script[bool]:
    known = answer.offered if form.bare or tag != form.begins else None
    each, closes = way.call.partition("{")[0], way.call.rpartition("}")[2]
    before = head_of(way)
    before = before.partition(tag)[2] if tag in before else before
    called = more = yield from answer.attempt(reader, partial(_call, way, answer, before, False), known)
    while more:
        yield from _passed_over(reader, closes)
        following = partial(_call, way, answer, way.between + each, form.bare)
        more = not answer.full and (yield from answer.attempt(reader, following, known))
    if called:
        yield from _passed_over(reader, way.closes)
    return called


def _alone(way: Way, answer: ParsedAnswer, reader: Reader, call: Call) -> Script[None]:
    """A call that is an object without tags before it, perhaps in a fence."""
    fence = yield from reader.passed_over("```")
    if fence:
        yield from reader.passed_over("json")
    yield from json_call(reader, call, _KEY_OF_NAME.findall(way.call)[0], answer.offered)
    if fence:
        yield from reader.expect("```")
    for piece in PIECES.findall(way.call.rpartition("}")[2]):
        yield from _passed(reader, piece)


def _passed_over(reader: Reader, text: str) -> Script[None]:
    for piece in PIECES.findall(text):
        yield from reader.passed_over(piece)


def _call(way: Way, answer: ParsedAnswer, before: str, may_lack: bool, reader: Reader, call: Call) -> Script[None]:
    """A call after ``before``. may_lack: pieces of ``before`` may be missing."""
    for piece in PIECES.findall(before):
        if not may_lack or (yield from reader.ahead()) == piece:
            yield from reader.expect(piece)
    if key := _KEY_OF_NAME.search(way.call):
        yield from json_call(reader, call, key[1])
    else:
        yield from _in_order(way, answer, reader, call)


def _in_order(way: Way, answer: ParsedAnswer, reader: Reader, call: Call) -> Script[None]:
    """A call whose name comes before its arguments."""
    before, *rest = PLACEHOLDER.split(way.call)
    name = ""
    for part, text in zip(rest[::2], rest[1::2], strict=True):
        if part == "parameters":
            call.named(name)
            return (yield from parameters(way, answer, reader, call))
        if part == "arguments":
            call.named(name)
            yield from arguments(reader, call, way.quote)
            return call.close()
        word = yield from word_of(reader)
        if part == "name":
            name, *number = word.rpartition(text) if text == ":" else (word,)
            reader.unread(*"".join(number))
        else:
            call.id = word if part == "id" else f"{TAG.sub('', before)}{name}:{word}"
        for piece in PIECES.findall(text):
            yield from reader.expect(piece)
        if not text:  # the arguments follow at once
            reader.unread(following := (yield from reader.read()))
            if following not in ("{", "(" if way.quote else "{"):
                raise Broken
