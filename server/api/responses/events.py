"""The events of ``/v1/responses``, the same over server-sent events and a WebSocket, and the client's messages on the
latter.

Every event of a response carries a ``sequence_number`` that grows within the response; over a WebSocket it also carries
the ``stream_id`` of the ``response.create`` that requested it, if that had one.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.api.common.route import NAMED_EVENTS
from foresay.server.api.responses.schemas import OutputItem, OutputText, ReasoningText, Response, ResponseRequest
from foresay.server.schemas.chat import ChatTokenLogprob, Provenance
from foresay.server.schemas.shared import ErrorDetail

_DONE = b"data: [DONE]\n\n"
#: Their framing as server-sent events: every stream ends with ``[DONE]``, even after an error.
FRAMING = msgspec.structs.replace(NAMED_EVENTS, done=_DONE, broken=_DONE)

# -- server to client ----------------------------------------------------------------------------------------------


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """What all events of a response share."""

    sequence_number: int = 0
    stream_id: str | UnsetType = UNSET

    @property
    def type(self) -> str:
        """The event's name."""
        tag = self.__struct_config__.tag
        assert isinstance(tag, str)
        return tag


class LifecycleEvent(Event, kw_only=True):
    """An event that carries the current response."""

    response: Response


class ResponseCreated(LifecycleEvent, kw_only=True, tag="response.created"):
    """The first event."""


class ResponseInProgress(LifecycleEvent, kw_only=True, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(LifecycleEvent, kw_only=True, tag="response.completed"):
    """The last event of a complete response."""


class ResponseIncomplete(LifecycleEvent, kw_only=True, tag="response.incomplete"):
    """The last event of a response that was cut: at the token limit, or by the client (status ``cancelled``)."""


class ResponseFailed(LifecycleEvent, kw_only=True, tag="response.failed"):
    """The last event of a response that failed."""


class ItemEvent(Event, kw_only=True):
    """An event about an output item."""

    output_index: int
    item: OutputItem


class OutputItemAdded(ItemEvent, kw_only=True, tag="response.output_item.added"):
    """A new item begins."""


class OutputItemDone(ItemEvent, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""


class Placed(Event, kw_only=True):
    """An event about an item's content."""

    item_id: str
    output_index: int


class ContentPartAdded(Placed, kw_only=True, tag="response.content_part.added"):
    """A new part of an item begins."""

    content_index: int
    part: OutputText | ReasoningText


class ContentPartDone(Placed, kw_only=True, tag="response.content_part.done"):
    """A part of an item is complete."""

    content_index: int
    part: OutputText | ReasoningText


class ItemDelta(Placed, kw_only=True):
    """An event that adds to an item. provenance: of the tokens since the last such event, if requested."""

    delta: str
    provenance: Provenance | UnsetType = UNSET


class OutputTextDelta(ItemDelta, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    content_index: int
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(Placed, kw_only=True, tag="response.output_text.done"):
    """All the text of a part."""

    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(ItemDelta, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    content_index: int


class ReasoningTextDone(Placed, kw_only=True, tag="response.reasoning_text.done"):
    """All the reasoning of a part."""

    content_index: int
    text: str


class ArgumentsDelta(ItemDelta, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""


class ArgumentsDone(Placed, kw_only=True, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    name: str
    arguments: str


class StreamError(Event, kw_only=True, tag="error"):
    """The last event of a stream that began while its model was loading, if there is no response. error: the same in
    the format of Open Responses."""

    code: str | None
    message: str
    param: str | None
    error: ErrorDetail


class CustomInputDelta(ItemDelta, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input: all of it at once, when the call is complete."""


class CustomInputDone(Placed, kw_only=True, tag="response.custom_tool_call_input.done"):
    """All the input of a custom tool."""

    input: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | StreamError
    | CustomInputDelta
    | CustomInputDone
)

# -- only over a WebSocket -----------------------------------------------------------------------------------------


class SocketError(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """A message that could not be served. The socket stays open."""

    status: int
    error: ErrorDetail
    stream_id: str | UnsetType = UNSET


class Create(ResponseRequest, kw_only=True, tag_field="type", tag="response.create"):
    """Make a response: the fields of ``POST /v1/responses``.

    generate: false only computes the KV of the conversation, without output. stream_id: the lane; responses of one lane
    run one after the other, those of different lanes in parallel.
    """

    stream_id: str | None = None
    generate: bool | None = None
    prompt_cache_options: PromptCacheOptions | None = None


class PromptCacheOptions(msgspec.Struct, kw_only=True):
    """prewarm: the same as ``generate: false``."""

    prewarm: bool | None = None


class CancelResponse(msgspec.Struct, kw_only=True, tag_field="type", tag="response.cancel"):
    """End a response early (our addition, spelled as in OpenAI's Realtime API): by its id, or all of a lane, or all."""

    response_id: str | None = None
    stream_id: str | None = None


class Envelope(msgspec.Struct, kw_only=True):
    """What can be read of an otherwise invalid message."""

    stream_id: Any = None


ClientEvent = Create | CancelResponse
