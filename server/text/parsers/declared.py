"""Output read as the tokenizer itself declares (its ``response_template``), by transformers' parser.

For models whose way of writing calls is none of ours. Text and reasoning come as they are written; a call comes when it
is complete, since only then it is parsed. It is fed a character at a time, so that what it says does not depend on how
the output was cut. What it cannot read, it raises for: then the text is given as it was written, and so is the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart

CALLS = "tool_calls"
REASONING = ("reasoning_content", "reasoning", "thinking")

Event = dict[str, Any]


class Regions(Protocol):
    """transformers' ``ResponseParser``."""

    initial_events: list[Event]

    def feed(self, text: str) -> list[Event]:
        """What follows from more text."""
        ...

    def finalize(self) -> tuple[dict[str, Any], list[Event]]:
        """The output is over: the message, and what follows."""
        ...


class DeclaredParser:
    """An :class:`~server.text.parts.OutputParser` around transformers' parser.

    markers: special tokens by id, which the declaration may speak of. identify: gives call number i its id. calls:
    whether any may be made; parallel: whether more than one.
    """

    def __init__(
        self,
        regions: Regions,
        markers: Mapping[int, str],
        identify: Callable[[int], str],
        calls: bool = True,
        parallel: bool = True,
    ) -> None:
        self.complete = False
        self._regions, self._tags, self._identify = regions, markers, identify
        self._may_call, self._parallel = calls, parallel
        self._field: str | None = None
        self._pending = ""  # read, and not told yet
        self._called = 0
        self._lost = False
        for event in regions.initial_events:
            self._enter(event)

    @property
    def markers(self) -> frozenset[int]:
        """The tokens that are told by id."""
        return frozenset(self._tags)

    @property
    def thinking(self) -> bool:
        """Whether the output so far ends in the middle of reasoning."""
        return self._field in REASONING

    def feed(self, text: str) -> list[Part]:
        """More text."""
        return [part for character in text for part in self._read(character)]

    def marker(self, token: int) -> list[Part]:
        """A special token between the text so far and what follows."""
        return self._read(self._tags[token])

    def flush(self) -> list[Part]:
        """The output is over."""
        return [] if self._lost else self._told(lambda: self._regions.finalize()[1])

    def _read(self, text: str) -> list[Part]:
        if self.complete:
            return []
        if self._lost:
            return [TextPart(text)]
        self._pending += text
        return self._told(lambda: self._regions.feed(text))

    def _told(self, events: Callable[[], Iterable[Event]]) -> list[Part]:
        try:
            return [part for event in events() for part in self._parts(event)]
        except (ValueError, TypeError, KeyError, AttributeError):
            self._lost = True
            return [TextPart(self._pending)] if self._pending else []

    def _parts(self, event: Event) -> list[Part]:
        self._enter(event)
        kind, field = event["type"], event["field"]
        if field == CALLS:
            return self._calls(event["value"]) if kind == "region_close" else []
        if kind == "region_chunk":
            text = str(event["text"])
            self._pending = self._pending.partition(text)[2]
            return [ReasoningPart(text) if field in REASONING else TextPart(text)]
        if field in REASONING:
            self._pending = ""
        return []

    def _enter(self, event: Event) -> None:
        self._field = None if event["type"] == "region_close" else event["field"]

    def _calls(self, value: Any) -> list[Part]:
        """The calls of a region, or its text where none may be made."""
        written, self._pending = self._pending, ""
        if not self._may_call:
            return [TextPart(written)]
        calls = value if isinstance(value, list) else [value]
        return [self._call(call["function"]) for call in (calls if self._parallel else calls[:1])]

    def _call(self, function: Mapping[str, Any]) -> Part:
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        index, self._called, self.complete = self._called, self._called + 1, not self._parallel
        return ToolCallPart(index=index, id=self._identify(index), name=str(function["name"]), arguments=text)
