"""What each family of models writes, and the parts it is read as. The outputs are in the published formats."""

from __future__ import annotations

import pytest

from foresay.server.text.parts import ReasoningPart, TextPart
from tests.parsers.reading import THINK, calls_of, parts_of, read, text_of

PARIS = '{"city": "Paris", "days": 3}'


HERMES = {
    # one call, as Qwen 2.5 and Hermes 2 Pro write it
    f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>': [("get_weather", PARIS)],
    # two calls in a row, text before and behind
    f'Let me look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n'
    '{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n\nDone.': [
        "Let me look.",
        ("get_weather", PARIS),
        ("add", '{"a": 1}'),
        "Done.",
    ],
    # Hermes puts the arguments first
    '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>': [("add", '{"a": 1}')],
    # the tags and brackets inside of a string are its text
    '<tool_call>{"name": "f", "arguments": {"code": "</tool_call> }] \\" \\\\"}}</tool_call>': [
        ("f", '{"code": "</tool_call> }] \\" \\\\"}')
    ],
    # no arguments
    '<tool_call>{"name": "f"}</tool_call>': [("f", "{}")],
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': [("f", "{}")],
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>': [("f", "{}")],
    # arguments as a string that holds JSON
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>': [("f", '{"a": "é"}')],
    # other keys next to them
    '<tool_call>{"id": 12, "type": "function", "name": "f", "x": [{}], "arguments": {"a": 1}}</tool_call>': [
        ("f", '{"a": 1}')
    ],
    # the last brace is missing
    '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> And': [("f", '{"a": 1}'), "And"],
    # text only, with what could be a tag
    "1 < 2, <tool, <tool_calls> \n ": ["1 < 2, <tool, <tool_calls> \n "],
    "": [],
}
HERMES_BROKEN = {
    "<tool_call>not JSON</tool_call>": ["<tool_call>not JSON</tool_call>"],
    '<tool_call>\n{"name": 5, "arguments": {}}': ['<tool_call>\n{"name": 5, "arguments": {}}'],
    '<tool_call>{"arguments": {"a": 1}}</tool_call>': ['<tool_call>{"arguments": {"a": 1}}</tool_call>'],
    '<tool_call>{"name": "f", "arguments": 5}': ['<tool_call>{"name": "f", "arguments": 5}'],
    '<tool_call>{"name": "f" "arguments": {}}': ['<tool_call>{"name": "f" "arguments": {}}'],
    '<tool_call>{"name": "", "arguments": {}}': ['<tool_call>{"name": "", "arguments": {}}'],
    # the second one is a call
    'So: <tool_call>{"name" <tool_call>{"name": "f", "arguments": {}}</tool_call>': [
        'So: <tool_call>{"name"',
        ("f", "{}"),
    ],
    # it was a call already
    '<tool_call>{"name": "f", "arguments": {"a": ]}}': [("f", "{}"), '"a": ]}}'],
    '<tool_call>{"name": "f", "arguments": {"a": 1}, oops}': [("f", '{"a": 1}'), "oops}"],
    # what takes so long to name its function is no call
    '<tool_call>{"x": "' + "y" * 2000 + '", "name": "f"}': ['<tool_call>{"x": "' + "y" * 2000 + '", "name": "f"}'],
}
HERMES_CUT = {
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Par': [("get_weather", '{"city": "Par"}')],
    '<tool_call>{"name": "get_weather", "argu': [("get_weather", "{}")],
    '<tool_call>{"name": "get_wea': ['<tool_call>{"name": "get_wea'],
    '<tool_call>{"name": "f", "arguments": "{\\"a': [("f", "{}")],
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b': [("f", '{"a": "b"}')],
    '<tool_call>{"arguments": {"a": 1': ['<tool_call>{"arguments": {"a": 1'],
    '<tool_call>{"name": "f", "arguments": {}}\n</tool': [("f", "{}")],
    "Well \n<tool_c": ["Well \n<tool_c"],
}
LLAMA3 = {
    f'{{"name": "get_weather", "parameters": {PARIS}}}': [("get_weather", PARIS)],
    f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}': [("get_weather", PARIS)],
    f'\n{{"name": "add", "parameters": {{"a": 1}}}}; {{"name": "get_weather", "parameters": {PARIS}}}': [
        ("add", '{"a": 1}'),
        ("get_weather", PARIS),
    ],
    '{"type": "function", "name": "f", "parameters": {"a": "b;c"}}\n{"name": "f", "parameters": {}}': [
        ("f", '{"a": "b;c"}'),
        ("f", "{}"),
    ],
    # JSON that calls nobody who was offered is an answer
    '{"name": "Ann", "parameters": {"age": 3}}': ['{"name": "Ann", "parameters": {"age": 3}}'],
    '{"colour": "red"}': ['{"colour": "red"}'],
    'See {"name": "f", "parameters": {}}': ['See {"name": "f", "parameters": {}}'],
    '<|python_tag|>brave_search.call(query="x")': ['<|python_tag|>brave_search.call(query="x")'],
    '{"name": "f", "parameters": {}}; so': [("f", "{}"), "; so"],
}
MISTRAL = {
    f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]': [("get_weather", PARIS)],
    f'Hm. [TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "f", "arguments": {{}}}}]': [
        "Hm.",
        ("get_weather", PARIS),
        ("f", "{}"),
    ],
    f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add[ARGS]{{}}": [("get_weather", PARIS), ("add", "{}")],
    f"[TOOL_CALLS]get_weather{PARIS}": [("get_weather", PARIS)],
    "[TOOL_CALLS]f[CALL_ID]Xy3456789[ARGS]{}": [("f", "{}", "Xy3456789")],
    '[TOOL_CALLS][{"arguments": {"a": "]"}, "name": "f"}]': [("f", '{"a": "]"}')],
    "[TOOL_CALLS] [] none": ["[TOOL_CALLS] [] none"],
    "[TOOL_CALLS] of it": ["[TOOL_CALLS] of it"],
    '[TOOL_CALLS][{"name": "f", "arguments": {}}, and': [("f", "{}"), ", and"],
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "cu': [("f", '{"a": "cu"}')],
    "[TOOL_CALLS]get_wea": ["[TOOL_CALLS]get_wea"],
}


def xml(name: str, **values: str) -> str:
    """A call as Qwen 3 Coder writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


XML = {
    xml("get_weather", city="Paris", days="3"): [("get_weather", PARIS)],
    "Let me look.\n" + xml("f") + "\n" + xml("get_weather", days="3") + "\nDone.": [
        "Let me look.",
        ("f", "{}"),
        ("get_weather", '{"days": 3}'),
        "Done.",
    ],
    # text is text, whatever it looks like; a line end next to a tag is the tag's
    xml("get_weather", city='"5" <b>\n\\</x>'): [("get_weather", '{"city": "\\"5\\" <b>\\n\\\\</x>"}')],
    xml("get_weather", city="\na\n"): [("get_weather", '{"city": "\\na\\n"}')],
    xml("get_weather", city=""): [("get_weather", '{"city": ""}')],
    "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>": [("f", '{"a": "x"}')],
    # other types are JSON, or Python's words for it, or text if they are neither
    xml("get_weather", exact="True", list="[1, {}]", more="three", days="3.5"): [
        ("get_weather", '{"exact": true, "list": [1, {}], "more": "three", "days": 3.5}')
    ],
    xml("unknown", days="3"): [("unknown", '{"days": "3"}')],
    "<tool_call>\n<function=f": ["<tool_call>\n<function=f"],
    "<tool_call>\n<function=f>\n<parameter=ci": [("f", "{}")],
    '<tool_call>{"name": "f"}</tool_call>': ['<tool_call>{"name": "f"}</tool_call>'],
    "<tool_call><function=f>oops</tool_call>": ["<tool_call><function=f>oops</tool_call>"],
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar": [("get_weather", '{"city": "Par"}')],
    "<tool_call>\n<function=get_weather>\n<parameter=days>\n1": [("get_weather", '{"days": 1}')],
    "<tool_call><function=f><parameter=a>x</parameter>oops": [("f", '{"a": "x</parameter>oops"}')],
}
OUTPUTS = [
    *(("qwen3_coder", text, parts) for text, parts in XML.items()),
    *(("hermes", text, parts) for text, parts in (HERMES | HERMES_BROKEN | HERMES_CUT).items()),
    *(("llama3", text, parts) for text, parts in LLAMA3.items()),
    *(("mistral", text, parts) for text, parts in MISTRAL.items()),
]


@pytest.mark.parametrize(("family", "text", "parts"), OUTPUTS)
def test_an_output_is_read_alike_in_one_piece_and_in_characters(family, text, parts):
    parts = parts_of(parts)
    assert read(family, text) == parts
    assert read(family, text, cuts=range(len(text))) == parts


REASONING = {
    ("<think>\nHm, 3 < 4.\n</think>\n\nYes.", False): [ReasoningPart("Hm, 3 < 4."), TextPart("Yes.")],
    ("Hm.\n</think>\n\nYes.", True): [ReasoningPart("Hm."), TextPart("Yes.")],
    ("\n\n<think>\n\n</think>\n\nYes.", False): [TextPart("Yes.")],
    ("Yes. <think>no</think>", False): [TextPart("Yes. <think>no</think>")],
    ("<think>a <think> b</think>c</think>d", False): [ReasoningPart("a <think> b"), TextPart("c</think>d")],
    ("Cut off </thi", True): [ReasoningPart("Cut off </thi")],
    ("<thi", False): [TextPart("<thi")],
    ("", True): [],
    ("  \n", False): [TextPart("  \n")],
    ('<think>\n<tool_call>{"name": "f"}\n</think>\n<tool_call>{"name": "f"}</tool_call>', False): [
        ReasoningPart('<tool_call>{"name": "f"}'),
        *parts_of([("f", "{}")]),
    ],
}


@pytest.mark.parametrize(("case", "parts"), REASONING.items())
def test_reasoning_comes_before_the_answer(case, parts):
    text, opened = case
    assert read("hermes", text, tags=THINK, opened=opened) == parts
    assert read("hermes", text, range(len(text)), tags=THINK, opened=opened) == parts


def test_a_marker_token_is_a_tag_and_its_spelling_too():
    special = {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "[CALL_ID]"}
    written = "See [TOOL_CALLS]f[CALL_ID]Xy3456789[ARGS]{}"
    marked = written
    for id, tag in special.items():
        marked = marked.replace(tag, chr(0xE000 + id))
    assert read("mistral", marked, special=special) == read("mistral", written)
    assert len(read("mistral", written)) == 2


def test_a_misplaced_marker_ends_a_call_and_stays_visible():
    special = {1: "[TOOL_CALLS]", 2: "[ARGS]"}
    parts = read("mistral", 'a\ue002b \ue001f\ue002{"a": \ue001f\ue002{}', special=special)
    assert parts == parts_of(["a[ARGS]b", ("f", "{}"), '"a":', ("f", "{}")])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", 'One. <tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_call> Two. <tool_call>{"name": "f"}'),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}'),
    ],
)
def test_without_parallel_calls_the_first_one_is_the_end(family, text):
    parts = read(family, text, parallel=False)
    assert calls_of(parts) == [("f", '{"a": 1}')]
    assert text_of(parts) in ("", "One.")
