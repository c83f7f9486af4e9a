"""The requests that run and the last ones that are over, by key: bounded in number and memory, oldest out first."""

from __future__ import annotations

from collections import OrderedDict

from server.observe.telemetry.ledger import Ledger

MOST_PER_TENANT = 100
MOST_BYTES = 64 << 20


class Recent:
    """Ledgers by tenant and id. A lookup of a tenant never finds another's."""

    def __init__(self, per_tenant: int = MOST_PER_TENANT, most_bytes: int = MOST_BYTES) -> None:
        self._per_tenant, self._most_bytes = per_tenant, most_bytes
        self._running: dict[str, Ledger] = {}
        self._over: OrderedDict[str, tuple[Ledger, int]] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[str, None]] = {}
        self._bytes = 0

    def begin(self, ledger: Ledger) -> None:
        """A request is let in."""
        self._running[ledger.id] = ledger

    def end(self, ledger: Ledger) -> None:
        """It is over: keep it among the last of its tenant."""
        if self._running.pop(ledger.id, None) is None:
            return
        size = ledger.bytes
        self._over[ledger.id] = ledger, size
        self._bytes += size
        ids = self._of_tenant.setdefault(ledger.tenant, OrderedDict())
        ids[ledger.id] = None
        if len(ids) > self._per_tenant:
            self._drop(next(iter(ids)))
        while self._bytes > self._most_bytes and self._over:
            self._drop(next(iter(self._over)))

    @property
    def running(self) -> int:
        """How many run or wait, of all tenants."""
        return len(self._running)

    def of(self, tenant: str) -> list[Ledger]:
        """What runs and what ran last, the newest first."""
        running = [ledger for ledger in self._running.values() if ledger.tenant == tenant]
        over = [self._over[id][0] for id in self._of_tenant.get(tenant, ())]
        return [*reversed(running), *reversed(over)]

    def find(self, tenant: str, id: str) -> Ledger | None:
        """The request of this tenant; None if there is none, or it had to make room."""
        ledger = self._running.get(id) or self._over.get(id, (None, 0))[0]
        return ledger if ledger is not None and ledger.tenant == tenant else None

    def _drop(self, id: str) -> None:
        ledger, size = self._over.pop(id)
        self._bytes -= size
        ids = self._of_tenant[ledger.tenant]
        del ids[id]
        if not ids:
            del self._of_tenant[ledger.tenant]
