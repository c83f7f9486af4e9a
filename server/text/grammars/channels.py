"""The grammar of an answer in messages on channels (:mod:`foresay.server.text.parsers.harmony`): the model may think,
and say what it does, and then it calls, or answers in the form that is asked for.
"""

from __future__ import annotations

import json

from foresay.server.catalog.formats import HARMONY
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.calls import Tokens, loosened, tool_call_grammar, written
from foresay.spec.request import Grammar


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
