"""Output items of a response while they grow: each knows which parts it takes and the events of its life."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, ClassVar

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

Logprobs = list[ChatTokenLogprob]


class ItemInProgress:
    """An item that may still grow: ``item`` as it is so far. Its events are numbered by whoever sends them."""

    delta: ClassVar[Callable[..., ResponseEvent]]

    def __init__(self, item: OutputItem, place: int) -> None:
        self.item = item
        self._place = place
        self._inside: dict[str, Any] = {"item_id": item.id, "output_index": place}

    def takes(self, part: Part) -> bool:
        """Whether the part continues this item."""
        raise NotImplementedError

    def opening(self) -> list[ResponseEvent]:
        """The item begins; copied, since the event may be sent later."""
        return [events.OutputItemAdded(output_index=self._place, item=msgspec.structs.replace(self.item))]

    def more(self, part: Part, logprobs: Logprobs) -> list[ResponseEvent]:
        """The item grows by a part that it takes."""
        raise NotImplementedError

    def nothing(self) -> ResponseEvent:
        """The item grows by nothing: an event for what there is to say of tokens without text."""
        return self._delta("")

    def closing(self, status: ItemStatus, logprobs: Logprobs) -> list[ResponseEvent]:
        """The item ends. logprobs: of tokens whose text was never shown."""
        self.item.status = status
        return [*self._done(logprobs), events.OutputItemDone(output_index=self._place, item=self.item)]

    def _delta(self, text: str, **more: Any) -> ResponseEvent:
        return self.delta(**self._inside, delta=text, **more)

    def _done(self, logprobs: Logprobs) -> list[ResponseEvent]:
        """What is inside the item is complete."""
        raise NotImplementedError


class MessageInProgress(ItemInProgress):
    """Text of the assistant, the only part of its message."""

    delta = events.OutputTextDelta
    item: OutputMessage

    def __init__(self, place: int) -> None:
        super().__init__(OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress"), place)
        self._inside["content_index"] = 0
        self._part = OutputText(text="", annotations=[], logprobs=[])

    def takes(self, part: Part) -> bool:
        """More text."""
        return isinstance(part, TextPart)

    def opening(self) -> list[ResponseEvent]:
        """The message and its only part."""
        return [*super().opening(), events.ContentPartAdded(**self._inside, part=OutputText(text=""))]

    def more(self, part: Part, logprobs: Logprobs) -> list[ResponseEvent]:
        """A delta."""
        assert isinstance(part, TextPart)
        self._part.text += part.text
        self._part.logprobs += logprobs
        return [self._delta(part.text, logprobs=logprobs)]

    def _done(self, logprobs: Logprobs) -> list[ResponseEvent]:
        part = self._part
        part.logprobs += logprobs
        self.item.content = [part]
        done = events.OutputTextDone(**self._inside, text=part.text, logprobs=part.logprobs)
        return [done, events.ContentPartDone(**self._inside, part=part)]


class ReasoningInProgress(ItemInProgress):
    """What the model thinks, the only part of its item."""

    delta = events.ReasoningTextDelta
    item: ReasoningItem

    def __init__(self, place: int) -> None:
        super().__init__(ReasoningItem(id=f"rs_{uuid.uuid4().hex}", status="in_progress"), place)
        self._inside["content_index"] = 0
        self._part = ReasoningText(text="")

    def takes(self, part: Part) -> bool:
        """More reasoning."""
        return isinstance(part, ReasoningPart)

    def opening(self) -> list[ResponseEvent]:
        """The item and its only part."""
        return [*super().opening(), events.ContentPartAdded(**self._inside, part=ReasoningText(text=""))]

    def more(self, part: Part, logprobs: Logprobs) -> list[ResponseEvent]:
        """A delta."""
        assert isinstance(part, ReasoningPart)
        self._part.text += part.text
        return [self._delta(part.text)]

    def _done(self, logprobs: Logprobs) -> list[ResponseEvent]:
        self.item.content = [self._part]
        done = events.ReasoningTextDone(**self._inside, text=self._part.text)
        return [done, events.ContentPartDone(**self._inside, part=self._part)]


class CallInProgress(ItemInProgress):
    """A call of a function, or, in a subclass, of a custom tool."""

    delta: ClassVar[Callable[..., ResponseEvent]] = events.ArgumentsDelta
    item: FunctionCall | CustomToolCall
    kind: ClassVar[tuple[type[FunctionCall | CustomToolCall], str]] = FunctionCall, "fc"

    def __init__(self, place: int, first: ToolCallPart, name: ClientName) -> None:
        make, prefix = self.kind
        item = make(
            id=f"{prefix}_{uuid.uuid4().hex}",
            status="in_progress",
            call_id=first.id or f"call_{uuid.uuid4().hex}",
            name=name.name,
            namespace=name.namespace or UNSET,
        )
        super().__init__(item, place)
        self._index, self._arguments = first.index, ""

    def takes(self, part: Part) -> bool:
        """More of the same call."""
        return isinstance(part, ToolCallPart) and part.index == self._index

    def more(self, part: Part, logprobs: Logprobs) -> list[ResponseEvent]:
        """More of the arguments, if there are more."""
        assert isinstance(part, ToolCallPart) and isinstance(self.item, FunctionCall)
        self.item.arguments += part.arguments
        return [self._delta(part.arguments)] if part.arguments else []

    def _done(self, logprobs: Logprobs) -> list[ResponseEvent]:
        assert isinstance(self.item, FunctionCall)
        return [events.ArgumentsDone(**self._inside, name=self.item.name, arguments=self.item.arguments)]


class CustomCallInProgress(CallInProgress):
    """A call of a custom tool. Its text is known when the arguments that hold it are complete."""

    delta = events.CustomInputDelta
    kind = CustomToolCall, "ctc"

    def more(self, part: Part, logprobs: Logprobs) -> list[ResponseEvent]:
        """Nothing yet."""
        assert isinstance(part, ToolCallPart)
        self._arguments += part.arguments
        return []

    def _done(self, logprobs: Logprobs) -> list[ResponseEvent]:
        assert isinstance(self.item, CustomToolCall)
        self.item.input = spoken_input(self._arguments)
        return [self._delta(self.item.input), events.CustomInputDone(**self._inside, input=self.item.input)]
