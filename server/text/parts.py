"""What an answer is made of for a chat client: text, reasoning, tool calls; and how output is split into them.

A parser sees the output as a growing text, in pieces of any size, and special tokens that it asked for by id; what it
says depends on the whole alone, never on how it was cut into pieces.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class TextPart(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ReasoningPart(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallPart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a tool call. id, name: on the first piece of each call. arguments: more of their JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = TextPart | ReasoningPart | ToolCallPart


class OutputParser(Protocol):
    """Splits one choice's output into parts."""

    @property
    def markers(self) -> frozenset[int]:
        """Token ids that are told to :meth:`marker` instead of becoming text."""
        ...

    @property
    def thinking(self) -> bool:
        """Whether the output so far ends in the middle of reasoning."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing more is wanted: the answer ends here, as at a stop string."""
        ...

    def feed(self, text: str) -> list[Part]:
        """More text; returns the parts that are certain now."""
        ...

    def marker(self, token: int) -> list[Part]:
        """A marker token between the text so far and what follows."""
        ...

    def flush(self) -> list[Part]:
        """The output is over: what was held back."""
        ...


class PlainText:
    """The parser of a model that only writes text."""

    markers: frozenset[int] = frozenset()
    thinking = False
    complete = False

    def feed(self, text: str) -> list[Part]:
        """The text as it is."""
        return [TextPart(text)] if text else []

    def marker(self, token: int) -> list[Part]:
        """There are no markers."""
        raise AssertionError("plain text has no markers")

    def flush(self) -> list[Part]:
        """Nothing is held back."""
        return []


def joined(parts: list[Part]) -> list[Part]:
    """The same parts with neighbours of one kind merged."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        match last, part:
            case TextPart(before), TextPart(text):
                merged[-1] = TextPart(before + text)
            case ReasoningPart(before), ReasoningPart(text):
                merged[-1] = ReasoningPart(before + text)
            case ToolCallPart(index=one), ToolCallPart(index=other, id=None, name=None) if one == other:
                assert isinstance(last, ToolCallPart)
                merged[-1] = msgspec.structs.replace(last, arguments=last.arguments + part.arguments)
            case _:
                merged.append(part)
    return merged
