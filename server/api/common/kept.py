"""Finished answers kept in memory: bounded; the tenant that keeps most is evicted from first.

A record's size includes everything it refers to, although records may share parts, so the actual memory is lower.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from foresay.spec.errors import InvalidRequest

MOST_LISTED = 100
#: Query parameters of lists.
LIST_QUERY = (
    ("after", "string", "skip the items up to this one"),
    ("limit", "integer", f"at most this many items, up to {MOST_LISTED}"),
    ("order", "string", "asc or desc"),
)


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that is kept: records and bytes, of all tenants together."""

    count: int = 4096
    bytes: int = 256 << 20


def page(http: web.Request, entries: Sequence[tuple[str, Any]], usual: str) -> dict[str, Any]:
    """A page of entries, each given with its id, for the query's ``order``, ``after`` and ``limit``, in the format of
    OpenAI's lists."""
    order, after = http.query.get("order", usual), http.query.get("after")
    limit = number(http, "limit", 20, 1, MOST_LISTED)
    if order not in ("asc", "desc"):
        raise InvalidRequest("order", f" must be asc or desc, got {order!r}")
    entries = entries[::-1] if order == "desc" else entries
    if after is not None:
        positions = [index for index, (id, _) in enumerate(entries) if id == after]
        if not positions:
            raise InvalidRequest("after", f": there is no item {after!r}")
        entries = entries[positions[0] + 1 :]
    ids, data = [id for id, _ in entries[:limit]], [one for _, one in entries[:limit]]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": len(entries) > limit}


def number(http: web.Request, name: str, default: int, least: int, most: int | None) -> int:
    """A number in the query."""
    given = http.query.get(name)
    if given is None:
        return default
    if not given.removeprefix("-").isdecimal() or len(given) > 18 or int(given) < least or (most and int(given) > most):
        wanted = f"at least {least}" if most is None else f"between {least} and {most}"
        raise InvalidRequest(name, f" must be a number, {wanted}, got {given!r}")
    return int(given)


class Kept(msgspec.Struct, kw_only=True, eq=False):
    """A record of a tenant. size: in bytes, once it is kept."""

    tenant: str
    size: int = 0

    @property
    def id(self) -> str:
        """Its key in the store."""
        raise NotImplementedError

    def measured(self) -> int:
        """About how many bytes it holds."""
        raise NotImplementedError


R = TypeVar("R", bound=Kept)


class TenantRecords(Generic[R]):
    """The records of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.records: OrderedDict[str, R] = OrderedDict()
        self.bytes = 0


class Store(Generic[R]):
    """Records by tenant and id. A lookup of a tenant never finds another's."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self._tenants: dict[str, TenantRecords[R]] = {}

    def __len__(self) -> int:
        return sum(len(kept.records) for kept in self._tenants.values())

    @property
    def bytes(self) -> int:
        """The size of all records together."""
        return sum(kept.bytes for kept in self._tenants.values())

    def of(self, tenant: str) -> Iterator[R]:
        """All records of a tenant, the least recently used first."""
        return iter(list(self._tenants.get(tenant, TenantRecords()).records.values()))

    def keep(self, record: R) -> None:
        """Keep a record. Beyond the limits, the tenant with the most loses its least recently used records."""
        self.drop(record.tenant, record.id)
        record.size = record.measured()
        kept = self._tenants.setdefault(record.tenant, TenantRecords())
        kept.records[record.id] = record
        kept.bytes += record.size
        while len(self) > self.limits.count:
            self._make_room(lambda kept: len(kept.records))
        while self.bytes > self.limits.bytes:
            self._make_room(lambda kept: kept.bytes)

    def find(self, tenant: str, id: str) -> R | None:
        """The record, which becomes the most recently used; None if there is none."""
        kept: TenantRecords[R] = self._tenants.get(tenant, TenantRecords())
        if id in kept.records:
            kept.records.move_to_end(id)
        return kept.records.get(id)

    def drop(self, tenant: str, id: str) -> bool:
        """Drop a record; returns whether it existed."""
        kept = self._tenants.get(tenant)
        record = None if kept is None else kept.records.pop(id, None)
        if kept is None or record is None:
            return False
        kept.bytes -= record.size
        if not kept.records:
            del self._tenants[tenant]
        return True

    def _make_room(self, held: Callable[[TenantRecords[R]], int]) -> None:
        tenant, kept = max(self._tenants.items(), key=lambda entry: held(entry[1]))
        self.drop(tenant, next(iter(kept.records)))
