"""The ways in which families of models write their calls, each as a script.

::

    hermes   text <tool_call>{"name": "f", "arguments": {...}}</tool_call> text      Hermes, Qwen 2.5, Qwen 3
    llama3   {"name": "f", "parameters": {...}}; {...}    <|python_tag|>{...}        Llama 3.1 and later
    mistral  text [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]               Mistral up to tokenizer v7
             text [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}                   and since v11
"""

from __future__ import annotations

from collections.abc import Callable

from server.text.parsers.calls import Answer, Call, arguments, json_call
from server.text.parsers.script import Broken, Reader, Script, passed_over, text_before

CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def plain(reader: Reader, answer: Answer) -> Script[None]:
    """Only text."""
    while True:
        answer.text((yield from reader.read()))


def hermes(reader: Reader, answer: Answer) -> Script[None]:
    """An object between tags; text around the tags."""
    called = False
    while not answer.full:
        tag = yield from text_before(reader, answer.text, CALL, trim=called)
        called = yield from answer.attempt(reader, json_call)
        if called:
            yield from passed_over(reader, CALL_END)
        else:
            answer.text(tag)


def llama3(reader: Reader, answer: Answer) -> Script[None]:
    """Objects at the very beginning or behind the tag, with semicolons between them.

    Nothing marks such an object as a call but its name, which must be that of an offered function.
    """
    called = yield from _objects(reader, answer)
    while not answer.full:
        tag = yield from text_before(reader, answer.text, PYTHON, trim=called)
        called = yield from _objects(reader, answer)
        if not called:
            answer.text(tag)


def _objects(reader: Reader, answer: Answer) -> Script[bool]:
    """Calls in a row; whether there was one."""
    called = more = yield from answer.attempt(reader, json_call, answer.offered)
    while more and not answer.full:
        more = yield from answer.attempt(reader, _next_object, answer.offered)
    return called


def _next_object(reader: Reader, call: Call) -> Script[None]:
    following = yield from reader.solid()
    if following != ";":
        reader.unread(following)
    yield from json_call(reader, call)


def mistral(reader: Reader, answer: Answer) -> Script[None]:
    """An array of objects behind the tag, or the name and then the arguments."""
    called = False
    while not answer.full:
        tag = yield from text_before(reader, answer.text, TOOL_CALLS, trim=called)
        called = (yield from answer.attempt(reader, _named_call)) or (yield from _array(reader, answer))
        if not called:
            answer.text(tag)


def _array(reader: Reader, answer: Answer) -> Script[bool]:
    """An array of calls; whether there was one in it."""
    called = more = yield from answer.attempt(reader, _element("["))
    while more and not answer.full:
        more = yield from answer.attempt(reader, _element(","))
    if called:
        yield from passed_over(reader, "]")
    return called


def _element(before: str) -> Callable[[Reader, Call], Script[None]]:
    """A call in an array, behind what comes before it."""

    def read(reader: Reader, call: Call) -> Script[None]:
        yield from reader.expect(before)
        yield from json_call(reader, call)

    return read


def _named_call(reader: Reader, call: Call) -> Script[None]:
    """``f[ARGS]{...}``, ``f[CALL_ID]id[ARGS]{...}`` or ``f{...}``."""
    name, mark = yield from _word(reader)
    if mark == CALL_ID:
        call.id, mark = yield from _word(reader)
    if mark not in (ARGS, "{"):
        raise Broken
    call.named(name)
    yield from arguments(reader, call)


def _word(reader: Reader) -> Script[tuple[str, str]]:
    """A name, and what ends it: a tag, as one marker or spelled out, or an opening brace, which is unread."""
    word, atom = "", (yield from reader.solid())
    while len(atom) == 1 and (atom.isalnum() or atom in "_-.:/"):
        word += atom
        atom = yield from reader.read()
    if not word:
        raise Broken
    if atom == "[":
        while not atom.endswith("]"):
            atom += yield from reader.char()
    elif atom == "{":
        reader.unread(atom)
    return word, atom
