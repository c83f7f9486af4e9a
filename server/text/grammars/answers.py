"""The grammar of a whole chat answer: tool calls, the format asked for, and the thinking before both."""

from __future__ import annotations

import asyncio
import json
import re

import msgspec

from server.schemas.chat import ChatRequest
from server.schemas.tools import Function
from server.text.grammars.calls import Tokens, tool_call_grammar
from server.text.grammars.fields import bounded, refuse_lengths, wanted
from server.text.parsers.chat_format import FORMATS, ChatFormat
from server.text.parsers.formats import CALL, PYTHON, TOOL_CALLS
from server.text.tokenizer import Tokenizer
from server.text.tools import Offer
from spec.errors import InvalidRequest
from spec.request import Grammar

#: Of a grammar that holds the schemas of tools.
MOST_BYTES_WITH_CALLS = 256 * 1024


class Beginning(msgspec.Struct, frozen=True):
    """How the answer begins. prompt: its text. opened: it ends inside reasoning. continues: inside an answer."""

    prompt: str
    opened: bool
    continues: bool


async def chat_grammar(
    request: ChatRequest, offer: Offer, chat_format: ChatFormat, tokenizer: Tokenizer, beginning: Beginning
) -> Grammar | None:
    """What the answer must match; None if it may be anything. Raises :class:`InvalidRequest` naming the field."""
    grammar = await wanted(request)
    form = chat_format.calls if offer.functions else None
    if form is not None and offer.required:
        refuse_lengths(request, "tool_choice")
        grammar = await asyncio.to_thread(tool_call_grammar, form, offer, _tokens(form, tokenizer))
    elif form is not None and grammar is None:
        grammar = await asyncio.to_thread(strict_grammar, form, offer, _tokens(form, tokenizer))
        if grammar is not None:
            refuse_lengths(request, grammar.param)
    elif form is not None and grammar is not None:
        calls = await asyncio.to_thread(tool_call_grammar, form, offer, _tokens(form, tokenizer))
        grammar = _either(calls, grammar, form)
    return (
        None
        if grammar is None
        else _behind_thinking(bounded(grammar, MOST_BYTES_WITH_CALLS), chat_format, tokenizer, beginning)
    )


def _tokens(form: str, tokenizer: Tokenizer) -> dict[str, int]:
    """The tags of a format that are single tokens."""
    ids = {tag: tokenizer.added_id(tag) for tag in FORMATS[form].tags}
    return {tag: token for tag, token in ids.items() if token is not None}


def _either(calls: Grammar, answer: Grammar, form: str) -> Grammar:
    """Calls or an answer, as the model likes. They must differ in their first token."""
    if form == "llama3":
        field = answer.param.partition(".")[0]
        raise InvalidRequest(
            field, f"this model's tool calls look like any JSON: {field} goes with tool_choice none or required only"
        )
    second = answer.text
    given = json.loads(second)["grammars"][0] if second.startswith("{") else {"lark_grammar": second}
    grammars = [
        {"lark_grammar": "start: @calls | @answer"},
        {"name": "calls", "lark_grammar": calls.text},
        given | {"name": "answer"},
    ]
    return msgspec.structs.replace(answer, text=json.dumps({"grammars": grammars}))


def _behind_thinking(grammar: Grammar, chat_format: ChatFormat, tokenizer: Tokenizer, beginning: Beginning) -> Grammar:
    """The grammar begins where the reasoning ends, if the prompt has opened it or the model opens it first of all."""
    if chat_format.thinks is None:
        return grammar
    opening, closing = (tokenizer.added_id(tag) for tag in chat_format.thinks)
    if beginning.opened and closing is None:
        raise InvalidRequest(
            grammar.param, f"{grammar.param}: the tags of this model's reasoning are no tokens; ask it not to reason"
        )
    done = beginning.continues or beginning.prompt.rstrip().endswith(chat_format.thinks[1])
    if beginning.opened:
        return msgspec.structs.replace(grammar, after=closing)
    if done or opening is None or closing is None:
        return grammar
    return msgspec.structs.replace(grammar, after=closing, opens=opening)


# -- any text, then right calls ----------------------------------------------------------------------------------------
# Where the text ends and a call begins must be plain to see: at a token that begins calls, or, in Llama's way, at a
# brace that begins the answer.


_BEGINS = {"hermes": CALL, "qwen3_coder": CALL, "mistral": TOOL_CALLS}
_ANYTHING = {"type": "object"}


def strict_grammar(form: str, offer: Offer, tokens: Tokens) -> Grammar | None:
    """Text, or calls of the functions that are allowed, or text and then such calls; strict functions are called right.

    None if there is nothing to hold the model to. Raises :class:`InvalidRequest` if ``form`` does not show where a call
    begins, but what is allowed depends on it.
    """
    allowed = len(offer.functions) == len(offer.listed)
    if allowed and not any(function.strict for function in offer.functions):
        return None
    start = _start(form, tokens)
    if start is None:
        if not allowed:
            raise InvalidRequest("tool_choice", "this model's tool calls cannot be told from text before they are made")
        return None
    calls = tool_call_grammar(form, _loosened(offer), tokens)
    grammars = [{"lark_grammar": start}, {"name": "calls", "lark_grammar": calls.text}]
    return Grammar(text=json.dumps({"grammars": grammars}), param="tools" if allowed else "tool_choice")


def _start(form: str, tokens: Tokens) -> str | None:
    if form == "llama3":
        tag = f"<[{tokens[PYTHON]}]>" if PYTHON in tokens else json.dumps(PYTHON)
        return (
            f"start: @calls | TEXT | TEXT? {tag} @calls\n"
            f"TEXT: /[ \\t\\n\\r]*[^{{ \\t\\n\\r](.|\\n)*/ & {_without(PYTHON)}\n"
        )
    tag = _BEGINS[form]
    return f"start: TEXT? @calls | TEXT\nTEXT: /(.|\\n)+/ & {_without(tag)}\n" if tag in tokens else None


def _without(tag: str) -> str:
    return f"~/(.|\\n)*{re.escape(tag)}(.|\\n)*/"


def _loosened(offer: Offer) -> Offer:
    """The same functions, those that are not strict with any arguments."""
    loose = {function.name: _loose(function) for function in offer.listed}
    return msgspec.structs.replace(
        offer,
        listed=tuple(loose[function.name] for function in offer.listed),
        functions=tuple(loose[function.name] for function in offer.functions),
    )


def _loose(function: Function) -> Function:
    return function if function.strict else msgspec.structs.replace(function, parameters=_ANYTHING)
