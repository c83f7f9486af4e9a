"""The answer of ``/v1/responses``: parts of the output become items, and every change of an item an event.

::

    created  in_progress
    [ output_item.added  content_part.added  delta ..  done  content_part.done  output_item.done ]..
    completed | incomplete | failed
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.api.common.answer import Answer, Item, Items, completion_details
from foresay.server.api.common.route import NAMED_EVENTS
from foresay.server.api.responses import schemas
from foresay.server.api.responses.items import Toolbox, new_id, spoken_input
from foresay.server.models.service import AnswerOrigin
from foresay.server.schemas.bounds import shown
from foresay.server.schemas.chat import ChatTokenLogprob, Provenance
from foresay.server.schemas.errors import ApiError
from foresay.server.schemas.shared import ErrorBody, ErrorDetail
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart

_DONE = b"data: [DONE]\n\n"
#: Server-sent events: every stream ends with ``[DONE]``, even after an error.
FRAMING = msgspec.structs.replace(NAMED_EVENTS, done=_DONE, broken=_DONE)

#: Events for more of an item's text, and for all of it: their names, and the field of the whole.
KINDS: dict[type[schemas.OutputItem], tuple[str, str]] = {
    schemas.OutputMessage: ("output_text", "text"),
    schemas.ReasoningItem: ("reasoning_text", "text"),
    schemas.FunctionCall: ("function_call_arguments", "arguments"),
    schemas.CustomToolCall: ("custom_tool_call_input", "input"),
}
#: The types of all events.
TYPES = (
    *(f"response.{name}" for name in ("created", "in_progress", "completed", "incomplete", "failed")),
    *(f"response.{part}.{change}" for part in ("output_item", "content_part") for change in ("added", "done")),
    *(f"response.{name}.{change}" for name, _ in KINDS.values() for change in ("delta", "done")),
    "error",
)


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event, the same over server-sent events and a WebSocket, with the fields of its type (docs/protocol.md).

    sequence_number: grows within the response. stream_id: of the ``response.create`` that requested it. response: the
    current one, of events about it as a whole. item_id, output_index, content_index: what an item's event is about.
    delta: more of it; provenance: of the tokens since the last delta, if requested. text, arguments, input: all of it.
    code, message, param, error: of the last event of a stream whose model could not be loaded.
    """

    type: Annotated[str, shown(enum=list(TYPES))]
    sequence_number: int = 0
    stream_id: str | UnsetType = UNSET
    response: schemas.Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: schemas.OutputItem | UnsetType = UNSET
    part: schemas.OutputText | schemas.ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    provenance: Provenance | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    error: ErrorDetail | UnsetType = UNSET


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
        made, part = msgspec.structs.replace(item.made), self._content(item)
        added = ResponseEvent(type="response.output_item.added", output_index=item.index, item=made)
        if part is None:
            return [added]
        return [added, ResponseEvent(type="response.content_part.added", **_inside(item), part=part)]

    def grows(self, item: Item, more: str) -> list[ResponseEvent]:
        """Events for a growing item; none for a custom tool, whose input is known only when its arguments are
        complete."""
        taken, self.logprobs = self.logprobs, []
        if isinstance(item.made, schemas.OutputMessage):  # those of reasoning and calls are dropped
            self._logprobs_so_far += taken
        return [_delta(item, more, taken)] if more and not isinstance(item.made, schemas.CustomToolCall) else []

    def closes(self, item: Item) -> list[ResponseEvent]:
        """Events for a complete item; it gets the logprobs of tokens without text."""
        self._logprobs_so_far += self.logprobs
        self.logprobs = []
        item.made.status = self.status
        self._output.append(item.made)
        done = ResponseEvent(type="response.output_item.done", output_index=item.index, item=item.made)
        return [*self._done(item), done]

    def _content(self, item: Item) -> schemas.OutputText | schemas.ReasoningText | None:
        """The item's only content part so far; None for a call."""
        match item.made:
            case schemas.OutputMessage():
                return schemas.OutputText(text=item.text, logprobs=list(self._logprobs_so_far))
            case schemas.ReasoningItem():
                return schemas.ReasoningText(text=item.text)
        return None

    def _done(self, item: Item) -> list[ResponseEvent]:
        """Events for the complete text."""
        inside, made, part = _inside(item), item.made, self._content(item)
        name, whole = KINDS[type(made)]
        done = ResponseEvent(type=f"response.{name}.done", **inside)
        setattr(done, whole, item.text)
        if part is not None:
            made.content = [part]
            done.logprobs = part.logprobs if isinstance(part, schemas.OutputText) else UNSET
            return [done, ResponseEvent(type="response.content_part.done", **inside, part=part)]
        if isinstance(made, schemas.FunctionCall):
            done.name, made.arguments = made.name, item.text
            return [done]
        done.input = made.input = spoken_input(item.text)
        return [_delta(item, made.input), done]


def _inside(item: Item) -> dict[str, Any]:
    """The fields that locate an event about an item's text."""
    location = {"item_id": item.made.id, "output_index": item.index}
    has_parts = isinstance(item.made, schemas.OutputMessage | schemas.ReasoningItem)
    return location | ({"content_index": 0} if has_parts else {})


def _delta(item: Item, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> ResponseEvent:
    event = ResponseEvent(type=f"response.{KINDS[type(item.made)][0]}.delta", **_inside(item), delta=text)
    event.logprobs = list(logprobs) if isinstance(item.made, schemas.OutputMessage) else UNSET
    return event


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


#: OpenAI's codes for why a response failed; all others are server errors.
FAILURES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
CANCELLED = "cancelled"


class Cancelled(ApiError):
    """The client cancelled a running response."""

    status, type, code = 409, "invalid_request_error", CANCELLED

    def __init__(self) -> None:
        super().__init__("The response was cancelled")


class ResponseAnswer(Answer):
    """One response in progress. ``response`` is its current state.

    toolbox: the client's names of its tools. stream_id: the WebSocket lane it belongs to. generates: false only
    computes the KV of the conversation, without output.
    """

    framing = FRAMING

    def __init__(
        self,
        origin: AnswerOrigin,
        choice: Choice,
        body: schemas.ResponseRequest,
        response: schemas.Response,
        toolbox: Toolbox,
        stream_id: str | None = None,
        generates: bool = True,
    ) -> None:
        super().__init__(origin, [choice], body)
        self.id, self.response = response.id, response
        response.warnings = self._warnings()
        self._generates = generates
        self._stream_id = msgspec.UNSET if stream_id is None else stream_id
        self._items = ResponseItems(response.output, toolbox)
        self._provenance_so_far, self._pending_provenance = Provenance([], []), Provenance([], [])
        self._next = 0

    @property
    def begun(self) -> bool:
        """Whether the first event was made."""
        return self._next > 0

    @property
    def over(self) -> bool:
        """Whether the last event was made."""
        return self.response.status != "in_progress"

    @property
    def tokens(self) -> list[int]:
        """Token ids of prompt and output."""
        return self.choices[0].request.prompt + (self.choices[0].tokens if self._generates else [])

    # -- Answer --------------------------------------------------------------------------------------------------

    def opening(self, index: int) -> list[msgspec.Struct]:
        now = msgspec.structs.replace(self.response, output=list(self.response.output))  # events may be sent later
        return self._events("created", now) + self._events("in_progress", now)

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        if not self._generates:
            return []
        self._items.logprobs += self._token_decoder.chat(piece.logprobs).content
        self._note_provenance(piece)
        emitted = self._items.take(piece.parts)
        self._attach_provenance(emitted)
        return self._numbered(emitted)

    def closing(self) -> list[msgspec.Struct]:
        """The last events: complete, or cut at the token limit."""
        if not self._generates:
            return self._prepared()
        complete = self.choices[0].finish_reason != "length"
        silent = not self.response.output and self._items.open is None
        emitted = self._items.take([TextPart("")] if silent else [])
        pending = self._pending_provenance
        if self._items.open is not None and (pending.steps or pending.tokens):
            emitted.append(_delta(self._items.open, ""))  # to report tokens without text
            self._attach_provenance(emitted)
        emitted += self._close("completed" if complete else "incomplete")
        status: schemas.Status = "completed" if complete else "incomplete"
        if complete:
            self.response.completed_at = int(time.time())
        else:
            self.response.incomplete_details = schemas.IncompleteDetails("max_output_tokens")
        return self._numbered(emitted) + self._events(status, self._ended(status))

    def _prepared(self) -> list[msgspec.Struct]:
        """The last event of a response without output."""
        self.response.completed_at = int(time.time())
        response = self._ended("completed")
        assert response.usage is not None
        response.usage.output_tokens, response.usage.total_tokens = 0, response.usage.input_tokens
        return self._events("completed", response)

    def broken(self, error: ErrorBody) -> msgspec.Struct:
        """The last event of a response that failed or was cancelled; its last item stays incomplete."""
        self._close("incomplete")
        if error.error.code == CANCELLED:
            return self._events("incomplete", self._ended("cancelled"))[0]
        code = FAILURES.get(error.error.type, "server_error")
        self.response.error = schemas.ResponseError(code, error.error.message)
        return self._events("failed", self._ended("failed"))[0]

    def whole(self, pieces: Sequence[Piece]) -> msgspec.Struct:
        raise AssertionError("a response is the sum of its events")

    # -- inside --------------------------------------------------------------------------------------------------

    def _note_provenance(self, piece: Piece) -> None:
        for provenance in (self._provenance_so_far, self._pending_provenance):
            provenance.steps += piece.steps
            provenance.tokens += piece.tokens

    def _attach_provenance(self, emitted: Sequence[ResponseEvent]) -> None:
        """Attach the pending provenance to the first event that adds to an item."""
        growing = next((event for event in emitted if event.delta is not UNSET), None)
        if growing is not None and (self._pending_provenance.steps or self._pending_provenance.tokens):
            growing.provenance, self._pending_provenance = self._pending_provenance, Provenance([], [])

    def _close(self, status: schemas.ItemStatus) -> list[ResponseEvent]:
        """Finish the item in progress, if there is one."""
        self._items.status = status
        return self._items.close()

    def _ended(self, status: schemas.Status) -> schemas.Response:
        """The final response."""
        response, choice = self.response, self.choices[0]
        response.status = status
        usage = self.usage
        details = msgspec.structs.asdict(completion_details(self.choices))
        response.usage = schemas.ResponseUsage(
            usage.prompt_tokens,
            schemas.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            schemas.OutputTokensDetails(**details),
            usage.total_tokens,
        )
        if choice.finished:
            response.seed = choice.seed
        response.system_fingerprint, response.metrics = self.origin.fingerprint, self._metrics()
        response.warnings = self._warnings()
        if self.body.provenance:
            response.provenance = self._provenance_so_far
        return response

    def _events(self, name: str, response: schemas.Response) -> list[msgspec.Struct]:
        """The event about the response as a whole, in a list."""
        return self._numbered([ResponseEvent(type=f"response.{name}", response=response)])

    def _numbered(self, emitted: Sequence[ResponseEvent]) -> list[msgspec.Struct]:
        """The events with their numbers."""
        for event in emitted:
            event.sequence_number, event.stream_id = self._next, self._stream_id
            self._next += 1
        return list(emitted)
