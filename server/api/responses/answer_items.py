"""Output items of a response while they grow: each knows which parts it takes and the events of its life."""

from __future__ import annotations

import uuid
from typing import Protocol

import msgspec
from msgspec import UNSET

from server.api.responses import events
from server.api.responses.events import ResponseEvent
from server.api.responses.schemas import (
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from server.api.responses.tools import ClientName, spoken_input
from server.schemas.tokens import ChatTokenLogprob
from server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart


class ItemInProgress(Protocol):
    """An item that may still grow. Its events are numbered by whoever sends them."""

    @property
    def item(self) -> OutputItem:
        """The item so far."""
        ...

    def takes(self, part: Part) -> bool:
        """Whether the part continues this item."""
        ...

    def opening(self) -> list[ResponseEvent]:
        """The item begins."""
        ...

    def more(self, part: Part, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """The item grows by a part that it takes."""
        ...

    def nothing(self) -> ResponseEvent:
        """The item grows by nothing: an event for what there is to say of tokens without text."""
        ...

    def closing(self, status: ItemStatus, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """The item ends. logprobs: of tokens whose text was never shown."""
        ...


class MessageInProgress:
    """Text of the assistant."""

    def __init__(self, id: str, place: int) -> None:
        self.item = OutputMessage(id=id, status="in_progress")
        self._place = place
        self._part = OutputText(text="", annotations=[], logprobs=[])

    def takes(self, part: Part) -> bool:
        """More text."""
        return isinstance(part, TextPart)

    def opening(self) -> list[ResponseEvent]:
        """The message and its only part."""
        return [
            events.OutputItemAdded(output_index=self._place, item=copied(self.item)),
            self._added(OutputText(text="")),
        ]

    def _added(self, part: OutputText) -> ResponseEvent:
        place = self._place
        return events.ContentPartAdded(item_id=self.item.id, output_index=place, content_index=0, part=part)

    def more(self, part: Part, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """A delta."""
        assert isinstance(part, TextPart)
        self._part.text += part.text
        self._part.logprobs += logprobs
        return [self._delta(part.text, logprobs)]

    def nothing(self) -> ResponseEvent:
        """An empty delta."""
        return self._delta("", [])

    def _delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> events.OutputTextDelta:
        return events.OutputTextDelta(
            item_id=self.item.id, output_index=self._place, content_index=0, delta=text, logprobs=logprobs
        )

    def closing(self, status: ItemStatus, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """Text, part and message are done."""
        id, place, part = self.item.id, self._place, self._part
        part.logprobs += logprobs
        self.item.status, self.item.content = status, [part]
        return [
            events.OutputTextDone(
                item_id=id, output_index=place, content_index=0, text=part.text, logprobs=part.logprobs
            ),
            events.ContentPartDone(item_id=id, output_index=place, content_index=0, part=part),
            events.OutputItemDone(output_index=place, item=self.item),
        ]


class ReasoningInProgress:
    """What the model thinks."""

    def __init__(self, id: str, place: int) -> None:
        self.item = ReasoningItem(id=id, status="in_progress")
        self._place = place
        self._part = ReasoningText(text="")

    def takes(self, part: Part) -> bool:
        """More reasoning."""
        return isinstance(part, ReasoningPart)

    def opening(self) -> list[ResponseEvent]:
        """The item and its only part."""
        part = ReasoningText(text="")
        return [
            events.OutputItemAdded(output_index=self._place, item=copied(self.item)),
            events.ContentPartAdded(item_id=self.item.id, output_index=self._place, content_index=0, part=part),
        ]

    def more(self, part: Part, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """A delta."""
        assert isinstance(part, ReasoningPart)
        self._part.text += part.text
        return [self._delta(part.text)]

    def nothing(self) -> ResponseEvent:
        """An empty delta."""
        return self._delta("")

    def _delta(self, text: str) -> events.ReasoningTextDelta:
        place = self._place
        return events.ReasoningTextDelta(item_id=self.item.id, output_index=place, content_index=0, delta=text)

    def closing(self, status: ItemStatus, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """Text, part and item are done."""
        id, place, part = self.item.id, self._place, self._part
        self.item.status, self.item.content = status, [part]
        return [
            events.ReasoningTextDone(item_id=id, output_index=place, content_index=0, text=part.text),
            events.ContentPartDone(item_id=id, output_index=place, content_index=0, part=part),
            events.OutputItemDone(output_index=place, item=self.item),
        ]


class CallInProgress:
    """A call of a function."""

    def __init__(self, id: str, place: int, first: ToolCallPart, name: ClientName) -> None:
        self.item = FunctionCall(
            id=id,
            status="in_progress",
            call_id=first.id or f"call_{uuid.uuid4().hex}",
            name=name.name,
            namespace=name.namespace or UNSET,
        )
        self._place, self._index = place, first.index

    def takes(self, part: Part) -> bool:
        """More of the same call."""
        return isinstance(part, ToolCallPart) and part.index == self._index

    def opening(self) -> list[ResponseEvent]:
        """The call by its name."""
        return [events.OutputItemAdded(output_index=self._place, item=copied(self.item))]

    def more(self, part: Part, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """More of the arguments, if there are more."""
        assert isinstance(part, ToolCallPart)
        self.item.arguments += part.arguments
        return [self._delta(part.arguments)] if part.arguments else []

    def nothing(self) -> ResponseEvent:
        """An empty delta."""
        return self._delta("")

    def _delta(self, arguments: str) -> events.ArgumentsDelta:
        return events.ArgumentsDelta(item_id=self.item.id, output_index=self._place, delta=arguments)

    def closing(self, status: ItemStatus, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """Arguments and call are done."""
        item, place = self.item, self._place
        item.status = status
        return [
            events.ArgumentsDone(item_id=item.id, output_index=place, name=item.name, arguments=item.arguments),
            events.OutputItemDone(output_index=place, item=item),
        ]


class CustomCallInProgress:
    """A call of a custom tool. Its text is known when the arguments that hold it are complete."""

    def __init__(self, id: str, place: int, first: ToolCallPart, name: ClientName) -> None:
        self.item = CustomToolCall(
            id=id,
            status="in_progress",
            call_id=first.id or f"call_{uuid.uuid4().hex}",
            name=name.name,
            namespace=name.namespace or UNSET,
        )
        self._place, self._index, self._arguments = place, first.index, ""

    def takes(self, part: Part) -> bool:
        """More of the same call."""
        return isinstance(part, ToolCallPart) and part.index == self._index

    def opening(self) -> list[ResponseEvent]:
        """The call by its name."""
        return [events.OutputItemAdded(output_index=self._place, item=copied(self.item))]

    def more(self, part: Part, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """More of the arguments."""
        assert isinstance(part, ToolCallPart)
        self._arguments += part.arguments
        return []

    def nothing(self) -> ResponseEvent:
        """An empty delta."""
        return self._delta("")

    def _delta(self, text: str) -> events.CustomInputDelta:
        return events.CustomInputDelta(item_id=self.item.id, output_index=self._place, delta=text)

    def closing(self, status: ItemStatus, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        """The text, all at once, and the call are done."""
        item, place = self.item, self._place
        item.status, item.input = status, spoken_input(self._arguments)
        return [
            self._delta(item.input),
            events.CustomInputDone(item_id=item.id, output_index=place, input=item.input),
            events.OutputItemDone(output_index=place, item=item),
        ]


def copied(item: OutputItem) -> OutputItem:
    """The item as it is now, for an event that may be sent later."""
    return msgspec.structs.replace(item)
