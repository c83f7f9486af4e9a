"""Finished responses, kept in memory so that another can follow; each with its conversation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from foresay.server.api.common.kept import Kept, Store, StoreLimits, weight
from foresay.server.api.responses.events import ResponseEvent
from foresay.server.api.responses.items import output_as_input
from foresay.server.api.responses.schemas import InputItem, Response
from foresay.server.gateway.caller import Shared
from foresay.server.schemas.errors import ApiError
from foresay.spec.errors import InvalidRequest

#: Most events kept of one response, so that a client can resume a stream.
MOST_EVENTS = 512
EVENT_BYTES = 300
OPTION_BYTES = 1000  # of a response that repeats nothing
TOKEN_BYTES = 36  # a reference and a Python integer


class ResponseNotFound(ApiError):
    """No such response is kept: it never existed, was not stored, or was evicted."""

    status, type, code, param = 404, "invalid_request_error", "response_not_found", "response_id"


class PreviousResponseNotFound(InvalidRequest):
    """The response to follow is not kept."""

    code = "previous_response_not_found"


class Record(Kept, kw_only=True, eq=False):
    """A response and its conversation. model, fingerprint: what made it. tokens: prompt and output, as the model read
    and generated them. events: the latest ones. changed: set and replaced with each event. over: set after the last
    one.
    items_bytes, options_bytes: about how large the items are, and what the response repeats of the request.
    socket_id: the only WebSocket that can find it; "": any."""

    response: Response
    items: tuple[InputItem, ...]
    items_bytes: int = 0
    options_bytes: int = 0
    model: str = ""
    fingerprint: str = ""
    tokens: list[int] = msgspec.field(default_factory=list)
    events: deque[ResponseEvent] = msgspec.field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = msgspec.field(default_factory=asyncio.get_running_loop)
    socket_id: str = ""

    def note(self, event: ResponseEvent) -> None:
        """Record an event. May be called in a thread, where long events are made."""
        self.events.append(event)
        changed, self.changed = self.changed, asyncio.Event()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.loop.call_soon_threadsafe(changed.set)
        else:
            changed.set()

    @property
    def id(self) -> str:
        """The response's id."""
        return self.response.id

    @property
    def conversation(self) -> tuple[InputItem, ...]:
        """The items that a following response continues."""
        return (*self.items, *output_as_input(self.response.output))

    @property
    def conversation_bytes(self) -> int:
        """About how large that is."""
        return self.items_bytes + weight(self.response.output)

    def measured(self) -> int:
        """About how many bytes it holds."""
        size = sum(len(getattr(event, "delta", "")) + EVENT_BYTES for event in self.events)
        size += TOKEN_BYTES * len(self.tokens) + OPTION_BYTES + self.options_bytes
        return size + self.conversation_bytes


class ResponseStore(Store[Record]):
    """Responses, and an index of their output items. Some can be found only from one WebSocket."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        super().__init__(limits)
        self._owners: dict[tuple[str, str], str] = {}

    def keep(self, record: Record) -> None:
        """Keep a record, and index its items."""
        self._owners |= {(record.tenant, item.id): record.id for item in record.response.output}
        super().keep(record)

    def find(self, tenant: str, id: str, socket_id: str = "") -> Record | None:
        """The record; None if there is none, or only another WebSocket can find it."""
        record = super().find(tenant, id)
        return record if record is not None and record.socket_id in ("", socket_id) else None

    def item(self, tenant: str, id: str, socket_id: str = "") -> InputItem | None:
        """An output item of a response, by its id; None if no such response is kept."""
        record = self.find(tenant, self._owners.get((tenant, id), ""), socket_id)
        items = [] if record is None else [item for item in record.response.output if item.id == id]
        return next(iter(output_as_input(items)), None)

    def drop(self, tenant: str, id: str) -> bool:
        """Drop a record and its items."""
        record = super().find(tenant, id)
        for item in () if record is None else record.response.output:
            self._owners.pop((tenant, item.id), None)
        return super().drop(tenant, id)

    def forget(self, tenant: str, socket_id: str) -> None:
        """Drop the records that only this WebSocket can find."""
        for id in [record.id for record in self.of(tenant) if record.socket_id == socket_id]:
            self.drop(tenant, id)


# -- shared by all connections ----------------------------------------------------------------------------------------


class SocketLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of sockets; times in seconds.

    most: open sockets, each of which may hold a partly received message. waiting: messages of one socket that wait for
    their lane. heartbeat: between pings (half of it is the time to answer). idle: without a message from the client or
    a running response. stall: a single write that the client's connection does not accept. outbox_bytes, behind: a
    write that waits longer than ``behind`` with more than ``outbox_bytes`` queued is a stall, too. refresh: between
    marking the KV of a socket's conversations as used. closing: for the client's part of a close.
    """

    most: int = 128
    waiting: int = 64
    heartbeat: float = 20.0
    idle: float = 3600.0
    stall: float = 20.0
    outbox_bytes: int = 1 << 20
    behind: float = 1.0
    refresh: float = 30.0
    closing: float = 2.0


class RunningResponse(NamedTuple):
    """A response in progress. cancel: ends it early."""

    record: Record
    cancel: Callable[[], None]


class Responses:
    """The state of ``/v1/responses``. running: by tenant and id."""

    def __init__(self, limits: StoreLimits | None = None, socket_limits: SocketLimits | None = None) -> None:
        self.store = ResponseStore(limits)
        self.socket_limits = socket_limits or SocketLimits()
        self.running: dict[tuple[str, str], RunningResponse] = {}
        self.open_sockets = Shared(self.socket_limits.most)

    def find(self, tenant: str, id: str) -> Record | None:
        """The response of this tenant, kept or running."""
        running = self.running.get((tenant, id))
        return running.record if running is not None else self.store.find(tenant, id)
