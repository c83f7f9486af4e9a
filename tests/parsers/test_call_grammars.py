"""The grammars of calls and the parsers agree: whatever a grammar lets through is read as calls that are right."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from foresay.server.schemas.chat import Function
from foresay.server.text.choice import Choice
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.answers import strict_grammar, tool_call_grammar
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.parts import ToolCallPart, joined
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta, FinishReason, Request
from foresay.spec.sampling import SamplingParams
from tests.parsers.families import TOOL_FORMATS, family_tokenizer, written
from tests.parsers.reading import text_of

END = 0
ITEMS = {"$defs": {"item": {"type": "integer", "minimum": 0, "maximum": 9}}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["celsius", "kelvin <b>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "exact": {"type": "boolean"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
} | ITEMS
FUNCTIONS = (Function(name="get_weather", parameters=SCHEMA), Function(name="now"))
LOOSE = Function(name="note", parameters={"type": "object", "minProperties": 9})
SCHEMAS = {"get_weather": SCHEMA, "now": {"type": "object", "maxProperties": 0}, "note": {"type": "object"}}
FORMS = tuple(TOOL_FORMATS)


def tokens_of(tokenizer: Tokenizer, form: str) -> dict[str, int]:
    ids = {tag: tokenizer.added_id(tag) for tag in TOOL_FORMATS[form].tags}
    return {tag: id for tag, id in ids.items() if id is not None}


def matching(tokenizer: Tokenizer, grammar: str) -> LLMatcher:
    spelled = LLTokenizer(tokenizer._backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=[END])
    matcher = LLMatcher(spelled, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def walked(tokenizer: Tokenizer, grammar: str, seed: int, most: int = 600, liked: int = END) -> list[int]:
    """Tokens drawn from what the grammar allows, often the end or the liked one where it lets them."""
    dice = random.Random(seed)
    matcher = matching(tokenizer, grammar)
    tokens: list[int] = []
    while len(tokens) < most and END not in tokens:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits[: tokenizer.vocab_size])]
        drawn = [token for token in (END, liked) if token in allowed and dice.random() < 0.3]
        tokens.append(drawn[-1] if drawn else dice.choice(allowed))
        matcher.consume_tokens(tokens[-1:])
    return tokens


def answered(tokenizer: Tokenizer, offer: Offer, *runs: list[int]):
    parser = ChatFormat.of(tokenizer).parser("r", offer, opened=False)
    choice = Choice(Request(id="r", prompt=[5], params=SamplingParams()), tokenizer, [END], (), parser)
    stop = END if runs[-1][-1] == END else None
    reason: FinishReason = "length" if stop is None else "stop"
    *first, last = runs
    parts = [part for run in first for part in choice.take(Delta(id="r", tokens=run)).parts]
    parts += choice.take(Delta(id="r", tokens=last, finish_reason=reason, stop_token=stop)).parts
    parts = joined(parts)
    return choice.finish_reason, parts, [part for part in parts if isinstance(part, ToolCallPart)]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_required_call_is_read_as_what_the_schema_wants(form, parallel):
    tokenizer = family_tokenizer(form)
    offer = Offer(listed=FUNCTIONS, functions=FUNCTIONS, required=True, parallel=parallel)
    grammar = tool_call_grammar(form, offer, tokens_of(tokenizer, form))
    called = set()
    for seed in range(12):
        reason, parts, calls = answered(tokenizer, offer, walked(tokenizer, grammar.text, seed))
        assert (reason, text_of(parts)) == ("tool_calls", "")
        assert calls
        assert parallel or len(calls) == 1
        for call in calls:
            called.add(call.name)
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert called == {"get_weather", "now"}


@pytest.mark.parametrize("form", FORMS)
def test_a_strict_function_is_held_to_its_schema_and_the_text_is_free(form):
    tokenizer = family_tokenizer(form)
    strict = Function(name="get_weather", parameters=SCHEMA, strict=True)
    offer = Offer(listed=(LOOSE, strict), functions=(LOOSE, strict), parallel=False)
    tokens = tokens_of(tokenizer, form)
    grammar = strict_grammar(form, offer, tokens)
    assert grammar is not None
    called = set()
    for seed in range(24):
        drawn = walked(tokenizer, grammar.text, seed, most=120, liked=tokens[TOOL_FORMATS[form].tags[0]])
        reason, parts, calls = answered(tokenizer, offer, drawn)
        assert len(calls) <= 1
        assert reason in (("tool_calls", "length") if calls else ("stop", "length"))
        called |= {call.name for call in calls}
        for call in (call for call in calls if reason == "tool_calls"):
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        if text_of(parts):
            called.add("text")
    assert {"get_weather", "text"} <= called


@pytest.mark.parametrize("form", FORMS)
def test_only_allowed_functions_can_be_called(form):
    tokenizer = family_tokenizer(form)
    offer = Offer(listed=FUNCTIONS, functions=FUNCTIONS[1:], parallel=False)
    tokens = tokens_of(tokenizer, form)
    grammar = strict_grammar(form, offer, tokens)
    assert grammar is not None
    called = set()
    for seed in range(30):
        drawn = walked(tokenizer, grammar.text, seed, most=60, liked=tokens[TOOL_FORMATS[form].tags[0]])
        _, parts, calls = answered(tokenizer, Offer(listed=FUNCTIONS, functions=FUNCTIONS), drawn)
        called |= {call.name for call in calls} | ({"text"} if text_of(parts) else set())
    assert called == {"now", "text"}


def test_where_nothing_is_strict_there_is_no_grammar():
    strict = Function(name="f", parameters=SCHEMA, strict=True)
    assert strict_grammar("hermes", Offer(listed=FUNCTIONS, functions=FUNCTIONS), {"<tool_call>": 300}) is None
    assert strict_grammar("hermes", Offer(listed=(strict,), functions=(strict,)), {}) is None, "no token begins a call"
    with pytest.raises(InvalidRequest) as caught:
        strict_grammar("hermes", Offer(listed=FUNCTIONS, functions=FUNCTIONS[1:]), {})
    assert caught.value.param == "tool_choice"


A = ".properties.a"


@pytest.mark.parametrize(
    ("param", "schema"),
    [
        ("", {"properties": []}),
        ("", {"properties": {"a": {}}, "required": 5}),
        ("", {"anyOf": []}),
        (".properties.a>", {"properties": {"a>": {"type": "string"}}}),
        *((A, {"properties": {"a": {"type": "string"} | value}}) for value in (
            {"pattern": "x"}, {"enum": 5}, {"const": "</parameter>"})),
    ],
)  # fmt: skip
def test_what_bare_parameters_cannot_be_held_to_is_refused(param, schema):
    function = Function(name="f", parameters={"type": "object"} | schema)
    with pytest.raises(InvalidRequest) as caught:
        tool_call_grammar("qwen3_coder", Offer(listed=(function,), functions=(function,)), {})
    assert caught.value.param == f"tools[0].function.parameters{param}"


QUOTED: dict[str, Any] = {
    "note": 'A "no" \\ <b>,\n\nand é\n',
    "days": 3,
    "exact": True,
    "tags": ["a", None, {"b": 1.5}],
}
KINDS = ("string", "integer", "boolean", "array")
TYPED = {
    "type": "object",
    "properties": {key: {"type": kind} for key, kind in zip(QUOTED, KINDS, strict=True)},
    "required": ["note"],
}


@pytest.mark.parametrize("form", FORMS)
def test_what_the_template_shows_is_allowed_and_read(form):
    """Round trip: calls are rendered by the template, held to the grammar and read again, however they are cut."""
    tokenizer = family_tokenizer(form)
    functions = (Function(name="note", parameters=TYPED), Function(name="now"))
    offer = Offer(listed=functions, functions=functions, required=True)
    calls = [("note", QUOTED), ("now", {}), ("note", {"note": "b"})]
    tokens = tokenizer.encode(written(tokenizer, *calls), add_special_tokens=False)
    for end in range(1, len(tokens)):
        _, parts, made = answered(tokenizer, offer, tokens[:end], [*tokens[end:], END])
        assert text_of(parts) == ""
        assert [(call.name, json.loads(call.arguments)) for call in made] == calls
    # The small templates of three are laid out otherwise (see tests/grammar); Gemma 4's have a notation of their own.
    if form not in ("hermes", "llama3", "mistral", "gemma4"):
        matcher = matching(tokenizer, tool_call_grammar(form, offer, tokens_of(tokenizer, form)).text)
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        assert matcher.is_accepting()
