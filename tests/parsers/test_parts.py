"""Parts of answers: as items, of a choice however its tokens are split, and as the chat template shows them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foresay.server.api.common.answer import Item, Items
from foresay.server.schemas.chat import Function
from foresay.server.text.choice import Choice
from foresay.server.text.conversation import Offer
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, joined
from foresay.spec.request import Delta, Request
from foresay.spec.sampling import SamplingParams
from tests.parsers.conftest import made
from tests.parsers.families import TOOL_FORMATS, written

PARTS: list[Part] = [
    ReasoningPart("h"),
    ReasoningPart("m"),
    TextPart("On"),
    TextPart("ce"),
    ToolCallPart(index=0, id="a", name="look"),
    ToolCallPart(index=0, arguments='{"a"'),
    ToolCallPart(index=0, arguments=":1}"),
    ToolCallPart(index=1, id="b", name="look", arguments="{}"),
    TextPart("end"),
]
TEXTS = ["hm", "Once", '{"a":1}', "{}", "end"]


class Events(Items[str]):
    def opens(self, item: Item) -> list[str]:
        return [f"open {item.index}{item.text}"]

    def grows(self, item: Item, more: str) -> list[str]:
        return [f"more {more}"] if more else []

    def closes(self, item: Item) -> list[str]:
        return [f"done {item.text}"]


def test_items_open_grow_and_close_one_behind_the_other() -> None:
    items = Events()
    events = [*items.take(PARTS[:5]), *items.take(PARTS[5:]), *items.close()]
    assert [line[5:] for line in events if line.startswith("done")] == TEXTS
    assert events[:4] == ["open 0", "more h", "more m", "done hm"]
    begins = [events.index(f"open {index}") for index in range(len(TEXTS))]
    ends = [events.index(f"done {text}") for text in TEXTS]
    assert all(begin == end + 1 for begin, end in zip(begins[1:], ends, strict=False))
    assert events[begins[2] + 1 : ends[2]] == ['more {"a"', "more :1}"], "a call without arguments brings nothing"
    assert items.close() == [], "nothing is open"


def test_an_api_without_events_of_an_item_emits_nothing() -> None:
    items = Items[str]()
    assert (items.take(PARTS), items.close()) == ([], [])


def test_neighbours_of_one_kind_are_one_part() -> None:
    merged = joined(PARTS)
    assert [getattr(part, "arguments", None) or getattr(part, "text", None) for part in merged] == TEXTS
    assert merged[2] == ToolCallPart(index=0, id="a", name="look", arguments='{"a":1}')


# -- a choice with a parser --------------------------------------------------------------------------------------------


END = 0
FUNCTION = Function(name="get_weather", parameters={"type": "object", "properties": {"n": {"type": "array"}}})
CALL = '{"name": "get_weather", "arguments": {"city": "Paris é🦊", "n": [1, {"a": "<tool_call>"}]}}'
ARGUMENTS = '{"city": "Paris é🦊", "n": [1, {"a": "<tool_call>"}]}'
TWICE = [("get_weather", json.loads(ARGUMENTS))] * 2
SCRIPTS = {
    **{family: f"Sure. {written(made(family), *TWICE)}" for family in TOOL_FORMATS},
    "hermes": f"Sure.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "qwen3": f"<think>\nHm…\n</think>\n\nSure.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "deepseek": f"Hm…\n</think>\n\nSure.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>",
    "llama3": f"Sure.<|python_tag|>{CALL}; {CALL}".replace("arguments", "parameters"),
    "mistral": f"Sure.[TOOL_CALLS][{CALL}, {CALL}]",
}


def answer(tokenizer, runs, parallel=True, finish="stop", opened=False, **options):
    """The choice, and all that became of the runs."""
    offer = Offer(listed=(FUNCTION,), functions=(FUNCTION,), parallel=parallel)
    parser = ChatFormat.of(tokenizer).parser("r", offer, opened)
    request = Request(id="r", prompt=[5, 6], params=SamplingParams())
    choice = Choice(request, tokenizer, [END], (), parser, **options)
    parts, ids = [], []
    for number, run in enumerate(runs):
        last = number == len(runs) - 1
        stop = END if last and finish == "stop" else None
        piece = choice.take(Delta(id="r", tokens=run, finish_reason=finish if last else None, stop_token=stop))
        parts, ids = parts + piece.parts, ids + piece.token_ids
        if piece.finish_at is not None:
            assert piece.finish_at == len(ids)
            parts += choice.take(Delta(id="r", tokens=[], finish_reason="stop")).parts
            break
    return choice, joined(parts), ids


def split(tokens, cuts):
    ends = sorted({0, len(tokens), *(1 + cut % len(tokens) for cut in cuts)})
    return [tokens[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("family", SCRIPTS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(0, 500), max_size=30))
def test_calls_in_any_split_of_the_tokens(family, tokenizer, cuts):
    tokens = [*tokenizer.encode(SCRIPTS[family], add_special_tokens=False), END]
    choice, parts, ids = answer(tokenizer, split(tokens, cuts), opened=family == "deepseek")
    thought = [ReasoningPart("Hm…")] if family in ("qwen3", "deepseek") else []
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    assert parts == [*thought, TextPart("Sure."), *calls]
    assert [(call.index, call.name, call.arguments) for call in calls] == [
        (index, "get_weather", ARGUMENTS) for index in range(2)
    ]
    assert ids == tokens
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", None)
    assert (choice.reasoning_tokens > 0) == bool(thought)
    assert choice.reasoning_tokens < choice.completion_tokens == len(tokens)


@pytest.mark.parametrize("family", SCRIPTS)
def test_the_answer_ends_behind_its_only_call(family, tokenizer):
    tokens = [*tokenizer.encode(SCRIPTS[family], add_special_tokens=False), END]
    results = []
    for size in (1, 3, len(tokens)):
        runs = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
        choice, parts, ids = answer(tokenizer, runs, parallel=False, opened=family == "deepseek")
        calls = [part for part in parts if isinstance(part, ToolCallPart)]
        assert [call.arguments for call in calls] == [ARGUMENTS]
        assert (choice.finish_reason, choice.completion_tokens) == ("tool_calls", len(ids))
        assert len(ids) < len(tokens)
        results.append((parts, ids))
    assert results[0] == results[1] == results[2]


def test_a_stop_string_ends_the_answer_inside_of_a_call(tokenizer):
    tokens = tokenizer.encode(SCRIPTS["hermes"], add_special_tokens=False)
    for size in (1, 4, len(tokens)):
        runs = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
        choice, parts, _ = answer(tokenizer, runs, stop=(' é🦊",',))
        assert [part.arguments for part in parts if isinstance(part, ToolCallPart)] == ['{"city": "Paris"}']
        assert choice.stop_reason == ' é🦊",'


@pytest.mark.parametrize("family", ["mistral"])
def test_text_held_back_comes_before_a_marker(tokenizer):
    """A half character and the beginning of a stop string, with a marker token behind them."""
    half = tokenizer.encode("ab🦊", add_special_tokens=False)[:-1]
    marker = tokenizer.special_id("[TOOL_CALLS]")
    rest = tokenizer.encode("x", add_special_tokens=False)
    whole, parts, _ = answer(tokenizer, [[*half, marker, *rest]], finish="length", stop=("b\ufffd!",))
    assert whole.finish_reason == "length"
    assert len(parts) == 1
    assert parts[0].text.startswith("ab\ufffd")
    assert parts[0].text.endswith("[TOOL_CALLS]x")
