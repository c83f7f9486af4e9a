"""Finished answers kept in memory: bounded; the tenant that keeps most is evicted from first.

A record's size includes everything it refers to, although records may share parts, so the actual memory is lower.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
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
        """About how many bytes it holds, found without reading what the client sent: that may be long."""
        raise NotImplementedError


#: Of longer lists, which are of one kind in what a model wrote, so many entries are weighed. Bytes of anything else.
_WEIGHED, _OTHER_BYTES = 32, 16


def weight(written: Any) -> int:
    """About how many bytes some of the model's output holds."""
    if isinstance(written, str):
        return len(written) + _OTHER_BYTES
    if isinstance(written, msgspec.Struct):
        written = [getattr(written, name) for name in written.__struct_fields__]
    elif isinstance(written, dict):
        written = [*written, *written.values()]
    if not isinstance(written, list | tuple) or not written:
        return _OTHER_BYTES
    some = written[:: -(-len(written) // _WEIGHED)]
    return sum(map(weight, some)) * len(written) // len(some)


R = TypeVar("R", bound=Kept)


class Store(Generic[R]):
    """Records by tenant and id, the least recently used first. A lookup of a tenant never finds another's."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self._records: OrderedDict[tuple[str, str], R] = OrderedDict()
        self._counts, self._sizes = Counter[str](), Counter[str]()  # by tenant

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes(self) -> int:
        """The size of all records together."""
        return self._sizes.total()

    def of(self, tenant: str) -> Iterator[R]:
        """All records of a tenant, the least recently used first."""
        return iter([record for record in self._records.values() if record.tenant == tenant])

    def keep(self, record: R) -> None:
        """Keep a record. Beyond the limits, the tenant with the most loses its least recently used records."""
        self.drop(record.tenant, record.id)
        record.size = record.measured()
        self._records[record.tenant, record.id] = record
        self._count(record, 1)
        self._make_room(self._counts, self.limits.count)
        self._make_room(self._sizes, self.limits.bytes)

    def find(self, tenant: str, id: str) -> R | None:
        """The record, which becomes the most recently used; None if there is none."""
        if (tenant, id) in self._records:
            self._records.move_to_end((tenant, id))
        return self._records.get((tenant, id))

    def drop(self, tenant: str, id: str) -> bool:
        """Drop a record; returns whether it existed."""
        record = self._records.pop((tenant, id), None)
        if record is not None:
            self._count(record, -1)
        return record is not None

    def _count(self, record: R, change: int) -> None:
        self._counts[record.tenant] += change
        self._sizes[record.tenant] += change * record.size
        if not self._counts[record.tenant]:
            del self._counts[record.tenant], self._sizes[record.tenant]

    def _make_room(self, held: Counter[str], most: int) -> None:
        """Drop the oldest record of the tenant that holds the most, until all together hold at most ``most``."""
        oldest: dict[str, Iterator[tuple[str, str]]] = {}  # each found once: a large record may replace many
        while held.total() > most:
            tenant = max(held, key=held.__getitem__)
            if tenant not in oldest:
                oldest[tenant] = iter([key for key in self._records if key[0] == tenant])
            self.drop(*next(oldest[tenant]))
