"""What the families write whose format is an entry only: as published, and gone wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foresay.server.catalog.formats import FORMATS, REASONING, ToolFormat, Way
from foresay.server.schemas.chat import Function
from foresay.server.text.conversation import Offer
from foresay.server.text.grammars.answers import tool_call_grammar
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.parts import PlainText, ReasoningPart, TextPart
from tests.grammar.oracle import accepts
from tests.parsers.families import TEMPLATES, family_tokenizer
from tests.parsers.reading import parts_of, read, text_of

ROOT = Path(__file__).resolve().parents[2]
PARIS = '{"city": "Paris", "days": 3}'


def texts(*output):
    """No call at all in any of them."""
    return [(one, [one]) for one in output]


SEED = "<seed:tool_call>\n<function=f>\n{}</function>\n</seed:tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="f">\n{}</invoke>\n</minimax:tool_call>'
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
ASKED = "<|tool_call_begin|>functions.get_weather:7<|tool_call_argument_begin|>" + PARIS + "<|tool_call_end|>"
V31 = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
COHERE = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}{}\n]<|END_ACTION|>'
MARKED = "<|tool_call>call:f{{{}}}<tool_call|>"
CASES = {
    "seed_oss": [
        (
            "Let me look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
            "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n" + SEED.format("") + "\nDone.",
            ["Let me look.", ("get_weather", PARIS), ("f", "{}"), "Done."],
        ),
        # a value is all that is between the tags
        (SEED.format("<parameter=a>\nx\n</parameter>"), [("f", '{"a": "\\nx\\n"}')]),
        (SEED.format("<parameter=a>1 < 2 </par</parameter>"), [("f", '{"a": "1 < 2 </par"}')]),
        *texts("<seed:tool_call>get_weather</seed:tool_call>"),
        (SEED.format("<parameter=a>x</parameter>o")[:-18], [("f", '{"a": "x</parameter>o"}')]),
        ("<seed:tool_call><function=get_weather><parameter=city>Par", [("get_weather", '{"city": "Par"}')]),
    ],
    "minimax_m2": [
        (
            'So:<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="f">\n</invoke></minimax:tool_call>Done.',
            ["So:", ("get_weather", PARIS), ("f", "{}"), "Done."],
        ),
        (MINIMAX.format('<parameter name="a">line\n</parameter>\n'), [("f", '{"a": "line\\n"}')]),
        *texts('<minimax:tool_call>\n<invoke name="f>\n</invoke>', "<minimax:tool_call></minimax:tool_call>"),
        ('<minimax:tool_call><invoke name="f">\n<param', [("f", "{}")]),
    ],
    "glm45": [
        (
            "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>",
            ["Sure.", ("get_weather", PARIS), ("f", "{}")],
        ),
        # GLM-4.7 has no line ends; types are the schema's
        (
            "<tool_call>get_weather<arg_key>list</arg_key><arg_value>[1, {}]</arg_value><arg_key>more</arg_key>"
            "<arg_value>three</arg_value><arg_key>exact</arg_key><arg_value>true</arg_value></tool_call>",
            [("get_weather", '{"list": [1, {}], "more": "three", "exact": true}')],
        ),
        ("<tool_call>f<arg_key>a</arg_key><arg_value></arg_value></tool_call>", [("f", '{"a": ""}')]),
        *texts('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>not a call</tool_call>"),
        *texts("<tool_call>f<arg_key>a</arg_key>1</tool_call>"),
        ("<tool_call>get_weather<arg_key>days</arg_key><arg_value>1", [("get_weather", '{"days": 1}')]),
    ],
    "phi4_mini": [
        (
            'Yes. <|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|><|tool_call|>{"name": "add"}'
            "<|/tool_call|> Done.",
            ["Yes.", ("f", '{"a": 1}'), ("add", "{}"), "Done."],
        ),
        (
            f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "f"}}]<|/tool_call|>',
            [("get_weather", PARIS), ("f", "{}")],
        ),
        *texts("<|tool_call|>f()<|/tool_call|>", "<|tool_call|>[]<|/tool_call|>"),
        ('<|tool_call|>{"name": "f", "arguments": {"a', [("f", "{}")]),
    ],
    "granite3": [
        (
            f'Hm. <|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "f", "arguments": {{}}}}]',
            ["Hm.", ("get_weather", PARIS), ("f", "{}")],
        ),
        *texts('<|tool_call|>{"name": "f"}'),
    ],
    "kimi_k2": [
        (
            "Ok. " + KIMI.format(ASKED + ASKED.replace("7", "8")) + " Done.",
            [
                "Ok.",
                ("get_weather", PARIS, "functions.get_weather:7"),
                ("get_weather", PARIS, "functions.get_weather:8"),
                "Done.",
            ],
        ),
        (
            KIMI.format(ASKED).replace("<|tool_call_argument", " <|tool_call_argument"),
            [("get_weather", PARIS, "functions.get_weather:7")],
        ),
        *texts(KIMI.format(""), KIMI.format(ASKED.replace(":7", "")), KIMI.format(ASKED)[:70]),
        (KIMI.format(ASKED).partition("ys")[0], [("get_weather", '{"city": "Paris"}', "functions.get_weather:7")]),
    ],
    "deepseek_v3": [
        (
            "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ["Ok.", ("f", "{}"), ("add", "{}")],
        ),
        *texts("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ],
    "deepseek_v31": [
        (
            "Ok. "
            + V31.format(
                f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
                "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            )
            + " Done.",
            ["Ok.", ("get_weather", PARIS), ("f", "{}"), "Done."],
        ),
        *texts(V31.format("f{}"), V31.format("<｜tool▁call▁begin｜>f<｜tool▁sep｜>1<｜tool▁call▁end｜>")),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [1', [("f", '{"a": [1]}')]),
    ],
    "cohere": [
        (
            "Ok." + COHERE.replace("{}", ',\n    {"tool_call_id": "1", "tool_name": "add", "parameters": {}}'),
            ["Ok.", ("f", '{"a": 1}'), ("add", "{}")],
        ),
        ("<|START_RESPONSE|>It is sunny.<|END_RESPONSE|>", ["It is sunny."]),
        ("<|START_TEXT|>1 <|START_TEX", ["1 <|START_TEX"]),
        *texts('<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>'),
        (COHERE.replace("{}", ", so"), [("f", '{"a": 1}'), ", so\n]<|END_ACTION|>"]),
    ],
    "gemma4": [
        (
            'Ok. <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
            "<|tool_call>call:f{}<tool_call|> Done.",
            ["Ok.", ("get_weather", PARIS), ("f", "{}"), "Done."],
        ),
        # nothing is escaped between marks
        (
            MARKED.format('a:<|"|>\n"{b:[1,}\\ <tool_call|> é🦊 <|<|"|>,b:<|"|><|"|>'),
            [("f", '{"a": "\\n\\"{b:[1,}\\\\ <tool_call|> é🦊 <|", "b": ""}')],
        ),
        (
            MARKED.format('a:[1,{b:{},c:[]},[<|"|>x<|"|>,null],],<|"|>d e<|"|>:-1.5e3,f:false'),
            [("f", '{"a": [1, {"b": {}, "c": []}, ["x", null]], "d e": -1.5e3, "f": false}')],
        ),
        # what these models write at times
        (MARKED.format(' "a" : "x\\"}" , b: New York,c:None'), [("f", '{"a": "x\\"}", "b": "New York", "c": null}')]),
        ('<|tool_call>call:f(a=1, b=<|"|>)<|"|>)<tool_call|>', [("f", '{"a": 1, "b": ")"}')]),
        ("<|tool_call>call:f{a:007}<|tool_call>call:add{}", [("f", '{"a": "007"}'), ("add", "{}")]),
        ("<|tool_call>call:f{}<tool_call|>\n<|tool_response>response:f{", [("f", "{}")]),
        *texts("<|tool_call>f{}<tool_call|>", "<|tool_call>call:f[1]<tool_call|>", "<|tool_call>call:{}<tool_call|>"),
        *texts("<|tool_call>call:get_wea"),
        (MARKED.format("a:"), [("f", "{}"), "a:}<tool_call|>"]),
        (MARKED.format("a:[1")[:-1], [("f", '{"a": [1]}'), "}<tool_call|"]),
        (MARKED.format('a:<|"|>x<|"|> b:1'), [("f", '{"a": "x"}'), "b:1}<tool_call|>"]),
        ("<|tool_call>call:f{a:1<tool_call|>", [("f", '{"a": 1}')]),
        ('<|tool_call>call:get_weather{city:<|"|>Par<', [("get_weather", '{"city": "Par<"}')]),
        ("<|tool_call>call:get_weather{days:1", [("get_weather", '{"days": 1}')]),
    ],
    "olmo3": [
        (
            'Ok. <function_calls>get_weather(city="Paris", days=3)\nf()</function_calls> Done.',
            ["Ok.", ("get_weather", PARIS), ("f", "{}"), "Done."],
        ),
        # Python's literals and JSON's
        (
            "<function_calls>f(a=True, b=null, c=(1, -2e3,), d={'k': [None, 'it\\'s \"x\"'],}, e='\\u00e9\\n\\d')",
            [
                (
                    "f",
                    '{"a": true, "b": null, "c": [1, -2e3], "d": {"k": [null, "it\'s \\"x\\""]}, '
                    '"e": "\\u00e9\\n\\\\d"}',
                )
            ],
        ),
        ("<function_calls>f(a=word)</function_calls>", [("f", '{"a": "word"}')]),
        *texts('<function_calls>f("Paris")</function_calls>'),
        *texts("<function_calls>f(1, a=2)</function_calls>"),
        *texts("<function_calls></function_calls>"),
        ("<function_calls>f(a=[1)</function_calls>", [("f", '{"a": [1]}')]),
        ('<function_calls>get_weather(city="Par', [("get_weather", '{"city": "Par"}')]),
        ("<function_calls>f(days=1", [("f", '{"days": 1}')]),
    ],
}


@pytest.mark.parametrize(("family", "output", "parts"), [(family, *case) for family in CASES for case in CASES[family]])
def test_an_output_is_read_alike_at_every_split(family, output, parts):
    parts = parts_of(parts)
    assert read(family, output) == parts
    assert read(family, output, range(len(output))) == parts
    for cut in range(1, len(output)):
        assert read(family, output, [cut]) == parts


@pytest.mark.parametrize("family", [name for name, form in FORMATS.items() if not form.channels])
def test_its_template_shows_a_format_and_the_docs_list_it(family):
    assert ChatFormat.of(family_tokenizer(family)).calls == family
    assert f"\n| `{family}` | " in (ROOT / "docs" / "tools.md").read_text("utf-8")


def test_special_tokens_are_the_tags_they_spell():
    output, parts = CASES["deepseek_v31"][0]
    special = dict(enumerate(FORMATS["deepseek_v31"].tags))
    for id, tag in special.items():
        output = output.replace(tag, chr(0xE000 + id))
    assert read("deepseek_v31", output, special=special) == parts_of(parts)


@pytest.mark.parametrize(("opens", "closes"), REASONING.values())
def test_reasoning_is_read_between_the_familys_tags(opens, closes):
    output = f"{opens}\nHm, 1 < 2.\n{closes}\n\nYes. {opens}"
    expected = [ReasoningPart("Hm, 1 < 2."), TextPart(f"Yes. {opens}")]
    assert read("hermes", output, tags=(opens, closes)) == expected
    assert read("hermes", output, range(len(output)), tags=(opens, closes)) == expected
    assert read("hermes", output.removeprefix(opens), tags=(opens, closes), opened=True) == expected
    tokenizer = family_tokenizer("plain")
    tokenizer._templates.chat_template = f"{{% if thinks %}}{opens}{{% endif %}}"
    assert ChatFormat.of(tokenizer).thinks == (opens, closes)


def test_tags_around_an_answer_are_left_out_without_tools_too():
    cohere = ChatFormat.of(family_tokenizer("cohere")).parser("r", Offer(), opened=False)
    assert text_of(cohere.feed("<|START_RESPONSE|>Hi <|START_ACTION|>") + cohere.flush()) == "Hi <|START_ACTION|>"
    assert isinstance(ChatFormat.of(family_tokenizer("glm45")).parser("r", Offer(), opened=False), PlainText)


def test_a_format_is_one_entry(monkeypatch):
    """Calls in brackets, as Llama 4 writes them, which no entry has."""
    way = Way("{name}({parameters})", "<|python_start|>[", ", ", "]<|python_end|>", "{key}={value}")
    monkeypatch.setitem(FORMATS, "llama4", ToolFormat("<|python_start|>", (way,)))
    output = '<|python_start|>[get_weather(city="Paris", days=3), f()]<|python_end|>'
    assert read("llama4", output) == parts_of([("get_weather", PARIS), ("f", "{}")])
    tokenizer = family_tokenizer("plain")
    tokenizer._templates.chat_template = "<|python_start|>{{ tools }}"
    assert ChatFormat.of(tokenizer).calls == "llama4"
    functions = (Function(name="get_weather", parameters={"properties": json.loads(
        '{"city": {"type": "string"}, "days": {"type": "integer"}}')}), Function(name="f"))  # fmt: skip
    grammar = tool_call_grammar("llama4", Offer(listed=functions, functions=functions, required=True), {}).text
    assert accepts(grammar, output)
    assert not accepts(grammar, output.replace("3", '"3"'))


def test_tools_are_shown_under_the_name_that_the_template_has_for_them():
    """SmolLM3's template wants them as ``xml_tools``."""
    tokenizer = family_tokenizer("hermes")
    tokenizer._templates.chat_template = TEMPLATES["hermes"].replace("tools", "xml_tools").replace("xml_tools()", "")
    offered = Offer(listed=(Function(name="f"),), functions=(Function(name="f"),))
    assert ChatFormat.of(tokenizer).lists_tools
    ask = [{"role": "user", "content": "x"}]
    assert '"name": "f"' in tokenizer.render(ask, tools=offered.rendered()).text
    assert '"name"' not in tokenizer.render(ask, tools=offered.rendered(), template_kwargs={"xml_tools": []}).text
