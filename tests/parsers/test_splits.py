"""Whatever a model writes and however it is cut: the same parts, and nothing is lost."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.parsers.families import TOOL_FORMATS
from tests.parsers.reading import THINK, calls_of, read, text_of, thought_of

FAMILIES = (*TOOL_FORMATS, "plain")
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>",
    "{", "}", "[", "]", ";", ",", ":", '"', "\\", '"name"', '"arguments"', '"parameters"', '"f"', '"add"', "f", "add",
    '{"name": "f", "arguments": {', '{"name": "add", "parameters": {}}', '{"a": "b"}', "null", "1", "<", "</tool", " ",
    "\n", "Hello", "<function=", "f>", "</function>", "<parameter=", "city>", "days>",
    "</parameter>", "é", "🦊", "\\u00e9", "(", ")", "f(", "city=", "'", "functions.f:0",
    "call:f{", 'call:f{a:<|"|>', "a:", "call:f(a=", "<tool_",
    *sorted({tag for form in TOOL_FORMATS.values() for tag in form.tags}),
]  # fmt: skip
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
cuts = st.lists(st.integers(0, 400), max_size=12)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50)
@given(text=outputs, cuts=cuts, thinks=st.booleans(), opened=st.booleans(), parallel=st.booleans())
def test_any_split_gives_the_same_parts(family, text, cuts, thinks, opened, parallel):
    tags = THINK if thinks else None
    options = {"tags": tags, "opened": opened and thinks, "parallel": parallel}
    assert read(family, text, cuts, **options) == read(family, text, **options)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50)
@given(text=outputs)
@example(text='<tool_call>{"name": "f", <tool_call>')
@example(text='{"name": "f"; {')
@example(text='[TOOL_CALLS]f{a:<|"|>')
def test_what_is_no_call_is_text_to_the_letter(family, text):
    parts = read(family, text)
    if not calls_of(parts):
        assert text_of(parts) == text
    rest = iter(text)
    assert all(character in rest for character in text_of(parts)), "the text is what was written, in order"
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls_of(parts) if arguments)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8) | st.sampled_from(FRAGMENTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=3)
layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
words = st.sampled_from(["", "Well.", "Let me see", "1 < 2: é🦊"])


def written(family: str, calls: list[tuple[str, str]]) -> str:
    """The calls as the family writes them."""
    if family == "hermes":
        return "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>' for name, args in calls
        )
    if family == "llama3":
        return "<|python_tag|>" + "; ".join(f'{{"name": "{name}", "parameters": {args}}}' for name, args in calls)
    if family == "mistral":
        inner = ", ".join(f'{{"name": "{name}", "arguments": {args}}}' for name, args in calls)
        return f"[TOOL_CALLS] [{inner}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{args}" for name, args in calls)


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral", "mistral11"])
@settings(max_examples=150)
@given(
    before=words,
    thought=words,
    calls=st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), objects), min_size=1, max_size=3),
    layout=layouts,
    cuts=cuts,
)
def test_right_calls_come_out_as_they_were_written(family, before, thought, calls, layout, cuts):
    spelled = [(name, json.dumps(arguments, **layout)) for name, arguments in calls]
    text = f"<think>\n{thought}\n</think>\n\n{before} {written(family, spelled)}"
    parts = read(family.removesuffix("11"), text, cuts, tags=THINK)
    assert calls_of(parts) == spelled
    assert [json.loads(arguments) for _, arguments in calls_of(parts)] == [arguments for _, arguments in calls]
    assert (thought_of(parts), text_of(parts)) == (thought, before)
    assert [part.id for part in parts if hasattr(part, "id")] == [f"id{index}" for index in range(len(calls))]


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral", "mistral11"])
def test_arguments_come_out_while_they_are_written(family):
    arguments = json.dumps({"text": "x" * 4000})
    text = written(family, [("f", arguments)])
    begin = text.index("xxx")
    so_far = partial(read, family.removesuffix("11"))
    for length in (begin, begin + 100, begin + 3999):
        assert calls_of(so_far(text[:length])) == [("f", arguments[: length - text.index('{"text"')] + '"}')]


@settings(max_examples=150)
@given(city=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12), days=values, cuts=cuts)
def test_bare_parameters_become_the_json_they_mean(city, days, cuts):
    assume("</parameter>" not in city + json.dumps(days))
    text = (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n"
        f"<parameter=days>\n{json.dumps(days)}\n</parameter>\n</function>\n</tool_call>"
    )
    [(name, arguments)] = calls_of(read("qwen3_coder", text, cuts))
    assert (name, json.loads(arguments)) == ("get_weather", {"city": city, "days": days})


def test_a_flood_of_tags_takes_no_time_to_speak_of():
    text = '<tool_call>{"a":[' * 1000
    assert text_of(read("hermes", text)) == text
