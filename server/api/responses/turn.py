"""One response from request to record: prepared, run, and stored if allowed."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from msgspec.structs import replace

from foresay.server.api.common.route import error_body
from foresay.server.api.common.streaming import batches
from foresay.server.api.common.turns import chat_choices
from foresay.server.api.responses import schemas
from foresay.server.api.responses.answer import Cancelled, ResponseAnswer
from foresay.server.api.responses.items import SERVED, Toolbox, given_items
from foresay.server.api.responses.request import NAMES, chat_request, hints_left_out
from foresay.server.api.responses.store import PreviousResponseNotFound, Record, Responses
from foresay.server.engine.generation import Generation
from foresay.server.gateway.keys import CONTEXT
from foresay.server.models.service import Service
from foresay.server.schemas.bounds import MOST_REPEATED_BYTES, check_bytes
from foresay.server.schemas.errors import described
from foresay.server.text.choice import Choice
from foresay.spec.errors import ContextLengthExceeded


class ResponseTurn:
    """A response that is ready to run. Leaving :meth:`running` always ends it and keeps its record.

    keeps: whether the record is kept.
    """

    def __init__(self, service: Service, answer: ResponseAnswer, record: Record, keeps: bool) -> None:
        self.answer, self.record = answer, record
        self._service, self._keeps = service, keeps
        self._generation: Generation | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End it early; it keeps its output."""
        self._cancelled = True
        if self._generation is not None:
            self._generation.abort(Cancelled())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Generation]:
        """Run it in the engine."""
        registry, key = self._service.server.of(Responses).running, (self.record.tenant, self.record.id)
        registry[key], self.record.cancel = self.record, self.cancel
        try:
            if self._cancelled:
                raise Cancelled
            with NAMES:
                async with self._service.generation(self.answer.choices) as generation:
                    self._run(generation)
                    yield generation
        except Exception as error:
            if self.answer.begun and not self.answer.over and not isinstance(error, ConnectionError):
                self.answer.broken(error_body(error)[1])
            raise
        finally:
            self._generation = self.record.cancel = None
            del registry[key]
            self._keep()

    def _run(self, generation: Generation) -> None:
        self._generation = generation
        if self._cancelled:  # while the request was being submitted
            generation.abort(Cancelled())

    async def batches(self, generation: Generation, timeout: float | None) -> AsyncIterator[list[msgspec.Struct]]:
        """Events, one batch per engine step. The first batch waits for the engine, at most ``timeout`` seconds, so
        that the engine's refusals are reported as errors and not as failed responses.
        """
        with NAMES:
            async for events, _ in batches(self.answer, generation, lambda: None if self.answer.begun else timeout):
                yield events

    def _keep(self) -> None:
        """The response has ended: close it if that has not happened (the client left), and keep it if it ever began."""
        if not self.answer.begun and not self._cancelled:
            return
        if not self.answer.over:
            self.answer.broken(described(Cancelled())[1])
        self.record.tokens = self.answer.tokens
        self.record.over.set()
        if self._keeps:
            self._service.server.of(Responses).store.keep(self.record)


async def prepared(
    service: Service,
    body: schemas.ResponseRequest,
    socket_id: str = "",
    stream_id: str | None = None,
    generates: bool = True,
) -> ResponseTurn:
    """A turn that is ready to run. socket_id: its WebSocket, which keeps what is not stored. generates: see
    :class:`ResponseAnswer`.

    Raises :class:`~foresay.spec.errors.InvalidRequest` with the field's name, or an
    :class:`~foresay.server.schemas.errors.ApiError`.
    """
    before, earlier, given = given_now(service, body, socket_id)
    toolbox = Toolbox.of(body.tools, given, earlier)
    choice, dropped = await _choice(service, body, before, earlier, given, toolbox, generates)
    origin = service.origin(uuid.uuid4().hex, body.model)
    response = _response(body, origin.id, origin.model, choice)
    answer = ResponseAnswer(origin, choice, body, response, toolbox, stream_id, generates)
    service.warned.note(answer.warnings)
    items = (*earlier, *given)[dropped:]
    where, tenant = "" if response.store else socket_id, CONTEXT.get().caller.tenant
    record = Record(tenant=tenant, response=response, items=items, socket_id=where, fingerprint=origin.fingerprint)
    return ResponseTurn(service, answer, record, response.store or socket_id != "")


def given_now(
    service: Service, body: schemas.ResponseRequest | schemas.CompactRequest, socket_id: str = ""
) -> tuple[Record | None, Sequence[schemas.InputItem], list[schemas.InputItem]]:
    """The response that is followed, if one is, its conversation, and the items given now. Raises
    :class:`PreviousResponseNotFound`."""
    store, tenant, previous = service.server.of(Responses).store, CONTEXT.get().caller.tenant, body.previous_response_id
    before = None if previous is None else store.find(tenant, previous, socket_id)
    if before is None and previous is not None:
        message = f"Previous response with id {previous!r} not found: it was not stored, or was dropped to make room"
        raise PreviousResponseNotFound("previous_response_id", message)
    given = given_items(body.input, partial(store.item, tenant, socket_id=socket_id))
    return before, () if before is None else before.conversation, given


async def _choice(
    service: Service,
    body: schemas.ResponseRequest,
    before: Record | None,
    earlier: Sequence[schemas.InputItem],
    given: list[schemas.InputItem],
    toolbox: Toolbox,
    generates: bool,
) -> tuple[Choice, int]:
    """The choice to run, and how many items were dropped to make it fit (with truncation ``auto``): as few of the
    oldest turns as possible, so that all the requested output fits, if possible; else some.
    """
    spoken = [] if before is None or before.fingerprint != service.fingerprint else before.tokens
    attempt = partial(_attempt, service, body, toolbox, generates, spoken)
    items = [*earlier, *given]
    starts = [index for index, item in enumerate(items) if index and item.role == "user"]
    for strict in (True, False) if body.truncation == "auto" else ():
        with contextlib.suppress(ContextLengthExceeded):
            return await attempt(earlier, given, strict), 0
        best, low, high = None, 0, len(starts)
        while low < high:  # in few attempts: each one renders and encodes the conversation
            middle = (low + high) // 2
            try:
                best, high = (await attempt((), items[starts[middle] :], strict), starts[middle]), middle
            except ContextLengthExceeded:
                low = middle + 1
        if best is not None:
            return best
    return await attempt(earlier, given), 0


async def _attempt(
    service: Service,
    body: schemas.ResponseRequest,
    toolbox: Toolbox,
    generates: bool,
    spoken: Sequence[int],
    earlier: Sequence[schemas.InputItem],
    given: Sequence[schemas.InputItem],
    strict: bool = False,
) -> Choice:
    """spoken: the token ids of the earlier items, if this model has read them. strict: refuse if the requested output
    does not fit."""
    words = service.opened()[0].chat_format.words
    chat = chat_request(body, earlier, given, toolbox, generates, words)
    with NAMES.also(toolbox.fields) as names:
        (choice,) = names.warned(await chat_choices(service, chat, spoken if earlier else (), strict))
    choice.warnings = (*choice.warnings, *toolbox.warnings, *hints_left_out(body, words))
    return choice


#: Fields of a response that are the request's, and those that say how it is sampled.
_REPEATED = ("instructions", "max_output_tokens", "previous_response_id", "user", "safety_identifier")
_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


def _response(body: schemas.ResponseRequest, id: str, model: str, choice: Choice) -> schemas.Response:
    """The response before any output: the request's fields, with the values chosen for it."""
    params = choice.request.params
    for field in ("tools", "metadata"):  # three events repeat them
        check_bytes(getattr(body, field), MOST_REPEATED_BYTES, field)
    return schemas.Response(
        id=f"resp_{id}",
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or schemas.Reasoning(),
        store=body.store is not False,
        text=_text(body.text or schemas.TextOptions()),
        tool_choice=_tool_choice(body.tool_choice or "auto"),
        tools=[tool for tool in body.tools or () if tool.type in SERVED],
        top_logprobs=body.top_logprobs or 0,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
        prompt_cache_key=body.prompt_cache_key,
        **{name: getattr(body, name) for name in _REPEATED},
        **{name: getattr(params, name) for name in _SAMPLED},
    )


def _text(wanted: schemas.TextOptions) -> schemas.TextOptions:
    """The requested text options, with defaults filled in."""
    format = wanted.format or schemas.TextFormat(type="text")
    if format.type == "json_schema":  # which holds strictly either way
        format = replace(format, description=format.description or None, strict=format.strict is not False)
    return schemas.TextOptions(format=format, verbosity=wanted.verbosity or "medium")


def _tool_choice(wanted: str | schemas.NamedChoice) -> str | schemas.NamedChoice:
    if isinstance(wanted, schemas.NamedChoice) and wanted.type == "allowed_tools":
        return replace(wanted, mode=wanted.mode or "auto")
    return wanted


async def whole(turn: ResponseTurn) -> schemas.Response:
    """Run a turn to its end; if cancelled, it keeps its output so far."""
    with contextlib.suppress(Cancelled):
        async with turn.running() as generation:
            async for _ in turn.batches(generation, None):
                pass
    return turn.record.response


async def prompt_length(service: Service, body: schemas.ResponseRequest) -> int:
    """The number of tokens of the request's prompt."""
    before, earlier, given = given_now(service, body)
    choice, _ = await _choice(service, body, before, earlier, given, Toolbox.of(body.tools, given, earlier), True)
    return len(choice.request.prompt)
