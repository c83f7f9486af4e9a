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
from foresay.server.host import frames
from foresay.server.host.frames import READ_BYTES, FrameSplitter, pack, unpack_up
from foresay.server.host.replacement import Progress
from foresay.server.host.replicas.admission import admit
from foresay.server.host.replicas.fleet import Fleet
from foresay.server.host.replicas.hosted import Address
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Delta


class Sent:
    """A sink at the other end of a connection."""

    def __init__(self, connection: socket.socket, id: str) -> None:
        self._connection, self._id = connection, id

    def put(self, delta: Delta) -> None:
        self._connection.sendall(pack(frames.Deltas([delta])))

    def fail(self, error: Exception) -> None:
        if isinstance(error, InvalidRequest):
            rejected = frames.Rejected(self._id, error.fault, error.code)
            self._connection.sendall(pack(rejected))
        else:
            self.put(Delta(id=self._id, tokens=[], finish_reason="error", error=str(error)))


class Scripted:
    """A :class:`~foresay.server.host.replicas.fleet.Cluster` of two replicas whose engine is in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._addresses: list[Address] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, config: ServeConfig, tell: Progress) -> None:
        for name in ("a", "b"):
            listener, secret = socket.create_server(("127.0.0.1", 0)), os.urandom(32)
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self._addresses.append(Address(name, "127.0.0.1", port, secret, 1, "scripted"))
            self._tasks.append(asyncio.create_task(admit(listener, secret, self._enter)))

    async def addresses(self) -> list[Address]:
        return self._addresses

    async def deploy(self, config: ServeConfig, weights: bool) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enter(self, connection: socket.socket) -> None:
        self._tasks.append(asyncio.create_task(self._ask(connection.dup())))

    async def _ask(self, connection: socket.socket) -> None:
        splitter = FrameSplitter()
        with connection:
            connection.sendall(pack(frames.Ready(self._engine.info)))
            while data := await asyncio.get_running_loop().sock_recv(connection, READ_BYTES):
                for body in splitter.feed(data):
                    self._apply(unpack_up(body), connection)

    def _apply(self, frame: frames.UpFrame | frames.Rejected, connection: socket.socket) -> None:
        match frame:
            case frames.Add(request):
                self._engine.add(request, Sent(connection, request.id))
            case frames.Cancel(id):
                self._engine.cancel(id)
            case frames.Finish(id, at_token):
                self._engine.finish(id, at_token)
            case frames.KeepWarm(tokens, salt):
                self._engine.keep_warm(tokens, salt)


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
