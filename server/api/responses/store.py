"""Finished responses, kept in memory so that another can follow; each with its conversation. They are bounded: the
least recently used is evicted first.

A record's size includes everything it refers to, although records may share parts, so the actual memory is lower.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from foresay.server.api.responses.items import output_as_input
from foresay.server.api.responses.schemas import InputItem, Response
from foresay.server.schemas.errors import ApiError
from foresay.spec.errors import InvalidRequest

TOKEN_BYTES = 36  # a reference and a Python integer


class ResponseNotFound(ApiError):
    """No such response is kept: it never existed, was not stored, or was evicted."""

    status, type, code, param = 404, "invalid_request_error", "response_not_found", "response_id"


class PreviousResponseNotFound(InvalidRequest):
    """The response to follow is not kept."""

    code = "previous_response_not_found"


class Record(msgspec.Struct, kw_only=True, eq=False):
    """A tenant's response and its conversation.

    size: in bytes, once it is kept. fingerprint: of what made it. tokens: prompt and output, as the model read and
    generated them. over: set after its last event; cancel: ends it while it runs. socket_id: the only WebSocket that
    can find it; "": any.
    """

    tenant: str
    size: int = 0
    response: Response
    items: tuple[InputItem, ...]
    fingerprint: str = ""
    tokens: list[int] = msgspec.field(default_factory=list)
    over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    cancel: Callable[[], None] | None = None
    socket_id: str = ""

    @property
    def id(self) -> str:
        """The response's id."""
        return self.response.id

    @property
    def conversation(self) -> tuple[InputItem, ...]:
        """The items that a following response continues."""
        return (*self.items, *output_as_input(self.response.output))


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that is kept: records and bytes, of all tenants together."""

    count: int = 4096
    bytes: int = 256 << 20


class ResponseStore:
    """Responses by tenant and id, the least recently used first, and an index of their output items. A lookup of a
    tenant never finds another's; some can be found only from one WebSocket."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self._records: OrderedDict[tuple[str, str], Record] = OrderedDict()
        self._owners: dict[tuple[str, str], str] = {}  # of items: the response
        #: The size of all records together.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, record: Record) -> None:
        """Keep a record, and index its items. Beyond the limits, the least recently used are dropped."""
        self.drop(record.tenant, record.id)
        self._owners |= {(record.tenant, item.id): record.id for item in record.response.output}
        record.size = len(msgspec.json.encode((record.items, record.response))) + TOKEN_BYTES * len(record.tokens)
        self._records[record.tenant, record.id] = record
        self.bytes += record.size
        while len(self._records) > self.limits.count or self.bytes > self.limits.bytes:
            self.drop(*next(iter(self._records)))

    def find(self, tenant: str, id: str, socket_id: str = "") -> Record | None:
        """The record, which becomes the most recently used; None if there is none, or only another WebSocket can find
        it."""
        record = self._records.get((tenant, id))
        if record is not None:
            self._records.move_to_end((tenant, id))
        return record if record is not None and record.socket_id in ("", socket_id) else None

    def item(self, tenant: str, id: str, socket_id: str = "") -> InputItem | None:
        """An output item of a response, by its id; None if no such response is kept."""
        record = self.find(tenant, self._owners.get((tenant, id), ""), socket_id)
        items = [] if record is None else [item for item in record.response.output if item.id == id]
        return next(iter(output_as_input(items)), None)

    def drop(self, tenant: str, id: str) -> bool:
        """Drop a record and its items; returns whether it existed."""
        record = self._records.pop((tenant, id), None)
        if record is None:
            return False
        for item in record.response.output:
            self._owners.pop((tenant, item.id), None)
        self.bytes -= record.size
        return True

    def forget(self, tenant: str, socket_id: str) -> None:
        """Drop the records that only this WebSocket can find."""
        found = [key for key, record in self._records.items() if key[0] == tenant and record.socket_id == socket_id]
        for key in found:
            self.drop(*key)


# -- shared by all connections ----------------------------------------------------------------------------------------


class SocketLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of sockets; times in seconds.

    most: open sockets, each of which may hold a partly received message. waiting: messages of one socket that wait for
    their lane. heartbeat: between pings (half of it is the time to answer). idle: without a message from the client or
    a running response. stall: a single write that the client's connection does not accept. closing: for the client's
    part of a close.
    """

    most: int = 128
    waiting: int = 64
    heartbeat: float = 20.0
    idle: float = 3600.0
    stall: float = 20.0
    closing: float = 2.0


class Responses:
    """The state of ``/v1/responses``. running: those in progress, by tenant and id."""

    def __init__(self, limits: StoreLimits | None = None, socket_limits: SocketLimits | None = None) -> None:
        self.store = ResponseStore(limits)
        self.socket_limits = socket_limits or SocketLimits()
        self.running: dict[tuple[str, str], Record] = {}

    def find(self, tenant: str, id: str) -> Record | None:
        """The response of this tenant, kept or running."""
        return self.running.get((tenant, id)) or self.store.find(tenant, id)
