"""Parts as the items of an answer: what continues what, and when an item opens, grows and closes."""

from __future__ import annotations

from foresay.server.api.common.answer import Item, Items
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, joined

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
