"""What an answer is made of while it grows: texts, thoughts and calls that open, grow and close, one behind the other.

::

    parts    "On"  "ce"     hm        look(  {"a"  :1}
    items    [ text    ]  [ thought ]  [ call         ]
    events   o  g   g  c  o  g      c  o  g     g     c
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from foresay.server.text.parts import Part, continues, said_by

Event = TypeVar("Event")


@dataclass(slots=True)
class Item:
    """A text, a thought or a call. first: the part it began with. text: so far; of a call its arguments. made: what the
    API makes of it."""

    index: int
    first: Part
    text: str = ""
    made: Any = None


class Items(Generic[Event]):
    """The items of one answer. What a client is told of an item's life, the API says; by default nothing."""

    def __init__(self) -> None:
        self.open: Item | None = None
        self._count = 0

    def take(self, parts: Iterable[Part]) -> list[Event]:
        """More of the answer: a part of another kind, or of another call, closes one item and opens the next."""
        events: list[Event] = []
        for part in parts:
            if self.open is None or not continues(self.open.first, part):
                events += self.close()
                self.open = Item(self._count, part)
                self._count += 1
                events += self.opens(self.open)
            self.open.text += said_by(part)
            events += self.grows(self.open, said_by(part))
        return events

    def close(self) -> list[Event]:
        """The item that is open is complete, if there is one."""
        item, self.open = self.open, None
        return [] if item is None else self.closes(item)

    def opens(self, item: Item) -> list[Event]:
        """An item begins, still empty."""
        return []

    def grows(self, item: Item, more: str) -> list[Event]:
        """An item grows; the beginning of a call may bring no text."""
        return []

    def closes(self, item: Item) -> list[Event]:
        """An item is complete."""
        return []
