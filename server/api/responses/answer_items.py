"""An output item of a response while it grows, and the events of its life."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from foresay.server.api.responses import events
from foresay.server.api.responses.events import ResponseEvent
from foresay.server.api.responses.items import new_id
from foresay.server.api.responses.schemas import (
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from foresay.server.api.responses.tools import Toolbox, spoken_input
from foresay.server.schemas.tokens import ChatTokenLogprob
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart

#: What tells of more of an item.
DELTAS: dict[type[OutputItem], Callable[..., ResponseEvent]] = {
    OutputMessage: events.OutputTextDelta,
    ReasoningItem: events.ReasoningTextDelta,
    FunctionCall: events.ArgumentsDelta,
    CustomToolCall: events.CustomInputDelta,
}


class ItemInProgress:
    """An item that began with the part ``first`` and may still grow. Its text, which is a message's or what the model
    thinks, a call's arguments or what a custom tool reads, is in ``item`` once it is over. Its events are numbered by
    whoever sends them.
    """

    def __init__(self, place: int, first: Part, toolbox: Toolbox) -> None:
        self.item = _begun(first, toolbox)
        self._first, self._place = first, place
        self._text, self._logprobs = "", list[ChatTokenLogprob]()
        self._inside: dict[str, Any] = {"item_id": self.item.id, "output_index": place}
        if self._content() is not None:
            self._inside["content_index"] = 0

    def takes(self, part: Part) -> bool:
        """Whether the part continues this item: of a call only more of the same one."""
        if isinstance(part, ToolCallPart) and isinstance(self._first, ToolCallPart):
            return part.index == self._first.index
        return type(part) is type(self._first)

    def opening(self) -> list[ResponseEvent]:
        """The item begins, and the only part of its content; copied, since the event may be sent later."""
        added = events.OutputItemAdded(output_index=self._place, item=msgspec.structs.replace(self.item))
        part = self._content()
        return [added] if part is None else [added, events.ContentPartAdded(**self._inside, part=part)]

    def more(self, part: Part, logprobs: Sequence[ChatTokenLogprob]) -> list[ResponseEvent]:
        """The item grows by a part that it takes. What a custom tool reads is known when its arguments are complete."""
        text = part.arguments if isinstance(part, ToolCallPart) else part.text
        self._text += text
        self._logprobs += logprobs
        if isinstance(self.item, CustomToolCall) or (isinstance(part, ToolCallPart) and not text):
            return []
        more = {"logprobs": logprobs} if isinstance(self.item, OutputMessage) else {}
        return [self._delta(text, **more)]

    def nothing(self) -> ResponseEvent:
        """The item grows by nothing: an event for what there is to say of tokens without text."""
        return self._delta("")

    def closing(self, status: ItemStatus, logprobs: Sequence[ChatTokenLogprob]) -> list[ResponseEvent]:
        """The item ends. logprobs: of tokens whose text was never shown."""
        self.item.status = status
        self._logprobs += logprobs
        return [*self._done(), events.OutputItemDone(output_index=self._place, item=self.item)]

    def _delta(self, text: str, **more: Any) -> ResponseEvent:
        return DELTAS[type(self.item)](**self._inside, delta=text, **more)

    def _content(self) -> OutputText | ReasoningText | None:
        """The only part of the item's content so far; a call has none."""
        match self.item:
            case OutputMessage():
                return OutputText(text=self._text, logprobs=list(self._logprobs))
            case ReasoningItem():
                return ReasoningText(text=self._text)
        return None

    def _done(self) -> list[ResponseEvent]:
        """The text is complete."""
        inside, text, part = self._inside, self._text, self._content()
        match self.item, part:
            case OutputMessage() as item, OutputText():
                item.content = [part]
                done = events.OutputTextDone(**inside, text=text, logprobs=part.logprobs)
                return [done, events.ContentPartDone(**inside, part=part)]
            case ReasoningItem() as item, ReasoningText():
                item.content = [part]
                return [events.ReasoningTextDone(**inside, text=text), events.ContentPartDone(**inside, part=part)]
            case FunctionCall() as item, _:
                item.arguments = text
                return [events.ArgumentsDone(**inside, name=item.name, arguments=text)]
            case CustomToolCall() as item, _:
                item.input = spoken_input(text)
                return [self._delta(item.input), events.CustomInputDone(**inside, input=item.input)]
        raise AssertionError("these are all kinds of items")


def _begun(first: Part, toolbox: Toolbox) -> OutputItem:
    match first:
        case TextPart():
            return OutputMessage(id=new_id("message"), status="in_progress")
        case ReasoningPart():
            return ReasoningItem(id=new_id("reasoning"), status="in_progress")
        case ToolCallPart():
            name = toolbox.client_name(first.name or "")
            make, kind = (CustomToolCall, "custom_tool_call") if name.custom else (FunctionCall, "function_call")
            return make(
                id=new_id(kind),
                status="in_progress",
                call_id=first.id or f"call_{uuid.uuid4().hex}",
                name=name.name,
                namespace=name.namespace or UNSET,
            )
