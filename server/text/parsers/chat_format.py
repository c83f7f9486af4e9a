"""Which way of writing calls and reasoning a model has, read off its chat template, and the parser for one answer."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from server.settings.config import ReasoningParser, ToolParser
from server.text.parsers import formats, xml_calls
from server.text.parsers.calls import Answer
from server.text.parsers.declared import DeclaredParser
from server.text.parsers.parser import TAGS, Format, ScriptParser, opened_by
from server.text.parts import OutputParser, PlainText
from spec.errors import InvalidRequest

if TYPE_CHECKING:
    from server.schemas.chat import ChatRequest
    from server.text.tokenizer import Tokenizer
    from server.text.tools import Offer

_ALPHANUMERIC = string.ascii_letters + string.digits


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A way of writing calls. tags: those that may be single special tokens. signs: a template that holds one of these
    is of this format. id: prefix and length of the ids of calls.
    """

    script: Format
    tags: tuple[str, ...]
    signs: tuple[str, ...]
    id: tuple[str, int] = ("call_", 24)


#: By name; the first whose sign the template holds is the one.
FORMATS: dict[str, ToolFormat] = {
    "mistral": ToolFormat(
        script=formats.mistral,
        tags=(formats.TOOL_CALLS, formats.CALL_ID, formats.ARGS),
        signs=(formats.TOOL_CALLS,),
        id=("", 9),
    ),
    "qwen3_coder": ToolFormat(script=xml_calls.xml, tags=(formats.CALL, formats.CALL_END), signs=(xml_calls.FUNCTION,)),
    "hermes": ToolFormat(script=formats.hermes, tags=(formats.CALL, formats.CALL_END), signs=(formats.CALL,)),
    "llama3": ToolFormat(script=formats.llama3, tags=(formats.PYTHON,), signs=(formats.PYTHON, "Environment: ipython")),
}


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How one model writes, and what its chat template understands.

    calls: name of the format of its tool calls; None: none that is known. thinks: the tags around its reasoning; None:
    it does not reason. markers: tags that are single special tokens, by id. words: every name in the template's code.
    declared: makes the parser that the tokenizer itself declares, from the prompt, the request's id and what it offers;
    None: ours are used.
    """

    calls: str | None = None
    thinks: tuple[str, str] | None = None
    markers: dict[int, str] = {}
    words: frozenset[str] = frozenset()
    declared: Callable[[str, str, Offer], OutputParser] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: ToolParser = "auto", thoughts: ReasoningParser = "auto") -> ChatFormat:
        """What the template shows, unless the settings name it."""
        template = tokenizer.templates
        calls = _calls(template) if tools == "auto" else tools if tools in FORMATS else None
        declares = tools == "response_template" or (tools == "auto" and calls is None and tokenizer.declares_output)
        thinks = _thinks(template) if thoughts == "auto" else None if thoughts == "none" else TAGS[0]
        tags = (*(FORMATS[calls].tags if calls else ()), *(thinks or ()))
        special = {tag: tokenizer.special_id(tag) for tag in tags}
        markers = {token: tag for tag, token in special.items() if token is not None}
        declared = _declared(tokenizer) if declares else None
        return cls(calls=calls, thinks=thinks, markers=markers, words=_words(template), declared=declared)

    def check(self, request: ChatRequest, offer: Offer) -> None:
        """Raise for what the template would leave out in silence."""
        if offer.listed and "tools" not in self.words:
            raise InvalidRequest("tools", "this model's chat template does not know tools; only tool_choice none works")
        if offer.required and self.declared is not None:
            raise InvalidRequest("tool_choice", "this server cannot make this model call tools; tool_choice auto works")
        if offer.listed and self.calls is None and self.declared is None:
            raise InvalidRequest("tools", "this server cannot read this model's tool calls; see --tool-parser")
        if request.reasoning_effort is not None and "reasoning_effort" not in self.words:
            raise InvalidRequest("reasoning_effort", "this model's chat template does not know reasoning_effort")
        for index, message in enumerate(request.messages):
            place = f"messages[{index}]"
            if message.tool_calls and "tool_calls" not in self.words:
                raise InvalidRequest(f"{place}.tool_calls", "this model's chat template does not know tool calls")
            if message.role == "tool" and not self.words & {"tool", "tool_calls"}:
                raise InvalidRequest(f"{place}.role", "this model's chat template does not know messages of role tool")

    def parser(self, request_id: str, offer: Offer, opened: bool, prompt: str = "") -> OutputParser:
        """For one answer. offer: what the model may call. opened: whether the prompt ends inside reasoning."""
        if self.declared is not None:
            return self.declared(prompt, request_id, offer)
        form = FORMATS[self.calls] if self.calls is not None and offer.functions else None
        if form is None and self.thinks is None:
            return PlainText()
        tags = (*(form.tags if form else ()), *(self.thinks or ()))
        markers = {token: tag for token, tag in self.markers.items() if tag in tags}
        answer = Answer(_identify(request_id, *(form.id if form else ("", 0))), offer.schemas, offer.parallel)
        return ScriptParser(answer, form.script if form else formats.plain, markers, self.thinks, opened)

    def opened_by(self, prompt: str, continues: bool) -> bool:
        """Whether ``prompt`` ends inside reasoning."""
        return self.thinks is not None and opened_by(prompt, self.thinks, continues)


def _calls(template: str) -> str | None:
    found = (name for name, form in FORMATS.items() if any(sign in template for sign in form.signs))
    return next(found, None)


def _declared(tokenizer: Tokenizer) -> Callable[[str, str, Offer], OutputParser]:
    tokenizer.output_regions("", ())  # a declaration that cannot be used is an error now, not with every request
    special = sorted(tokenizer.special_ids)
    markers = dict(zip(special, tokenizer.token_strings(special), strict=True))

    def parser(prompt: str, request_id: str, offer: Offer) -> OutputParser:
        regions = tokenizer.output_regions(prompt, offer.rendered())
        identify = _identify(request_id, "call_", 24)
        return DeclaredParser(regions, markers, identify, bool(offer.functions), offer.parallel)

    return parser


def _thinks(template: str) -> tuple[str, str] | None:
    return next((tags for tags in TAGS if any(tag in template for tag in tags)), None)


def _words(template: str) -> frozenset[str]:
    """Every word in the template's code, strings in it included."""
    blocks = re.findall(r"\{[{%].*?[%}]\}", template, re.DOTALL)
    return frozenset(re.findall(r"\w+", " ".join(blocks)))


def _identify(request_id: str, prefix: str, length: int) -> Callable[[int], str]:
    """Ids that follow from the request's, so that an answer has them however often it is read."""

    def identify(index: int) -> str:
        digest = blake2b(f"{request_id}:{index}".encode(), digest_size=length).digest()
        return prefix + "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest)

    return identify
