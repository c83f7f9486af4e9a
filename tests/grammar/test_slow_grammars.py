"""Grammars that take ever longer: they end their own request, soon, and hold up nobody else."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import openai
import pytest

from foresay.server.schemas.shared import StructuredOutputs
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.server.text.grammars.constraint import BURST_SECONDS, GrammarFailed
from foresay.server.text.grammars.fields import bounded, json_grammar, lark_grammar, of_outputs
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar
from tests.grammar.oracle import TARGET

#: Of some 40 bytes: every text has as many readings as it has bracketings.
AMBIGUOUS = ("start: x\nx: /[a-z ]/ | x x | x x x", "start: x\nx: /./ | x x", 'start: x\nx: "" | /./ | x x x')
TEXT = "once upon a time there was a small fox who said so to the bear of the wood and the bear said no " * 4


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("text", AMBIGUOUS)
def test_an_ambiguous_grammar_fails_before_it_holds_anybody_up(text):
    compiler = GrammarCompiler.load(TARGET, 4096, [0])
    assert compiler is not None
    constraint = compiler.compile(Grammar(text=lark_grammar(text, "g"), param="g"))
    worst = 0.0
    with pytest.raises(GrammarFailed, match="takes too long"):  # noqa: PT012
        for token in compiler._tokenizer.tokenize_str(TEXT):
            for work in (partial(constraint.masks, [5], [-1]), partial(constraint.advance, [token])):
                began = time.thread_time()
                try:
                    work()
                finally:
                    worst = max(worst, time.thread_time() - began)
    assert worst < 2 * BURST_SECONDS


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]},
        {"properties": {f"p{number}": {"type": "integer", "multipleOf": 5003} for number in range(9)}},
    ],
    ids=["one", "together", "many"],
)
def test_numbers_that_take_minutes_to_compile_are_refused(schema):
    with pytest.raises(InvalidRequest, match="multipleOf") as caught:
        json_grammar(schema, "format")
    assert caught.value.param == "format"


def test_the_same_hidden_in_a_grammar_is_refused():
    hidden = 'start: j\nj: %json {"type": "integer", "multiple\\u004ff": 999983}'
    with pytest.raises(InvalidRequest, match="multipleOf"):
        of_outputs(StructuredOutputs(grammar=hidden))


@pytest.mark.parametrize("number", ["1e99999999999999999999", "1e999999999999999999", "9" * 60_000, "0.0001234567"])
def test_numbers_that_no_decimal_holds_are_refused_or_served(number):
    grammar = f'start: %json {{"multipleOf": {number}}}'
    if number.startswith("1e"):
        of_outputs(StructuredOutputs(grammar=grammar))  # one step: what llguidance makes of it is for it to say
    else:
        with pytest.raises(InvalidRequest):
            of_outputs(StructuredOutputs(grammar=grammar))


def test_many_numbers_are_refused_before_they_are_multiplied():
    numbers = ", ".join(f'{{"multipleOf": {10**18 + 2 * index + 1}}}' for index in range(20_000))
    began = time.thread_time()
    with pytest.raises(InvalidRequest):
        bounded(Grammar(text=numbers, param="tools"), 1 << 21)
    assert time.thread_time() - began < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("grammar", AMBIGUOUS)
async def test_a_stream_goes_on_next_to_an_ambiguous_grammar(client: openai.AsyncOpenAI, grammar: str):
    """The grammar's request ends with an error that names the field; the other stream is whole."""
    ask: dict[str, Any] = {"model": "bundled", "prompt": "Once upon a time", "seed": 1}
    stream = await client.completions.create(**ask, max_tokens=240, stream=True, extra_body={"ignore_eos": True})
    chunks = [await anext(stream)]
    with pytest.raises(openai.APIStatusError, match=r"structured_outputs\.grammar"):
        await client.with_options(max_retries=0).completions.create(
            **ask, max_tokens=200, extra_body={"structured_outputs": {"grammar": grammar}}
        )
    chunks += [chunk async for chunk in stream]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
