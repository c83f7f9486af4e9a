"""The format of a model's tool calls and reasoning, recognised by its chat template, and the parser for one answer."""

from __future__ import annotations

import re
import string
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from foresay.server.catalog.formats import FORMATS, REASONING, TAG, TOOLS_VARIABLES, ToolFormat
from foresay.server.settings.config import ReasoningParser, ToolParser
from foresay.server.text.parsers.formats import begun, messages, output
from foresay.server.text.parsers.parser import ParsedAnswer, ScriptParser
from foresay.server.text.parts import OutputParser, PlainText
from foresay.spec.errors import InvalidRequest, inside

if TYPE_CHECKING:
    from foresay.server.schemas.chat import ChatRequest
    from foresay.server.text.conversation import Offer
    from foresay.server.text.tokenizer import Tokenizer

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
