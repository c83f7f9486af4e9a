"""The requests that run and the last ones that are over, by key: bounded in number and memory, oldest out first."""

from __future__ import annotations

from collections import OrderedDict

from server.observe.telemetry.request_stats import RequestStats

MOST_PER_TENANT = 100
MOST_BYTES = 64 << 20


class Recent:
    """Ledgers by tenant and id. A lookup of a tenant never finds another's."""

    def __init__(self, per_tenant: int = MOST_PER_TENANT, most_bytes: int = MOST_BYTES) -> None:
        self._per_tenant, self._most_bytes = per_tenant, most_bytes
        self._running: dict[str, RequestStats] = {}
        self._over: OrderedDict[str, tuple[RequestStats, int]] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[str, None]] = {}
        self._bytes = 0

    def begin(self, stats: RequestStats) -> None:
        """A request is let in."""
        self._running[stats.id] = stats

    def end(self, stats: RequestStats) -> None:
        """It is over: keep it among the last of its tenant."""
        if self._running.pop(stats.id, None) is None:
            return
        size = stats.bytes
        self._over[stats.id] = stats, size
        self._bytes += size
        ids = self._of_tenant.setdefault(stats.tenant, OrderedDict())
        ids[stats.id] = None
        if len(ids) > self._per_tenant:
            self._drop(next(iter(ids)))
        while self._bytes > self._most_bytes and self._over:
            self._drop(next(iter(self._over)))

    @property
    def running(self) -> int:
        """How many run or wait, of all tenants."""
        return len(self._running)

    def of(self, tenant: str) -> list[RequestStats]:
        """What runs and what ran last, the newest first."""
        running = [stats for stats in self._running.values() if stats.tenant == tenant]
        over = [self._over[id][0] for id in self._of_tenant.get(tenant, ())]
        return [*reversed(running), *reversed(over)]

    def find(self, tenant: str, id: str) -> RequestStats | None:
        """The request of this tenant; None if there is none, or it had to make room."""
        stats = self._running.get(id) or self._over.get(id, (None, 0))[0]
        return stats if stats is not None and stats.tenant == tenant else None

    def _drop(self, id: str) -> None:
        stats, size = self._over.pop(id)
        self._bytes -= size
        ids = self._of_tenant[stats.tenant]
        del ids[id]
        if not ids:
            del self._of_tenant[stats.tenant]
