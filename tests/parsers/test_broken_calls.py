"""Calls that lack a tag, have one twice, or break off: what is announced as a call has JSON, and nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.server.catalog.formats import FORMATS
from foresay.server.text.parsers.chat_format import messages, output
from foresay.server.text.parts import Part, ToolCallPart, joined, part_text
from tests.parsers import reading
from tests.parsers.asking import TOOL, USER, ask, engine_saying
from tests.parsers.families import family_tokenizer, written
from tests.parsers.reading import CHANNELS, SCHEMA, calls_of, marked, parts_of, read, text_of
from tests.server.scripted import served

OFFERED: dict[str, dict[str, Any]] = {
    "get_weather": SCHEMA,
    "write": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}
CALLS = (
    ("get_weather", {"city": "w1 w2", "days": 3141, "list": ["w3", {"w4": None}], "more": {"w5": "w6"}}),
    ("write", {"path": "w7", "text": 'w8 "w9" \\ w10\n\tw11 = {w12: [w13]}\n'}),
)
_WORD = re.compile(r"w\d+|3141")
HARMONY = "harmony"
#: Tags, and what else holds a call together.
_MARKS = re.compile(r"<[^<>\s]*(?: name=\"\w+\")?>|\[[A-Z_]+\]|```\w*|[\[\]{}():=,\"]")


@cache
def original(family: str) -> str:
    """Text, and two calls as the family's template writes them."""
    if family == HARMONY:
        way = FORMATS[HARMONY].ways[0]
        calls = [way.call.replace("{name}", name).replace("{arguments}", json.dumps(given)) for name, given in CALLS]
        return "<|channel|>commentary<|message|>w0<|end|><|start|>assistant" + (
            way.between.join(calls).replace("<|call|>", "<|end|>") + "<|call|>"
        )
    return "w0 " + written(family_tokenizer(family), *CALLS)


def pieces(family: str, text: str, cuts: Sequence[int] = ()) -> list[list[Part]]:
    """What each piece of the text adds, and last what its end does."""
    if family == HARMONY:
        return reading.pieces(partial(messages, "", True), marked(text), cuts, CHANNELS, OFFERED)
    return reading.pieces(partial(output, FORMATS[family], None, False), text, cuts, offered=OFFERED)


def checked(family: str, text: str) -> list[Part]:
    """The parts of ``text``: arguments are objects, and each word of the text is in one part; one in which it was cut
    off may be missing."""
    parts = joined([part for piece in pieces(family, text) for part in piece])
    made: dict[int, str] = {}
    for part in parts:
        if isinstance(part, ToolCallPart):
            assert (part.index in made) is (part.name is None) is (part.id is None)
            made[part.index] = made.get(part.index, "") + part.arguments
    for arguments in made.values():
        assert isinstance(json.loads(arguments), dict), (text, arguments)
    words = _WORD.findall(text)
    shown = _WORD.findall(" ".join(map(part_text, parts)).replace("\\n", " ").replace("\\t", " "))
    cut = words[:-1] if original(family).startswith(text) else words
    assert shown in (words, cut), (text, parts)
    return parts


def changed(text: str) -> Iterator[str]:
    """The text without each of its tags and marks, and with it twice."""
    for mark in _MARKS.finditer(text):
        yield text[: mark.start()] + text[mark.end() :]
        yield text[: mark.end()] + text[mark.start() :]


@pytest.mark.parametrize("family", FORMATS)
def test_a_call_that_breaks_off_anywhere_has_arguments(family):
    text = original(family)
    assert [(name, json.loads(given)) for name, given in calls_of(checked(family, text))] == list(CALLS)
    for length in range(len(text)):
        checked(family, text[:length])


@pytest.mark.parametrize("family", FORMATS)
def test_a_tag_that_is_missing_or_there_twice_loses_nothing(family):
    for text in changed(original(family)):
        checked(family, text)


@pytest.mark.parametrize("family", FORMATS)
@settings(max_examples=60)
@given(data=st.data(), cuts=st.lists(st.integers(0, 400), max_size=30))
def test_however_it_is_broken_streams_and_answers_agree(family, data, cuts):
    text = original(family)
    for _ in range(data.draw(st.integers(1, 3))):
        text = data.draw(st.sampled_from(list(changed(text))))
    text = text[: data.draw(st.integers(0, len(text)))]
    whole, cut = (joined([part for piece in pieces(family, text, at) for part in piece]) for at in ((), cuts))
    assert whole == cut
    made = calls_of(cut)
    assert all(isinstance(json.loads(arguments), dict) for name, arguments in made if name)


# -- as the model meant ------------------------------------------------------------------------------------------------

TAGGED = ("qwen3_coder", "seed_oss", "minimax_m2", "glm45")


@pytest.mark.parametrize("family", TAGGED)
def test_a_missing_tag_before_or_behind_is_made_up_for(family):
    """All but the tags that name something, as they came."""
    text = original(family)
    line = "\n" if family == "qwen3_coder" else ""  # what is around a value there
    for mark in re.finditer(rf"</[^<>]*>{line}|<[^<>=/ ]*tool_call>", text):
        if mark[0] not in ("</arg_key>", "<tool_call>" if family == "glm45" else ""):
            without = text[: mark.start()] + text[mark.end() :]
            assert [(name, json.loads(made)) for name, made in calls_of(checked(family, without))] == list(CALLS)


def write(text: str, closing: str = "\n</parameter>") -> str:
    return f"<tool_call>\n<function=write>\n<parameter=text>\n{text}{closing}\n</function>\n</tool_call>"


VALUES = [
    # source code that mentions the tags
    "print('</function>')",
    "</function>\n</tool_call>",
    "a\n</tool_call>\nb",
    "x = '</parameter>'  # ends it",
    "see </function>\n</tool_call>\n\nand\n<tool_call>\n<function=unknown>\n",
    "inline <parameter=path> is text",
    "a\n<parameter=other>\nb",
    "</function></tool_call>" * 500,
    "</function>\n" * 500,
    "<" * 2000,
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_may_hold_tags(value):
    for text in (write(value), write(value) + "\n" + write("w1")):
        made = calls_of(read_coder(text))
        assert json.loads(made[0][1]) == {"text": value}
        assert len(made) == text.count("<function=write>")
    assert calls_of(read_coder(write(value), 1)) == calls_of(read_coder(write(value)))


def read_coder(text: str, size: int = 10_000) -> list[Part]:
    return joined([part for piece in pieces("qwen3_coder", text, range(0, len(text), size)) for part in piece])


RECOVERED = [
    (write("w1", ""), [("write", '{"text": "w1"}')]),
    (write("w1", "") + "\n\nWait.", [("write", '{"text": "w1"}'), "Wait."]),
    (write("w1", "") + "\n" + write("w2"), [("write", '{"text": "w1"}'), ("write", '{"text": "w2"}')]),
    (write("w1\n<parameter=path>\nw2"), [("write", '{"text": "w1", "path": "w2"}')]),
    (write("w1").removeprefix("<tool_call>\n"), [("write", '{"text": "w1"}')]),
    ("So:\n" + write("w1", "").removeprefix("<tool_call>\n"), ["So:", ("write", '{"text": "w1"}')]),
    ("<function=write>\n</function>", [("write", "{}")]),
    ("<tool_call>\n<function=write>\n</tool_call>", [("write", "{}")]),
    (write("w1", "")[: -len("</tool_call>")], [("write", '{"text": "w1"}')]),
    (write("w1", "").replace("</function>\n", ""), [("write", '{"text": "w1"}')]),
    ("<function=unknown>\n</function>", ["<function=unknown>\n</function>"]),
    ("Use <function=write> to write.", ["Use <function=write> to write."]),
    ("<function=write", ["<function=write"]),
]


@pytest.mark.parametrize(("text", "parts"), RECOVERED)
def test_what_qwen_coder_leaves_out(text, parts):
    assert checked("qwen3_coder", text) == parts_of(parts)
    for cut in range(1, len(text)):
        assert read_coder(text, cut) == parts_of(parts)


def test_a_value_streams_up_to_what_may_end_it():
    text = write("w1 w2 </function> w3")
    came = pieces("qwen3_coder", text, range(len(text)))
    shown = ["".join(part_text(part) for piece in came[:at] for part in piece) for at in range(len(came))]
    begins = write("").index("\n</parameter>")
    assert shown[begins + len("w1 w2")] == '{"text": "w1 w2'
    assert shown[begins + len("w1 w2 </function> w")] == '{"text": "w1 w2 </function> w'


ODD = [
    ('{"name": "write", "arguments": {"text": "a\nb", \'path\': None,}}', {"text": "a\nb", "path": None}),
    ('{"name": "write", "arguments": {text: True, "path": "\\q\\ud83d!\\u00zz"}}',
     {"text": True, "path": "\\q\\ud83d!\\u00zz"}),
    ('{"name": "write", "arguments": "{\\"text\\": \\"w1\\",}"}', {"text": "w1"}),
    ('{"name": "write", "arguments": ""}', {}),
    ('{"name": "write", "arguments": {"text": NaN, "path": 007}}', {"text": "NaN", "path": "007"}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "arguments"), ODD)
def test_arguments_that_are_nearly_json_become_json(call, arguments):
    [(name, given)] = calls_of(read("hermes", f"<tool_call>{call}</tool_call>"))
    assert (name, json.loads(given)) == ("write", arguments)


def test_arguments_that_are_no_object_are_text():
    for arguments in ("5", '"Paris"', "[1]", '"{} and"', '"[1]"'):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert read("hermes", text) == parts_of([text])


# -- an answer that is a call, without tags ----------------------------------------------------------------------------

OBJECT = '{"name": "f", "arguments": {"a": 1}}'
ALONE = [OBJECT, f"```json\n{OBJECT}\n```", f"\n```\n{OBJECT}```\n", f"{OBJECT}\n</tool_call>\n",
         '{"arguments": {"a": 1}, "name": "f"}', '{"name": "f", "parameters": {"a": 1}}']  # fmt: skip
NOT_ALONE = [f"So: {OBJECT}", f"{OBJECT} so", f"```json\n{OBJECT}\n```\nso", f"```python\n{OBJECT}\n```",
             f"```json\n{OBJECT}", OBJECT[:-1], OBJECT.replace("f", "g"), '{"name": "f"}', f"[{OBJECT}]", "{}", "```",
             f"{OBJECT}\n{OBJECT}", '{"name": "f", "arguments": {}, "x": 1}', " \n"]  # fmt: skip


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_an_answer_that_is_nothing_but_a_call_is_one(cut):
    for text in ALONE:
        assert read("hermes", text, range(0, len(text), cut)) == parts_of([("f", '{"a": 1}')]), text
    for text in NOT_ALONE:
        assert read("hermes", text, range(0, len(text), cut)) == parts_of([text]), text


def test_only_some_formats_read_it_and_it_may_follow_a_thought():
    assert [family for family in FORMATS if FORMATS[family].alone] == ["hermes"]
    assert read("mistral", OBJECT) == parts_of([OBJECT])
    parts = read("hermes", f"<think>Hm.</think>\n{OBJECT}", tags=("<think>", "</think>"))
    assert (text_of(parts), calls_of(parts)) == ("", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    "text",
    ['{"name": "write", "x', '{"name": "write", "arguments": {"text": "w1"}}\nS', "```json\n{]", "```p", '{"x',
     '{"name": "wrx', '{"name": "write", "arguments": 1,', "H", " \nH"],
)  # fmt: skip
def test_text_is_released_as_soon_as_it_cannot_be_a_call(text):
    *before, last, _ = pieces("hermes", text, range(len(text)))
    assert not any(before)
    assert text_of(last) == text


# -- a server ----------------------------------------------------------------------------------------------------------

WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("family", ["hermes"])
async def test_an_answer_that_is_held_to_something_is_what_it_says(tokenizer):
    """A schema could ask for an object that looks like a call; who says none wants none; a continued answer is part of
    one."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    begun = {"role": "assistant", "content": "So: "}
    async with served(engine_saying(tokenizer, WEATHER), tokenizer) as client:
        for fields in ({"response_format": schema}, {"tool_choice": "none"}, {"tools": [strict()]}):
            _, body = await ask(client, **{"tools": [TOOL], **fields})
            assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == (WEATHER, "stop")
        more = {"continue_final_message": True, "add_generation_prompt": False}
        _, body = await ask(client, [USER, begun], tools=[TOOL], **more)
        assert body["choices"][0]["message"]["content"] == WEATHER


def strict() -> dict[str, Any]:
    return TOOL | {"function": TOOL["function"] | {"strict": True}}


@pytest.mark.parametrize("family", ["qwen3_coder", "hermes", "gemma4"])
async def test_max_tokens_in_a_call_leaves_json(tokenizer, family):
    text = written(tokenizer, ("get_weather", {"city": "Paris and Rome"}))
    ids = tokenizer.encode(text, add_special_tokens=False)
    async with served(engine_saying(tokenizer, text), tokenizer) as client:
        for most in range(1, len(ids)):
            _, body = await ask(client, tools=[TOOL], max_tokens=most)
            (choice,) = body["choices"]
            assert choice["finish_reason"] == "length"
            for call in choice["message"].get("tool_calls") or ():
                given = json.loads(call["function"]["arguments"])
                assert set(given) <= {"city"} and "Paris and Rome\n</parameter>".startswith(given.get("city", ""))
