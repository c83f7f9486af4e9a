"""The grammar of a whole chat answer: tool calls, the requested format, and the reasoning before both; or messages on
channels (:mod:`foresay.server.text.parsers.harmony`): the model may think, and say what it does, and then it calls, or
answers in the requested form.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import msgspec

from foresay.server.catalog.formats import CHANNELS, FORMATS, HARMONY
from foresay.server.schemas.chat import ChatRequest
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.calls import Tokens, loosened, strict_grammar, tool_call_grammar, written
from foresay.server.text.grammars.fields import bounded, refuse_lengths, wanted
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar

#: Most bytes of a grammar with the schemas of tools.
MOST_BYTES_WITH_CALLS = 256 * 1024


class Beginning(msgspec.Struct, frozen=True):
    """How the answer begins. prompt: its text. opened: it ends inside reasoning. continues: inside an answer."""

    prompt: str
    opened: bool
    continues: bool


async def chat_grammar(
    request: ChatRequest, offer: Offer, chat_format: ChatFormat, tokenizer: Tokenizer, beginning: Beginning
) -> Grammar | None:
    """The grammar that the answer must match; None if it may be anything. Raises :class:`InvalidRequest` naming the
    field."""
    grammar = await wanted(request)
    if chat_format.channels and not beginning.continues:
        made = await asyncio.to_thread(channel_grammar, grammar, offer, _ids(CHANNELS.control, tokenizer))
        if made is not None and grammar is None:
            refuse_lengths(request, made.param)
        return None if made is None else bounded(made, MOST_BYTES_WITH_CALLS)
    form = chat_format.calls if offer.functions else None
    if form is not None:
        make = tool_call_grammar if offer.required or grammar is not None else strict_grammar
        calls = await asyncio.to_thread(make, form, offer, _ids(FORMATS[form].tags, tokenizer))
        if calls is not None and grammar is not None and not offer.required:
            grammar = _either(calls, grammar, form)
        elif calls is not None:
            refuse_lengths(request, calls.param)
            grammar = calls
    if grammar is None:
        return None
    return _behind_thinking(bounded(grammar, MOST_BYTES_WITH_CALLS), chat_format, tokenizer, beginning)


def _ids(tags: Iterable[str], tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of those tags that are single tokens."""
    found = ((tag, tokenizer.added_id(tag)) for tag in tags)
    return {tag: id for tag, id in found if id is not None}


def _either(calls: Grammar, answer: Grammar, form: str) -> Grammar:
    """Calls or an answer, at the model's choice. They must differ in their first token."""
    if FORMATS[form].bare:
        field = answer.param.partition(".")[0]
        before = "this model's tool calls look like any JSON: "
        raise InvalidRequest(field, " goes with tool_choice none or required only", before)
    grammars = [
        {"lark_grammar": "start: @calls | @answer"},
        {"name": "calls", "lark_grammar": calls.text},
        named(answer, "answer"),
    ]
    return msgspec.structs.replace(answer, text=json.dumps({"grammars": grammars}))


def _behind_thinking(grammar: Grammar, chat_format: ChatFormat, tokenizer: Tokenizer, beginning: Beginning) -> Grammar:
    """The grammar applied after reasoning, if the prompt has opened reasoning or the model starts with it."""
    if chat_format.thinks is None:
        return grammar
    opening, closing = (tokenizer.added_id(tag) for tag in chat_format.thinks)
    if beginning.opened and closing is None:
        raise InvalidRequest(grammar.param, ": the tags of this model's reasoning are no tokens; ask it not to reason")
    done = beginning.continues or beginning.prompt.rstrip().endswith(chat_format.thinks[1])
    if beginning.opened:
        return msgspec.structs.replace(grammar, after=closing)
    if done or opening is None or closing is None:
        return grammar
    return msgspec.structs.replace(grammar, after=closing, opens=opening)


def channel_grammar(answer: Grammar | None, offer: Offer, tokens: Tokens) -> Grammar | None:
    """What all messages must match; None: they may be anything. answer: what the last one must, if it calls nothing."""
    answer = None if offer.required else answer
    free = len(offer.functions) == len(offer.listed) and not any(one.strict for one in offer.functions)
    if answer is None and free and not offer.required:
        return None
    channel, message, next_one = (written(tags, tokens) for tags in ("<|channel|>", "<|message|>", "<|end|><|start|>"))
    ends = [] if offer.required else [f'{channel} "final" {message} {"TEXT?" if answer is None else "@answer"}']
    grammars = list[dict[str, str]]()
    if offer.functions:
        held = loosened(offer) if answer is None and not offer.required else offer
        calls = tool_call_grammar(HARMONY, held, tokens)
        ends.append("@calls")
        grammars.append({"name": "calls", "lark_grammar": calls.text})
    if answer is not None:
        grammars.append(named(answer, "answer"))
    rules = (
        f"start: before* ({' | '.join(ends)})",
        f'before: {channel} ("analysis" | "commentary") {message} TEXT? {next_one} "assistant"',
        "TEXT: /(.|\\n)+/",
    )
    text = json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *grammars]})
    field = "tool_choice" if offer.required or len(offer.functions) < len(offer.listed) else "tools"
    return Grammar(text=text, param=field if answer is None else answer.param)


def named(grammar: Grammar, name: str) -> dict[str, str]:
    """A grammar as a part of another one."""
    text = grammar.text
    given: dict[str, str] = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return given | {"name": name}
