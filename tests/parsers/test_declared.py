"""Output read as the tokenizer declares, for models whose way of writing is none of ours."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.server.text.parsers.chat_format import ChatFormat, DeclaredParser
from foresay.server.text.parts import ReasoningPart, TextPart, ToolCallPart, joined
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import ConfigurationError
from tests.parsers.asking import TOOL, ask, engine_saying
from tests.parsers.families import TEMPLATES, family_tokenizer
from tests.parsers.reading import calls_of, text_of
from tests.server.scripted import served

DECLARATION = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<|thought|>", "close": "<|/thought|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<\|call\|>",
            "close": "<|/call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}
CALL = '<|call|>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}<|/call|>'
ARGUMENTS = '{"city":"Paris","days":3}'


def declaring(declaration=DECLARATION) -> Tokenizer:
    tokenizer = family_tokenizer("plain")
    inner = tokenizer._templates
    inner.response_template = declaration
    inner.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATES["plain"]
    inner.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|/call|>"]})
    return Tokenizer(inner)


TOKENIZER = declaring()


def read(text, cuts=(), calls=True, parallel=True, prompt="<|assistant|>"):
    regions = TOKENIZER.output_regions(prompt, ())
    parser = DeclaredParser(regions, {}, lambda index: f"id{index}", calls, parallel)
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [part for begin, end in itertools.pairwise(ends) for part in parser.feed(text[begin:end])]
    return joined(parts + parser.flush())


def call(index):
    return ToolCallPart(index=index, id=f"id{index}", name="get_weather", arguments=ARGUMENTS)


@pytest.mark.parametrize(("text", "parts"), [
    (f"<|thought|>Hm.<|/thought|>Sure.\n{CALL}\n{CALL}", [
        ReasoningPart("Hm."), TextPart("Sure."), call(0), call(1)]),
    ("1 < 2 <|cal", [TextPart("1 < 2 <|cal")]),
    ("So <|call|>oops<|/call|> and", [TextPart("So <|call|>oops<|/call|> and")]),
    ('<|call|>{"name": "f", "arguments": "{\\"a\\": 1}"}<|/call|>', [
        ToolCallPart(index=0, id="id0", name="f", arguments='{"a": 1}')]),
    ('So <|call|>{"name": "f", "arguments": "a"}<|/call|> and', [
        TextPart('So <|call|>{"name": "f", "arguments": "a"}<|/call|> and')]),
    (f"{CALL}<|call|>" + '{"name": "get_wea', [call(0), TextPart('<|call|>{"name": "get_wea')]),
])  # fmt: skip
def test_an_output_is_read_alike_in_one_piece_and_in_characters(text, parts):
    assert read(text) == parts
    assert read(text, range(len(text))) == parts


FRAGMENTS = ["<|call|>", "<|/call|>", "<|thought|>", "<|/thought|>", "<|", "\n", "{", "}", "a", CALL, "<|end|>", " b"]


@settings(max_examples=150)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join), cuts=st.lists(st.integers(0, 99), max_size=6)
)
def test_any_split_gives_the_same_parts(text, cuts):
    assert read(text, cuts) == read(text)


def test_calls_that_nobody_may_make_stay_text():
    assert text_of(read(f"Sure.\n{CALL} ok", calls=False)) == f"Sure.\n{CALL} ok"
    assert len(calls_of(read(CALL + CALL, parallel=False))) == 1


def test_the_prompt_may_have_opened_the_reasoning():
    regions = TOKENIZER.output_regions("<|assistant|><|thought|>", ())
    parser = DeclaredParser(regions, {}, str)
    assert parser.thinking
    assert joined(parser.feed("Hm.<|/thought|>Yes") + parser.flush()) == [ReasoningPart("Hm."), TextPart("Yes")]
    assert not parser.thinking


def test_it_is_for_templates_that_show_no_format_of_ours():
    assert ChatFormat.of(TOKENIZER).declared is not None
    assert ChatFormat.of(TOKENIZER, "none").declared is None
    ours = family_tokenizer("hermes")
    ours._templates.response_template = DECLARATION
    assert ChatFormat.of(ours).declared is None
    assert ChatFormat.of(ours, "response_template").declared is not None
    with pytest.raises(ConfigurationError, match="response_template"):
        ChatFormat.of(family_tokenizer("plain"), "response_template")
    with pytest.raises(ConfigurationError, match="response_template"):
        ChatFormat.of(declaring({"version": 99}))


@pytest.mark.parametrize("run", [1, 4, 1000])
async def test_over_http(run):
    engine = engine_saying(TOKENIZER, f"<|thought|>Hm.<|/thought|>Sure.\n{CALL}", run)
    async with served(engine, TOKENIZER) as client:
        _, body = await ask(client, tools=[TOOL])
        status, refused = await ask(client, tools=[TOOL], tool_choice="required")
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Sure.")
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert (status, refused["error"]["param"]) == (400, "tool_choice")
