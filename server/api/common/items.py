"""The items of a growing answer: texts, reasoning and calls that open, grow and close, one after the other.

::

    parts    "On"  "ce"     hm        look(  {"a"  :1}
    items    [ text    ]  [ thought ]  [ call         ]
    events   o  g   g  c  o  g      c  o  g     g     c
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from foresay.server.text.parts import Part, continues, part_text

Event = TypeVar("Event")


@dataclass(slots=True)
class Item:
    """A text, reasoning or a call. first: its first part. text: so far; a call's arguments. made: the API's own object
    for it."""

    index: int
    first: Part
    text: str = ""
    made: Any = None


class Items(Generic[Event]):
    """The items of one answer. Subclasses make the events of an API; by default there are none."""

    def __init__(self) -> None:
        self.open: Item | None = None
        self._count = 0

    def take(self, parts: Iterable[Part]) -> list[Event]:
        """Take more parts: one of another kind, or of another call, closes the open item and opens the next."""
        events: list[Event] = []
        for part in parts:
            if self.open is None or not continues(self.open.first, part):
                events += self.close()
                self.open = Item(self._count, part)
                self._count += 1
                events += self.opens(self.open)
            self.open.text += part_text(part)
            events += self.grows(self.open, part_text(part))
        return events

    def close(self) -> list[Event]:
        """Close the open item, if there is one."""
        item, self.open = self.open, None
        return [] if item is None else self.closes(item)

    def opens(self, item: Item) -> list[Event]:
        """Events of an item that opens, still empty."""
        return []

    def grows(self, item: Item, more: str) -> list[Event]:
        """Events of an item that grows; the first part of a call may have no text."""
        return []

    def closes(self, item: Item) -> list[Event]:
        """An item is complete."""
        return []
