"""What all models of a server share: whether it takes requests, the bytes it holds of them, its connections."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, TypeVar

from foresay.server.gateway.caller import Shared
from foresay.server.observe.telemetry.counts import Connections
from foresay.server.schemas.errors import TooManyWaiting, Unavailable, going_away

#: How many bodies or messages of the largest size may be held at once, over all callers.
MOST_BODIES = 64

K = TypeVar("K", bound="KeptByApi")


class KeptByApi(Protocol):
    """State that an API keeps for all its connections."""

    def drain(self) -> None:
        """The server shuts down."""


class ServerState:
    """draining: no more requests are taken. bodies: bytes of received bodies and messages, until answered.
    body_timeout: seconds that a body may take, in addition to an allowance by its size. created: in seconds since 1970.
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
        """An API's state, by its class; made on first use."""
        kept = self._kept.get(kind)
        if kept is None:
            self._kept[kind] = kept = kind()
        assert isinstance(kept, kind)
        return kept

    def drain(self) -> None:
        self.draining = True
        for kept in self._kept.values():
            kept.drain()

    def allow_bodies(self, largest: int) -> None:
        """Raise the limit of held bytes for bodies of this size, if it is lower."""
        self.bodies.most = max(self.bodies.most, MOST_BODIES * largest)

    def refusal(self) -> Unavailable | None:
        """Why requests are refused, for any model; None if they are taken."""
        return going_away() if self.draining else None

    def crowded(self) -> TooManyWaiting:
        """Why no more bytes can be taken from the caller now."""
        held = f"{self.bodies.used:,} bytes of request bodies are held already, {self.bodies.own:,} of them yours"
        return TooManyWaiting(f"{held}; try again when some of these requests are answered")
