"""The growing output items of a response, and their events."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from foresay.server.api.common.items import Item, Items
from foresay.server.api.responses import events, schemas
from foresay.server.api.responses.events import ResponseEvent
from foresay.server.api.responses.items import new_id
from foresay.server.api.responses.tools import Toolbox, spoken_input
from foresay.server.schemas.tokens import ChatTokenLogprob
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart


class ItemEvents(NamedTuple):
    """The events for more of an item's text, and for all of it."""

    delta: Callable[..., ResponseEvent]
    done: Callable[..., ResponseEvent]


KINDS: dict[type[schemas.OutputItem], ItemEvents] = {
    schemas.OutputMessage: ItemEvents(events.OutputTextDelta, events.OutputTextDone),
    schemas.ReasoningItem: ItemEvents(events.ReasoningTextDelta, events.ReasoningTextDone),
    schemas.FunctionCall: ItemEvents(events.ArgumentsDelta, events.ArgumentsDone),
    schemas.CustomToolCall: ItemEvents(events.CustomInputDelta, events.CustomInputDone),
}


class ResponseItems(Items[ResponseEvent]):
    """The items of a response; complete ones are added to ``output``. status: of the next item that closes. logprobs:
    of the tokens since the last text. The sender numbers the events.
    """

    def __init__(self, output: list[schemas.OutputItem], toolbox: Toolbox) -> None:
        super().__init__()
        self.status: schemas.ItemStatus = "completed"
        self.logprobs: list[ChatTokenLogprob] = []
        self._output, self._toolbox = output, toolbox
        self._logprobs_so_far: list[ChatTokenLogprob] = []

    def opens(self, item: Item) -> list[ResponseEvent]:
        """Events for a new item and its only content part; copied, since they may be sent later."""
        item.made, self._logprobs_so_far = _begun(item.first, self._toolbox), []
        added = events.OutputItemAdded(output_index=item.index, item=msgspec.structs.replace(item.made))
        part = self._content(item)
        return [added] if part is None else [added, events.ContentPartAdded(**_inside(item), part=part)]

    def grows(self, item: Item, more: str) -> list[ResponseEvent]:
        """Events for a growing item; none for a custom tool, whose input is known only when its arguments are
        complete."""
        taken, self.logprobs = self.logprobs, []
        if isinstance(item.made, schemas.OutputMessage):  # those of reasoning and calls are dropped
            self._logprobs_so_far += taken
            return [_delta(item, more, logprobs=taken)] if more else []
        return [_delta(item, more)] if more and not isinstance(item.made, schemas.CustomToolCall) else []

    def empty_delta(self) -> list[ResponseEvent]:
        """An empty delta of the open item, to report tokens without text."""
        return [] if self.open is None else [_delta(self.open, "")]

    def closes(self, item: Item) -> list[ResponseEvent]:
        """Events for a complete item; it gets the logprobs of tokens without text."""
        self._logprobs_so_far += self.logprobs
        self.logprobs = []
        item.made.status = self.status
        self._output.append(item.made)
        return [*self._done(item), events.OutputItemDone(output_index=item.index, item=item.made)]

    def _content(self, item: Item) -> schemas.OutputText | schemas.ReasoningText | None:
        """The item's only content part so far; None for a call."""
        match item.made:
            case schemas.OutputMessage():
                return schemas.OutputText(text=item.text, logprobs=list(self._logprobs_so_far))
            case schemas.ReasoningItem():
                return schemas.ReasoningText(text=item.text)
        return None

    def _done(self, item: Item) -> Sequence[ResponseEvent]:
        """Events for the complete text."""
        inside, done, made, part = _inside(item), KINDS[type(item.made)].done, item.made, self._content(item)
        if part is not None:
            made.content = [part]
            more = {"logprobs": part.logprobs} if isinstance(part, schemas.OutputText) else {}
            return done(**inside, text=item.text, **more), events.ContentPartDone(**inside, part=part)
        if isinstance(made, schemas.FunctionCall):
            made.arguments = item.text
            return (done(**inside, name=made.name, arguments=item.text),)
        made.input = spoken_input(item.text)
        return _delta(item, made.input), done(**inside, input=made.input)


def _inside(item: Item) -> dict[str, Any]:
    """The fields that locate an event about an item's text."""
    location = {"item_id": item.made.id, "output_index": item.index}
    return (
        location | {"content_index": 0}
        if isinstance(item.made, schemas.OutputMessage | schemas.ReasoningItem)
        else location
    )


def _delta(item: Item, text: str, **more: Any) -> ResponseEvent:
    return KINDS[type(item.made)].delta(**_inside(item), delta=text, **more)


def _begun(first: Part, toolbox: Toolbox) -> schemas.OutputItem:
    match first:
        case TextPart():
            return schemas.OutputMessage(id=new_id("message"), status="in_progress")
        case ReasoningPart():
            return schemas.ReasoningItem(id=new_id("reasoning"), status="in_progress")
        case ToolCallPart():
            name = toolbox.client_name(first.name or "")
            make, kind = (
                (schemas.CustomToolCall, "custom_tool_call") if name.custom else (schemas.FunctionCall, "function_call")
            )
            return make(
                id=new_id(kind),
                status="in_progress",
                call_id=first.id or f"call_{uuid.uuid4().hex}",
                name=name.name,
                namespace=name.namespace or UNSET,
            )
