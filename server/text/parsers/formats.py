"""The scripts that read the formats in :mod:`foresay.server.catalog.formats`: calls within text, and, for gpt-oss,
messages, each on a channel, between tokens (Harmony). There the prompt ends after the first role.

::

    assistant<|channel|>analysis<|message|>They ask for the weather.<|end|>                                reasoning
    <|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>                                   text
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>It is warm.<|return|>                                     text

A message's recipient may also come before the channel. Only special tokens are tags: text that spells one is text.
"""

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


# -- messages on channels ----------------------------------------------------------------------------------------------

_START, _MESSAGE, _CALL = "<|start|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", "<|return|>", _CALL)
#: A message ends at these; it may lack its own end.
_AFTER = (*_ENDS, _START, "<|channel|>")
_ON = re.compile(r"<\|channel\|>\s*(\w+)")
_FOR = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def begun(prompt: str) -> str:
    """The beginning of the message that the answer continues; "" if it begins a new one."""
    tail = prompt.rpartition(_START)[2]
    return "" if any(tag in tail for tag in _ENDS) else tail


def messages(header: str, thinks: bool, reader: Reader, answer: ParsedAnswer) -> Script[None]:
    """Message by message, up to a call that must be the last. header: the result of :func:`begun`. thinks: whether
    reasoning is separated from text."""
    header, inside, _ = header.partition(_MESSAGE)
    while True:
        if not inside:
            header += yield from _header(reader, answer)
        end = yield from _message(header, thinks, reader, answer)
        if end == _CALL or answer.full:
            return
        header, inside = end, ""


def _header(reader: Reader, answer: ParsedAnswer) -> Script[str]:
    """A message's header. Output without any tag is text, unless it begins to name a recipient."""
    found = ""
    try:
        while (atom := (yield from reader.read())) != _MESSAGE:
            found += atom
            if atom in _ENDS:  # a message that never began
                body, found = found.removesuffix(atom).rpartition("|>")[2], ""
                if body:
                    answer.text(body)
            answer.heading = answer.heading or len(atom) > 1
    except OutputOver:
        if found and not answer.heading and not found.lstrip().startswith("to="):
            answer.text(found)
        raise
    answer.heading = False
    return found


def _message(header: str, thinks: bool, reader: Reader, answer: ParsedAnswer) -> Script[str]:
    """A message, and the tag after it."""
    on, to = _ON.search(header), _FOR.search(header)
    name = to[1] if to is not None and ("functions." in to[0] or to[1] in answer.offered) else ""
    if name and answer.offered and (yield from answer.attempt(reader, partial(_channel_call, name))):
        yield from reader.ahead()
    answer.thinking = thinks and on is not None and on[1] == "analysis"
    emit = answer.reasoning if answer.thinking else answer.text
    while (atom := (yield from reader.read())) not in _AFTER:
        emit(atom)
    answer.thinking = False
    answer.apart()
    return atom


def _channel_call(name: str, reader: Reader, call: Call) -> Script[None]:
    """The body of a call; without one it has no arguments."""
    call.named(name)
    if (yield from reader.ahead()) not in _AFTER:
        yield from arguments(reader, call)
    call.close()
