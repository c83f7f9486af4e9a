"""What all models of one server have in common: whether it takes requests, what it holds of them, its connections."""

from __future__ import annotations

import asyncio
import time

from server.errors import TooManyWaiting, Unavailable, going_away
from server.gateway.share import Shared
from server.responses.state import Responses
from server.telemetry.connections import Connections

#: Bodies and messages of the largest size whose bytes may be held at once, by all callers together.
MOST_BODIES = 64


class ServerState:
    """draining: no more requests are taken. bodies: bytes of bodies and messages. created: in seconds since 1970.
    reading: held while files are read, since not all libraries for that can be imported by two threads at once."""

    def __init__(self, responses: Responses | None = None) -> None:
        self.draining = False
        self.responses = responses or Responses()
        self.bodies = Shared(0)
        self.connections = Connections()
        self.created = int(time.time())
        self.reading = asyncio.Lock()

    def allow_bodies(self, largest: int) -> None:
        """Hold as many bytes as some bodies of this size have, if more may not be held already."""
        self.bodies.most = max(self.bodies.most, MOST_BODIES * largest)

    def refusal(self) -> Unavailable | None:
        """Why no request is taken, whatever its model; None if they are."""
        return going_away() if self.draining else None

    def crowded(self) -> TooManyWaiting:
        """Why no more bytes can be taken from the caller now."""
        held = f"{self.bodies.used:,} bytes of bodies and messages are held already, {self.bodies.own:,} of them yours"
        return TooManyWaiting(f"{held}; try again when some of these requests are answered")
