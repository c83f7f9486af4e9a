"""Responses that are over, kept in memory so that the next one can follow: bounded, least recently used out.

A record counts with the whole conversation before it, although records share the items, so the bound is an upper one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from server.errors import ApiError
from server.responses.items import said_items
from server.wire.response_events import ResponseEvent
from server.wire.responses import InputItem, Response
from spec.errors import InvalidRequest

#: The events kept of one response, so that a client can read a stream again from where it lost it.
MOST_EVENTS = 512
EVENT_BYTES = 300


class ResponseNotFound(ApiError):
    """No such response is kept: it never was, it was not stored, or it had to make room."""

    status, type, code, param = 404, "invalid_request_error", "response_not_found", "response_id"


class PreviousResponseNotFound(InvalidRequest):
    """The response to follow is not kept."""

    code = "previous_response_not_found"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much is kept: records and bytes, of each tenant and of all together."""

    tenant_count: int = 512
    tenant_bytes: int = 64 << 20
    count: int = 4096
    bytes: int = 256 << 20


class Record(msgspec.Struct, kw_only=True, eq=False):
    """A response and the conversation that led to it. events: the latest ones. changed: is set, and replaced, with each
    event. over: set after the last one. size: in bytes."""

    tenant: str
    response: Response
    items: tuple[InputItem, ...]
    events: deque[ResponseEvent] = msgspec.field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = msgspec.field(default_factory=asyncio.get_running_loop)
    size: int = 0

    def note(self, event: ResponseEvent) -> None:
        """One more event. Long ones are made in a thread."""
        self.events.append(event)
        changed, self.changed = self.changed, asyncio.Event()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.loop.call_soon_threadsafe(changed.set)
        else:
            changed.set()

    @property
    def conversation(self) -> tuple[InputItem, ...]:
        """The items that a following response continues."""
        return (*self.items, *said_items(self.response.output))

    def measured(self) -> int:
        """About how many bytes it holds."""
        said = sum(len(getattr(event, "delta", "")) + EVENT_BYTES for event in self.events)
        return said + len(msgspec.json.encode(self.items)) + len(msgspec.json.encode(self.response))


class ResponseStore:
    """Records by tenant and id. A lookup of a tenant never finds another's."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._records: OrderedDict[tuple[str, str], Record] = OrderedDict()
        self._tenants: dict[str, list[int]] = {}  # count and bytes

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes(self) -> int:
        """What all records count together."""
        return sum(size for _, size in self._tenants.values())

    def keep(self, record: Record) -> None:
        """Keep a record; drops the least recently used ones, of its tenant first, until the limits hold."""
        self.drop(record.tenant, record.response.id)
        record.size = record.measured()
        self._records[record.tenant, record.response.id] = record
        held = self._tenants.setdefault(record.tenant, [0, 0])
        held[0] += 1
        held[1] += record.size
        limits = self.limits
        while held[0] > limits.tenant_count or held[1] > limits.tenant_bytes:
            self._drop_oldest([key for key in self._records if key[0] == record.tenant][:1])
        while len(self._records) > limits.count or self.bytes > limits.bytes:
            self._drop_oldest(list(self._records)[:1])

    def find(self, tenant: str, id: str) -> Record | None:
        """The record, now the most recently used one; None if there is none."""
        record = self._records.get((tenant, id))
        if record is not None:
            self._records.move_to_end((tenant, id))
        return record

    def drop(self, tenant: str, id: str) -> bool:
        """Forget a record; returns whether it was there."""
        record = self._records.pop((tenant, id), None)
        if record is None:
            return False
        held = self._tenants[tenant]
        held[0] -= 1
        held[1] -= record.size
        if not held[0]:
            del self._tenants[tenant]
        return True

    def _drop_oldest(self, keys: Sequence[tuple[str, str]]) -> None:
        for tenant, id in keys:
            self.drop(tenant, id)
