"""The grammar of an answer that may call functions, some of them strict or not allowed: any text, then right calls.

Where the text ends and a call begins must be plain to see: at a token that begins calls, or, in Llama's way, at a brace
that begins the answer.
"""

from __future__ import annotations

import json
import re

import msgspec

from server.schemas.tools import Function
from server.text.grammars.calls import Tokens, tool_call_grammar
from server.text.parsers.formats import CALL, PYTHON, TOOL_CALLS
from server.text.tools import Offer
from spec.errors import InvalidRequest
from spec.request import Grammar

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
