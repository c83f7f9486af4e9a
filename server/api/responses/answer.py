"""The answer of ``/v1/responses``: parts of the output become items, and every change of an item an event.

::

    created  in_progress
    [ output_item.added  content_part.added  delta ..  done  content_part.done  output_item.done ]..
    completed | incomplete | failed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from foresay.server.api.common import statistics
from foresay.server.api.common.answer import Answer
from foresay.server.api.responses import events, schemas
from foresay.server.api.responses.answer_items import ResponseItems
from foresay.server.api.responses.events import ItemDelta, ResponseEvent
from foresay.server.api.responses.tools import Toolbox
from foresay.server.host.service import AnswerOrigin
from foresay.server.schemas.errors import ApiError
from foresay.server.schemas.shared import ErrorBody
from foresay.server.schemas.tokens import Provenance
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parts import TextPart

#: OpenAI's codes for why a response failed; all others are server errors.
FAILURES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
CANCELLED = "cancelled"


class Cancelled(ApiError):
    """The client cancelled a running response."""

    status, type, code = 409, "invalid_request_error", CANCELLED

    def __init__(self) -> None:
        super().__init__("The response was cancelled")


class ResponseAnswer(Answer):
    """One response in progress. ``response`` is its current state; ``record`` is called with every event.

    toolbox: the client's names of its tools. stream_id: the WebSocket lane it belongs to. generates: false only
    computes the KV of the conversation, without output.
    """

    framing = events.FRAMING

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
        self.record: Callable[[ResponseEvent], None] = lambda event: None
        self._stream_id = msgspec.UNSET if stream_id is None else stream_id
        self._items = ResponseItems(response.output, toolbox)
        self._provenance_so_far, self._pending_provenance = Provenance([], []), Provenance([], [])
        self._next = 0

    @property
    def over(self) -> bool:
        """Whether the last event was made."""
        return self.response.status != "in_progress"

    @property
    def output_ids(self) -> list[int]:
        """The token ids of the output."""
        return self.choices[0].tokens if self._generates else []

    # -- Answer --------------------------------------------------------------------------------------------------

    def opening(self, index: int) -> list[msgspec.Struct]:
        return self._numbered(
            [events.ResponseCreated(response=self._snapshot()), events.ResponseInProgress(response=self._snapshot())]
        )

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
        if self._pending_provenance.steps or self._pending_provenance.tokens:
            emitted += self._items.empty_delta()
            self._attach_provenance(emitted)
        emitted += self._close("completed" if complete else "incomplete")
        if complete:
            self.response.completed_at = int(time.time())
            return self._numbered([*emitted, events.ResponseCompleted(response=self._ended("completed"))])
        self.response.incomplete_details = schemas.IncompleteDetails("max_output_tokens")
        return self._numbered([*emitted, events.ResponseIncomplete(response=self._ended("incomplete"))])

    def _prepared(self) -> list[msgspec.Struct]:
        """The last event of a response without output."""
        self.response.completed_at = int(time.time())
        response = self._ended("completed")
        assert response.usage is not None
        response.usage.output_tokens, response.usage.total_tokens = 0, response.usage.input_tokens
        return self._numbered([events.ResponseCompleted(response=response)])

    def broken(self, error: ErrorBody) -> msgspec.Struct:
        """The last event of a response that failed or was cancelled; its last item stays incomplete."""
        self._close("incomplete")
        if error.error.code == CANCELLED:
            return self._numbered([events.ResponseIncomplete(response=self._ended("cancelled"))])[0]
        code = FAILURES.get(error.error.type, "server_error")
        self.response.error = schemas.ResponseError(code, error.error.message)
        return self._numbered([events.ResponseFailed(response=self._ended("failed"))])[0]

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> msgspec.Struct:
        for piece in pieces[0]:
            self.chunks(0, piece)
        self.closing()
        return self.response

    # -- inside --------------------------------------------------------------------------------------------------

    def _note_provenance(self, piece: Piece) -> None:
        for provenance in (self._provenance_so_far, self._pending_provenance):
            provenance.steps += piece.steps
            provenance.tokens += piece.tokens

    def _attach_provenance(self, emitted: Sequence[ResponseEvent]) -> None:
        """Attach the pending provenance to the first event that adds to an item."""
        growing = next((event for event in emitted if isinstance(event, ItemDelta)), None)
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
        usage = statistics.usage(self.choices)
        details = msgspec.structs.asdict(statistics.completion_details(self.choices))
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

    def _snapshot(self) -> schemas.Response:
        """A copy of the response now, for an event that may be sent later."""
        return msgspec.structs.replace(self.response, output=list(self.response.output))

    def _numbered(self, emitted: Sequence[ResponseEvent]) -> list[msgspec.Struct]:
        """The events with their numbers, recorded."""
        for event in emitted:
            event.sequence_number, event.stream_id = self._next, self._stream_id
            self._next += 1
            self.record(event)
        return list(emitted)
