"""The formats of a model's tool calls and reasoning, recognised by its chat template, and the parser for one answer.

Models with another call format are parsed as their tokenizer declares (its ``response_template``), by transformers'
parser. Text and reasoning are emitted as they are generated; a call only when complete, since it is parsed as a whole.
The parser is fed one character at a time, so that its output does not depend on how the text was cut. If it raises, the
text is passed on unparsed, and so is the rest.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from foresay.server.catalog.formats import FORMATS, REASONING, TAG, TOOLS_VARIABLES, ToolFormat
from foresay.server.settings.config import ReasoningParser, ToolParser
from foresay.server.text.parsers.formats import begun, messages, output
from foresay.server.text.parsers.parser import ParsedAnswer, ScriptParser
from foresay.server.text.parsers.script import Broken, object_of
from foresay.server.text.parts import OutputParser, Part, PlainText, ReasoningPart, TextPart, ToolCallPart
from foresay.spec.errors import InvalidRequest, inside

if TYPE_CHECKING:
    from foresay.server.schemas.chat import ChatRequest
    from foresay.server.text.conversation import Offer
    from foresay.server.text.tokenizer import Tokenizer

CALLS = "tool_calls"
#: The call format of models whose template has no tools: :func:`foresay.server.text.conversation.spelled_out`.
GENERIC = "hermes"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")

Event = dict[str, Any]


class Regions(Protocol):
    """transformers' ``ResponseParser``."""

    initial_events: list[Event]

    def feed(self, text: str) -> list[Event]:
        """Take more text; returns events."""

    def finalize(self) -> tuple[dict[str, Any], list[Event]]:
        """The output has ended: the message, and the last events."""


class DeclaredParser:
    """An :class:`~foresay.server.text.parts.OutputParser` around transformers' parser.

    markers: special tokens by id, which the declaration may use. identify: gives call number i its id. calls: whether
    any may be made; parallel: whether more than one.
    """

    heading = False

    def __init__(
        self,
        regions: Regions,
        markers: Mapping[int, str],
        identify: Callable[[int], str],
        calls: bool = True,
        parallel: bool = True,
    ) -> None:
        self.complete = False
        self._regions, self._tags, self._identify = regions, markers, identify
        self._may_call, self._parallel = calls, parallel
        self._field: str | None = None
        self._pending = ""  # read, but not emitted yet
        self._called = 0
        self._lost = False
        for event in regions.initial_events:
            self._enter(event)

    @property
    def markers(self) -> frozenset[int]:
        return frozenset(self._tags)

    @property
    def thinking(self) -> bool:
        return self._field in THOUGHTS

    def feed(self, text: str) -> list[Part]:
        return [part for character in text for part in self._read(character)]

    def marker(self, token: int) -> list[Part]:
        return self._read(self._tags[token])

    def flush(self) -> list[Part]:
        return [] if self._lost else self._parsed(lambda: self._regions.finalize()[1])

    def _read(self, text: str) -> list[Part]:
        if self.complete:
            return []
        if self._lost:
            return [TextPart(text)]
        self._pending += text
        return self._parsed(lambda: self._regions.feed(text))

    def _parsed(self, events: Callable[[], Iterable[Event]]) -> list[Part]:
        try:
            return [part for event in events() for part in self._parts(event)]
        except (Broken, ValueError, TypeError, KeyError, AttributeError):
            self._lost = True
            return [TextPart(self._pending)] if self._pending else []

    def _parts(self, event: Event) -> list[Part]:
        self._enter(event)
        kind, field = event["type"], event["field"]
        if field == CALLS:
            return self._calls(event["value"]) if kind == "region_close" else []
        if kind == "region_chunk":
            text = str(event["text"])
            self._pending = self._pending.partition(text)[2]
            return [ReasoningPart(text) if field in THOUGHTS else TextPart(text)]
        if field in THOUGHTS:
            self._pending = ""
        return []

    def _enter(self, event: Event) -> None:
        self._field = None if event["type"] == "region_close" else event["field"]

    def _calls(self, value: Any) -> list[Part]:
        """The calls of a region, or its text if none may be made."""
        calls = value if isinstance(value, list) else [value]
        made: list[Part] = [TextPart(self._pending)]
        if self._may_call:
            made = [self._call(call["function"]) for call in (calls if self._parallel else calls[:1])]
        self._pending = ""
        return made

    def _call(self, function: Mapping[str, Any]) -> Part:
        arguments = function["arguments"]
        text = object_of(arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
        index, self._called, self.complete = self._called, self._called + 1, not self._parallel
        return ToolCallPart(index=index, id=self._identify(index), name=str(function["name"]), arguments=text)


_ALPHANUMERIC = string.ascii_letters + string.digits


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of one model's output, and what its chat template supports.

    calls: name of the format of its tool calls; None if unknown. form: how answers are written. thinks: the tags around
    its reasoning; None if it does not reason. markers: tags that are single special tokens, by id. words: every name in
    the template's code. declared: makes the parser that the tokenizer itself declares, from the prompt, the request's
    id and the offered tools; None: our own parsers are used.
    """

    calls: str | None = None
    form: ToolFormat = ToolFormat()
    thinks: tuple[str, str] | None = None
    markers: dict[int, str] = {}
    words: frozenset[str] = frozenset()
    declared: Callable[[str, str, Offer], OutputParser] | None = None
    generic: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: ToolParser = "auto", thoughts: ReasoningParser = "auto") -> ChatFormat:
        """Recognise it by the template, unless the settings name a format."""
        template = tokenizer.templates
        signs = {name: form.signs or (form.begins,) for name, form in FORMATS.items()}
        shown = (name for name in signs if any(sign in template for sign in signs[name]))
        words = _words(template)
        calls = next(shown, None) if tools == "auto" else tools if tools in FORMATS else None
        declares = tools == "response_template" or (tools == "auto" and calls is None and tokenizer.declares_output)
        lists = not words.isdisjoint(TOOLS_VARIABLES)
        generic = not lists and not declares and tools in ("auto", GENERIC) and calls in (None, GENERIC)
        calls = GENERIC if generic else calls
        form = FORMATS[calls] if calls else ToolFormat()
        if tools == "none":  # text is on channels whether or not calls are read
            form = next((FORMATS[name] for name in shown if FORMATS[name].channels), form)
        around = (tags for tags in REASONING.values() if any(tag in template for tag in tags))
        thinks = form.thinks or next(around, None) if thoughts == "auto" else REASONING.get(thoughts)
        tags = (*form.control, *TAG.findall("".join(thinks or ())))
        markers = {id: tag for tag in tags if (id := tokenizer.special_id(tag)) is not None}
        declared = _declared(tokenizer) if declares else None
        return cls(
            calls=calls, form=form, thinks=thinks, markers=markers, words=words, declared=declared, generic=generic
        )

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
        if offer.required and self.declared is not None:
            raise InvalidRequest("tool_choice", "this server cannot make this model call tools; tool_choice auto works")
        if offer.listed and self.calls is None and self.declared is None:
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
        if self.declared is not None:
            return self.declared(prompt, request_id, offer)
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


def _declared(tokenizer: Tokenizer) -> Callable[[str, str, Offer], OutputParser]:
    tokenizer.output_regions("", ())  # an invalid declaration is an error now, not with every request
    special = sorted(tokenizer.special_ids)
    markers = dict(zip(special, tokenizer.token_strings(special), strict=True))

    def parser(prompt: str, request_id: str, offer: Offer) -> OutputParser:
        regions = tokenizer.output_regions(prompt, offer.rendered())
        identify = partial(_id, request_id, *ToolFormat().id)
        return DeclaredParser(regions, markers, identify, bool(offer.functions), offer.parallel)

    return parser


def _words(template: str) -> frozenset[str]:
    """Every word in the template's code, including strings."""
    blocks = re.findall(r"\{[{%].*?[%}]\}", template, re.DOTALL)
    return frozenset(re.findall(r"\w+", " ".join(blocks)))


def _id(request_id: str, prefix: str, length: int, index: int) -> str:
    """A call's id, derived from the request's, so that an answer always has the same ids."""
    digest = blake2b(f"{request_id}:{index}".encode(), digest_size=length).digest()
    return prefix + "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest)
