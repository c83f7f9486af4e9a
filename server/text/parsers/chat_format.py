"""The format of a model's tool calls and reasoning, recognised by its chat template; and the scripts that read what an
entry of :mod:`foresay.server.catalog.formats` describes: calls within text, and, for gpt-oss, messages, each on a
channel, between tokens (Harmony). There the prompt ends after the first role.

::

    assistant<|channel|>analysis<|message|>They ask for the weather.<|end|>                                reasoning
    <|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>                                   text
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>It is warm.<|return|>                                     text

A message's recipient may also come before the channel. Only special tokens are tags: text that spells one is text.
"""

from __future__ import annotations

import re
import string
from functools import cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from foresay.server.catalog.formats import FORMATS, PLACEHOLDER, REASONING, TAG, TOOLS_VARIABLES, ToolFormat, Way
from foresay.server.settings.config import ReasoningParser, ToolParser
from foresay.server.text.parsers.parameters import PIECES, head_of, parameters, word_of
from foresay.server.text.parsers.script import (
    Broken,
    Call,
    OutputOver,
    ParsedAnswer,
    Reader,
    Script,
    ScriptParser,
    text_before,
)
from foresay.server.text.parsers.values import arguments, json_call
from foresay.server.text.parts import OutputParser, PlainText
from foresay.spec.errors import InvalidRequest, inside

if TYPE_CHECKING:
    from foresay.server.schemas.chat import ChatRequest
    from foresay.server.text.conversation import Offer
    from foresay.server.text.tokenizer import Tokenizer

_KEY_OF_NAME = re.compile(r'"(\w+)": "\{name\}"')


def output(
    form: ToolFormat, thinks: tuple[str, str] | None, opened: bool, reader: Reader, answer: ParsedAnswer
) -> Script[None]:
    """Reasoning between the tags in ``thinks``, which may be ``opened``, and text with calls if functions were offered.

    Only the beginning can be reasoning, unless one of the format's tags around text begins it: a later tag is text.
    """
    begins = _begins(form, answer.free) if answer.offered else ()
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


@cache
def _begins(form: ToolFormat, free: bool) -> tuple[str, ...]:
    """The tags at which calls begin: the format's, and the one that follows it, if calls may lack the first."""
    heads = [PIECES.findall(head_of(way).removeprefix(form.begins))[:1] for way in form.ways if free]
    return tuple(filter(None, (form.begins, *(tag for tags in heads for tag in tags if tag.startswith("<")))))


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


# -- which format ------------------------------------------------------------------------------------------------------

#: The call format of models whose template has no tools: :func:`foresay.server.text.conversation.spelled_out`.
GENERIC = "hermes"

_ALPHANUMERIC = string.ascii_letters + string.digits


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of one model's output, and what its chat template supports.

    calls: name of the format of its tool calls; None if unknown. form: how answers are written. thinks: the tags around
    its reasoning; None if it does not reason. markers: tags that are single special tokens, by id. words: every name in
    the template's code. generic: the template has no tools, which are described in a general way.
    """

    calls: str | None = None
    form: ToolFormat = ToolFormat()
    thinks: tuple[str, str] | None = None
    markers: dict[int, str] = {}
    words: frozenset[str] = frozenset()
    generic: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: ToolParser = "auto", thoughts: ReasoningParser = "auto") -> ChatFormat:
        """Recognise it by the template, unless the settings name a format."""
        template = tokenizer.templates
        signs = {name: form.signs or (form.begins,) for name, form in FORMATS.items()}
        shown = (name for name in signs if any(sign in template for sign in signs[name]))
        words = _words(template)
        calls = next(shown, None) if tools == "auto" else tools if tools in FORMATS else None
        lists = not words.isdisjoint(TOOLS_VARIABLES)
        generic = not lists and tools in ("auto", GENERIC) and calls in (None, GENERIC)
        calls = GENERIC if generic else calls
        form = FORMATS[calls] if calls else ToolFormat()
        if tools == "none":  # text is on channels whether or not calls are read
            form = next((FORMATS[name] for name in shown if FORMATS[name].channels), form)
        around = (tags for tags in REASONING.values() if any(tag in template for tag in tags))
        thinks = form.thinks or next(around, None) if thoughts == "auto" else REASONING.get(thoughts)
        tags = (*form.control, *TAG.findall("".join(thinks or ())))
        markers = {id: tag for tag in tags if (id := tokenizer.special_id(tag)) is not None}
        return cls(calls=calls, form=form, thinks=thinks, markers=markers, words=words, generic=generic)

    @property
    def lists_tools(self) -> bool:
        """Whether the template has tools."""
        return not self.words.isdisjoint(TOOLS_VARIABLES)

    def check(self, request: ChatRequest, offer: Offer) -> None:
        """Raise for what the template would silently leave out."""
        if offer.listed and not self.lists_tools and not self.generic:
            raise InvalidRequest(
                "tools",
                "this model's chat template does not support tools: leave --tool-parser at auto, choose a model whose "
                "template does, such as Qwen3 (docs/agents.md), or send tool_choice none",
            )
        if offer.listed and self.calls is None:
            raise InvalidRequest("tools", "this server cannot read this model's tool calls; see --tool-parser")
        if request.reasoning_effort is not None and "reasoning_effort" not in self.words:
            raise InvalidRequest("reasoning_effort", "", "this model's chat template does not support ")
        for index, message in enumerate(() if self.generic else request.messages):
            with inside("messages", index):
                if message.tool_calls and "tool_calls" not in self.words:
                    raise InvalidRequest("tool_calls", "this model's chat template does not support tool calls")
                if message.role == "tool" and not self.words & {"tool", "tool_calls"}:
                    raise InvalidRequest("role", "this model's chat template does not support messages of role tool")

    def parser(self, request_id: str, offer: Offer, opened: bool, prompt: str = "", free: bool = True) -> OutputParser:
        """The parser of one answer. offer: the tools. opened: whether the prompt ends inside reasoning. free: whether
        the answer is whole and held to no grammar, so that calls may lack tags."""
        form = self.form
        answer = ParsedAnswer(partial(_id, request_id, *form.id), offer.schemas, offer.parallel, free)
        if form.channels:
            script = partial(messages, begun(prompt), self.thinks is not None)
            return ScriptParser(answer, script, self.markers)
        around = (*form.wraps, *form.ends, *TAG.findall("".join(self.thinks or ())))
        tags = (*(form.tags if offer.functions else ()), *around)
        if not any(tags):
            return PlainText()
        markers = {token: tag for token, tag in self.markers.items() if tag in tags}
        return ScriptParser(answer, partial(output, form, self.thinks, opened), markers)

    def opened_by(self, prompt: str, continues: bool) -> bool:
        """Whether ``prompt`` ends inside reasoning. continues: the answer continues its last message."""
        if self.thinks is None:
            return False
        opens, closes = self.thinks
        return prompt.rfind(opens) > prompt.rfind(closes) if continues else prompt.rstrip().endswith(opens)


def _words(template: str) -> frozenset[str]:
    """Every word in the template's code, including strings."""
    blocks = re.findall(r"\{[{%].*?[%}]\}", template, re.DOTALL)
    return frozenset(re.findall(r"\w+", " ".join(blocks)))


def _id(request_id: str, prefix: str, length: int, index: int) -> str:
    """A call's id, derived from the request's, so that an answer always has the same ids."""
    digest = blake2b(f"{request_id}:{index}".encode(), digest_size=length).digest()
    return prefix + "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest)
