"""gpt-oss's answers: messages, each on a channel, between tokens (Harmony). The prompt ends after the first role.

::

    assistant<|channel|>analysis<|message|>They ask for the weather.<|end|>                                reasoning
    <|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>                                   text
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>It is warm.<|return|>                                     text

A message's recipient may also come before the channel. Only special tokens are tags: text that spells one is text.
"""

from __future__ import annotations

import re
from functools import partial

from foresay.server.text.parsers.parser import Call, ParsedAnswer, arguments
from foresay.server.text.parsers.script import OutputOver, Reader, Script

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
