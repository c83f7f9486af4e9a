"""What all models of one server have in common: whether it takes requests, what it holds of them, its connections."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, TypeVar

from foresay.server.gateway.caller import Shared
from foresay.server.observe.telemetry.counts import Connections
from foresay.server.schemas.errors import TooManyWaiting, Unavailable, going_away

#: Bodies and messages of the largest size whose bytes may be held at once, by all callers together.
MOST_BODIES = 64

K = TypeVar("K", bound="KeptByApi")


class KeptByApi(Protocol):
    """What an API keeps for all its connections."""

    def drain(self) -> None:
        """The server goes away."""
        ...


class ServerState:
    """draining: no more requests are taken. bodies: bytes of bodies and messages that have come, until they are
    answered. body_timeout: seconds that a body may take, besides what its bytes may. created: in seconds since 1970.
    reading: held while files are read, since not all libraries for that can be imported by two threads at once."""

    def __init__(self, *kept: KeptByApi) -> None:
        self.draining = False
        self._kept: dict[type, KeptByApi] = {type(one): one for one in kept}
        self.bodies = Shared(0)
        self.body_timeout = 30.0
        self.connections = Connections()
        self.created = int(time.time())
        self.reading = asyncio.Lock()

    def of(self, kind: type[K]) -> K:
        """What an API keeps, by its class; made when it is first asked for."""
        kept = self._kept.get(kind)
        if kept is None:
            self._kept[kind] = kept = kind()
        assert isinstance(kept, kind)
        return kept

    def drain(self) -> None:
        """Take no more requests."""
        self.draining = True
        for kept in self._kept.values():
            kept.drain()

    def allow_bodies(self, largest: int) -> None:
        """Hold as many bytes as some bodies of this size have, if more may not be held already."""
        self.bodies.most = max(self.bodies.most, MOST_BODIES * largest)

    def refusal(self) -> Unavailable | None:
        """Why no request is taken, whatever its model; None if they are."""
        return going_away() if self.draining else None

    def crowded(self) -> TooManyWaiting:
        """Why no more bytes can be taken from the caller now."""
        held = f"{self.bodies.used:,} bytes of request bodies are held already, {self.bodies.own:,} of them yours"
        return TooManyWaiting(f"{held}; try again when some of these requests are answered")
