"""A scripted engine at the other end of sockets, as two replicas: tests of clients that need a script run through it
where ``FORESAY_REPLICAS`` has the servers of the others run on Ray (docs/scale.md)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from foresay.server.engine.generation import ServedEngine
from foresay.server.engine_process import frames
from foresay.server.engine_process.client_base import Progress
from foresay.server.engine_process.frames import Channel, unpack_up
from foresay.server.replicas.fleet import Fleet
from foresay.server.replicas.hosted import Address, admit
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta


class Sent:
    """A sink at the other end of a connection."""

    def __init__(self, door: Door, id: str) -> None:
        self._door, self._id = door, id

    def put(self, delta: Delta) -> None:
        self._door.send(frames.Deltas([delta]))

    def fail(self, error: Exception) -> None:
        if isinstance(error, InvalidRequest):
            self._door.send(frames.Rejected(self._id, error.fault, error.code))
        else:
            self.put(Delta(id=self._id, tokens=[], finish_reason="error", error=str(error)))


class Door(Channel):
    """A front door's connection to the scripted engine."""

    def __init__(self, engine: Any) -> None:
        super().__init__(lambda frame: None)
        self._engine = engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(frames.Ready(self._engine.info))

    def _read(self, body: bytes) -> None:
        match unpack_up(body):
            case frames.Add(request):
                self._engine.add(request, Sent(self, request.id))
            case frames.Cancel(id):
                self._engine.cancel(id)
            case frames.Finish(id, at_token):
                self._engine.finish(id, at_token)
            case frames.Ping():
                self.send(frames.Pong())


class Scripted:
    """A :class:`~foresay.server.replicas.fleet.Cluster` of two replicas whose engine is in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._addresses: list[Address] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, config: ServeConfig, tell: Progress) -> None:
        for name in ("a", "b"):
            listener, secret = socket.create_server(("127.0.0.1", 0)), os.urandom(32)
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self._addresses.append(Address(name, "127.0.0.1", port, secret, 1))
            self._tasks.append(asyncio.create_task(admit(listener, secret, lambda: Door(self._engine))))

    async def addresses(self) -> list[Address]:
        return self._addresses

    async def deploy(self, config: ServeConfig) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def asked(engine: Any) -> AsyncIterator[ServedEngine]:
    """The engine itself, or as replicas."""
    if "FORESAY_REPLICAS" not in os.environ:
        yield engine
        return
    fleet = Fleet(ServeConfig(), Scripted(engine))
    await fleet.start()
    try:
        await fleet.until_ready()
        yield fleet
    finally:
        await fleet.stop()
