"""What all connections share: responses that are kept, responses that run, open sockets."""

from __future__ import annotations

from typing import Protocol

import msgspec

from server.api.responses.store import Limits, Record, ResponseStore
from server.gateway.share import Shared


class SocketLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How sockets are treated; times in seconds.

    most: sockets open at once, each of which may hold a message that is half received. waiting: messages of one socket
    that wait for their lane. heartbeat: between pings (half of it is the time to answer). idle: without a message from
    the client and without a running response. stall: a single write that the client's connection does not take.
    outbox_bytes, behind: a write that waits longer than ``behind`` with more than so many bytes waiting after it is a
    stall, too. refresh: between two times that the KV of a socket's conversations is marked as used. closing: for the
    client's half of a close.
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


class Running(Protocol):
    """A response that is being made."""

    tenant: str
    record: Record

    def cancel(self) -> None:
        """End it early."""
        ...


class OpenSocket(Protocol):
    """A connection that wants to know when the server goes away."""

    def drain(self) -> None:
        """Take no more, finish what runs, close."""
        ...


class Responses:
    """The state behind ``/v1/responses``."""

    def __init__(self, limits: Limits | None = None, socket_limits: SocketLimits | None = None) -> None:
        self.store = ResponseStore(limits)
        self.socket_limits = socket_limits or SocketLimits()
        self.running: dict[tuple[str, str], Running] = {}
        self.sockets: set[OpenSocket] = set()
        self.places = Shared(self.socket_limits.most)

    def find(self, tenant: str, id: str) -> Record | None:
        """The response of this tenant, kept or running."""
        running = self.running.get((tenant, id))
        return running.record if running is not None else self.store.find(tenant, id)

    def drain(self) -> None:
        """The server goes away: sockets close as soon as nothing runs on them."""
        for socket in list(self.sockets):
            socket.drain()
