"""The parser of all formats in :mod:`foresay.server.catalog.formats`: text with calls, or messages on channels."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from foresay.server.catalog.formats import PLACEHOLDER, TAG, ToolFormat, Way
from foresay.server.text.parsers.parser import Call, ParsedAnswer, arguments, json_call
from foresay.server.text.parsers.script import (
    Broken,
    OutputOver,
    Reader,
    Script,
    marked,
    meant,
    spelled,
    text_before,
    value,
)

_PIECES = re.compile(r"<[^<>]+>?|\[[A-Z_]+\]|```\w*|\S")
_KEY_OF_NAME = re.compile(r'"(\w+)": "\{name\}"')


def output(
    form: ToolFormat, thinks: tuple[str, str] | None, opened: bool, reader: Reader, answer: ParsedAnswer
) -> Script[None]:
    """Reasoning between the tags in ``thinks``, which may be ``opened``, and text with calls if functions were offered.

    Only the beginning can be reasoning, unless one of the format's tags around text begins it: a later tag is text.
    """
    begins = (form.begins,) if form.begins and answer.offered else ()
    if thinks and (opened or (yield from _passed(reader, thinks[0]))):
        yield from _thought(form, thinks, begins, reader, answer)
    tags = (*form.wraps, *form.ends, *begins)
    called = begins and form.bare and (yield from _calls(form, reader, answer))
    while not answer.full:
        tag = yield from text_before(reader, answer.text, tags, trim=bool(called))
        name = tag.strip()
        if name in form.ends:
            return
        if name not in form.wraps:
            called = yield from _calls(form, reader, answer)
            if not called:
                answer.text(tag)
        elif thinks and thinks[0].startswith(name) and (yield from _passed(reader, thinks[0].removeprefix(name))):
            answer.apart()
            yield from _thought(form, thinks, begins, reader, answer)


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


def _calls(form: ToolFormat, reader: Reader, answer: ParsedAnswer) -> Script[bool]:
    """Consecutive calls, written in one of the ways; returns whether there was one."""
    for way in form.ways:
        if (yield from _in_a_row(form, way, reader, answer)):
            return True
    return False


def _in_a_row(form: ToolFormat, way: Way, reader: Reader, answer: ParsedAnswer) -> Script[bool]:
    known = answer.offered if form.bare else None
    each, closes = way.call.partition("{")[0], way.call.rpartition("}")[2]
    before = (way.opens + each).removeprefix(form.begins)
    called = more = yield from answer.attempt(reader, partial(_call, way, answer, before, False), known)
    while more:
        yield from _passed_over(reader, closes)
        following = partial(_call, way, answer, way.between + each, form.bare)
        more = not answer.full and (yield from answer.attempt(reader, following, known))
    if called:
        yield from _passed_over(reader, way.closes)
    return called


def _passed_over(reader: Reader, text: str) -> Script[None]:
    for piece in _PIECES.findall(text):
        yield from reader.passed_over(piece)


def _call(way: Way, answer: ParsedAnswer, before: str, may_lack: bool, reader: Reader, call: Call) -> Script[None]:
    """A call after ``before``. may_lack: pieces of ``before`` may be missing."""
    for piece in _PIECES.findall(before):
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
            return (yield from _parameters(way, _PIECES.findall(text)[0], answer, reader, call))
        if part == "arguments":
            call.named(name)
            yield from marked(reader, call.write, way.quote) if way.quote else arguments(reader, call)
            return call.close()
        word = yield from _word(reader)
        if part == "name":
            name, *number = word.rpartition(text) if text == ":" else (word,)
            reader.unread(*"".join(number))
        else:
            call.id = word if part == "id" else f"{TAG.sub('', before)}{name}:{word}"
        for piece in _PIECES.findall(text):
            yield from reader.expect(piece)
        if not text:  # the arguments follow at once
            reader.unread(following := (yield from reader.read()))
            if following not in ("{", "(" if way.quote else "{"):
                raise Broken


def _word(reader: Reader) -> Script[str]:
    """The name of a function, or an id."""
    word, atom = "", (yield from reader.solid())
    while len(atom) == 1 and (atom.isalnum() or atom in "_-.:/"):
        word += atom
        atom = yield from reader.read()
    reader.unread(atom)
    if not word:
        raise Broken
    return word


# -- parameters one by one ---------------------------------------------------------------------------------------------


def _parameters(way: Way, end: str, answer: ParsedAnswer, reader: Reader, call: Call) -> Script[None]:
    """All parameters up to ``end``, emitted as an object."""
    opening, _, between, _, closing = PLACEHOLDER.split(way.parameter)
    schemas = answer.parameters_of(call.name or "")
    before = "{"
    while (yield from _another(reader, opening, end)):
        key = yield from _until(reader, _PIECES.findall(between))
        if not (opening or key.isidentifier()):
            raise Broken
        call.write(f"{before}{spelled(key)}: ")
        before = ", "
        if opening:
            yield from _value(reader, call, closing.strip(), between.endswith("\n"), schemas.get(key))
        else:
            yield from value(reader, call.write, python=True)
    call.write("}" if before == ", " else "{}")


def _another(reader: Reader, opening: str, end: str) -> Script[bool]:
    if opening:
        return (yield from reader.one_of((opening, end))) != end
    char = yield from reader.solid()
    if char == ",":
        char = yield from reader.solid()
    if char != end:
        reader.unread(char)
    return char != end


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


def _value(reader: Reader, call: Call, end: str, padded: bool, schema: Any) -> Script[None]:
    """The text up to ``end``; streamed if it is certainly a string. padded: without the line ends next to it."""
    streams = is_text(schema)
    ends = ("\n" + end, end) if padded else (end,)
    if streams:
        call.write('"')
    text, held = "", ""
    first = yield from reader.read()
    if first != "\n" or not padded:
        reader.unread(first)
    while not held.endswith(end):
        try:
            held += yield from reader.char(end)
        except OutputOver:
            call.write(spelled(held)[1:-1] if streams else text + held)
            raise
        certain = next(at for at in range(len(held) + 1) if any(one.startswith(held[at:]) for one in ends))
        if streams:
            call.write(spelled(held[:certain])[1:-1])
        text, held = text + held[:certain], held[certain:]
    call.write('"' if streams else meant(text))


def is_text(schema: Any) -> bool:
    """Whether a parameter with this schema is certainly a string, as one without a schema is."""
    known = isinstance(schema, dict) and any(
        key in schema for key in ("type", "anyOf", "oneOf", "enum", "const", "$ref")
    )
    return not known or schema.get("type") == "string"


# -- messages on channels ----------------------------------------------------------------------------------------------
# gpt-oss's answers: messages, each on a channel, between tokens (Harmony). The prompt ends after the first role.
#
# ::
#
#     assistant<|channel|>analysis<|message|>They ask for the weather.<|end|>                                reasoning
#     <|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>                                   text
#     <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>    a call
#     <|start|>assistant<|channel|>final<|message|>It is warm.<|return|>                                     text
#
# A message's recipient may also come before the channel. Only special tokens are tags: text that spells one is text.


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
    if to is not None and answer.offered and ("functions." in to[0] or to[1] in answer.offered):
        yield from answer.attempt(reader, partial(_channel_call, to[1]))
        return (yield from reader.read())
    answer.thinking = thinks and on is not None and on[1] == "analysis"
    emit = answer.reasoning if answer.thinking else answer.text
    while (atom := (yield from reader.read())) not in _AFTER:
        emit(atom)
    answer.thinking = False
    answer.apart()
    return atom


def _channel_call(name: str, reader: Reader, call: Call) -> Script[None]:
    """The body of a call, in any format."""
    call.named(name)
    while (atom := (yield from reader.read())) not in _AFTER:
        call.write(atom)
    reader.unread(atom)
    call.close()
