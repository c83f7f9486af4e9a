"""A replica: an engine client whose callers are front doors, over TCP.

::

    engine process ──socket pair──> Hosted ──one TCP connection each──> front doors

A front door sends and receives the frames of a server (:mod:`foresay.server.engine_process.frames`) on an authenticated
connection. It receives the results of its own requests, and every
step's trace. Request ids are prefixed with its number in here, so that two front doors may use the same id; its
requests end with its connection. No engine waits for a front door that does not read: frames are buffered up to a
bound, then its connection is dropped.

Both ends of a connection prove that they know the secret, which is never sent::

    replica     -> front door    nonce
    front door  -> replica       its own nonce, and a keyed hash of both
    replica     -> front door    another such hash, as its own proof

The hash is HMAC-SHA256. What follows is not encrypted: the network between replicas must be private.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Collection

import msgspec
from msgspec.structs import replace

from foresay.server.engine_process import frames
from foresay.server.engine_process.child import Spawned, spawn
from foresay.server.engine_process.client import EngineClient
from foresay.server.engine_process.client_base import log
from foresay.server.engine_process.frames import Channel, DownFrame, UpFrame, unpack_up
from foresay.server.engine_process.resumption import PROOF
from foresay.server.schemas.errors import EngineFailed
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import Delta

NONCE_BYTES, PROOF_BYTES = 32, 32
#: Limits of unauthenticated connections: how long they may take, and how many there may be at once.
HANDSHAKE_SECONDS, MOST_UNAUTHENTICATED = 5.0, 64


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who + nonces, "sha256")


async def _read(connection: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes; frames follow them."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        more = await loop.sock_recv(connection, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def family(host: str) -> socket.AddressFamily:
    """The address family of a numeric address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def prompt(connection: socket.socket) -> None:
    """Send small frames at once, and close connections to a dead machine within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


async def admit(listener: socket.socket, secret: bytes, made: Callable[[], asyncio.Protocol]) -> None:
    """Until cancelled, make a protocol for each connection that proves to know the secret; close the others."""
    unauthenticated = asyncio.Semaphore(MOST_UNAUTHENTICATED)
    async with asyncio.TaskGroup() as tasks:
        while True:
            await unauthenticated.acquire()
            task = tasks.create_task(_greet(await _next(listener), secret, made))
            task.add_done_callback(lambda task: unauthenticated.release())


async def _next(listener: socket.socket) -> socket.socket:
    while True:
        try:
            return (await asyncio.get_running_loop().sock_accept(listener))[0]
        except OSError:  # no free descriptor, or the other end has left
            await asyncio.sleep(0.1)


async def _greet(connection: socket.socket, secret: bytes, made: Callable[[], asyncio.Protocol]) -> None:
    with contextlib.suppress(OSError, EOFError, TimeoutError), contextlib.ExitStack() as unless_admitted:
        unless_admitted.enter_context(connection)
        connection.setblocking(False)
        prompt(connection)
        loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(NONCE_BYTES)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await loop.sock_sendall(connection, nonce)
            theirs = await _read(connection, NONCE_BYTES)
            if not hmac.compare_digest(
                await _read(connection, PROOF_BYTES), _proof(secret, b"front door", nonce + theirs)
            ):
                return
            await loop.sock_sendall(connection, _proof(secret, b"replica", nonce + theirs))
        await loop.create_connection(made, sock=connection)
        unless_admitted.pop_all()


async def introduce(host: str, port: int, secret: bytes) -> socket.socket:
    """Connect to a replica and authenticate; raises OSError or :class:`EngineFailed`."""
    loop, ours = asyncio.get_running_loop(), secrets.token_bytes(NONCE_BYTES)
    with contextlib.ExitStack() as unless_admitted:
        connection = unless_admitted.enter_context(socket.socket(family(host), socket.SOCK_STREAM))
        connection.setblocking(False)
        prompt(connection)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await loop.sock_connect(connection, (host, port))
                nonce = await _read(connection, NONCE_BYTES)
                await loop.sock_sendall(connection, ours + _proof(secret, b"front door", nonce + ours))
                answer = await _read(connection, PROOF_BYTES)
        except (EOFError, TimeoutError):
            raise EngineFailed(f"the replica at {host}:{port} does not let this server in") from None
        if not hmac.compare_digest(answer, _proof(secret, b"replica", nonce + ours)):
            raise EngineFailed(f"the program that answers at {host}:{port} does not know this replica's secret")
        unless_admitted.pop_all()
        return connection


#: Most bytes that a front door may leave unread.
MOST_UNREAD = 1 << 24


class Address(msgspec.Struct, frozen=True):
    """Where front doors reach a replica. deployed: number of the deployment it belongs to."""

    name: str
    host: str
    port: int
    secret: bytes
    deployed: int


class ServerConnection(Channel):
    """The connection of a front door. number: prefix of its requests' ids. running: number of deltas of each running
    request, by prefixed id."""

    def __init__(self, number: int, replica: Hosted) -> None:
        super().__init__(lambda frame: None)
        self.number, self._replica = number, replica
        self.running: dict[str, int] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._replica.enter(self)

    def _read(self, body: bytes) -> None:
        self._replica.apply(self, unpack_up(body))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._replica.leave(self)

    def send(self, frame: UpFrame | DownFrame) -> None:
        """Send a frame, unless too many are unread: then drop the connection."""
        super().send(frame)
        if self._transport is not None and self._transport.get_write_buffer_size() > MOST_UNREAD:
            self._transport.abort()

    def named(self, id: str) -> str:
        """The prefixed id of one of its requests."""
        return f"{self.number}/{id}"


class Hosted(EngineClient):
    """name: of the replica. host: the address it listens on. deployed: how often settings have changed. spawn:
    starts its engine processes."""

    def __init__(
        self,
        config: ServeConfig,
        name: str,
        host: str,
        secret: bytes,
        deployed: int = 0,
        spawn: Callable[[], Spawned] = spawn,
    ) -> None:
        super().__init__(config, spawn)
        self._name, self._host, self._secret, self._deployed = name, host, secret, deployed
        self._listener = socket.create_server((host, 0), family=family(host), backlog=MOST_UNAUTHENTICATED)
        self._listener.setblocking(False)
        self._connections: dict[int, ServerConnection] = {}
        self._entered = 0
        self._admitting: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the engine, wait until it is ready, and admit front doors. Raises what :meth:`until_ready` raises."""
        await self.start()
        await self.until_ready()
        self._admitting = asyncio.create_task(admit(self._listener, self._secret, self._connection))

    async def close(self) -> None:
        """Disconnect front doors, and end the engine."""
        if self._admitting is not None:
            self._admitting.cancel()
        self._listener.close()
        self._part("the replica ends", ())
        await self.stop()

    @property
    def address(self) -> Address:
        """Where front doors find it, once it is open."""
        port = int(self._listener.getsockname()[1])
        return Address(self._name, self._host, port, self._secret, self._deployed)

    @property
    def load(self) -> int:
        """Number of requests running or waiting."""
        return sum(len(connection.running) for connection in self._connections.values())

    # -- front doors ---------------------------------------------------------------------------------------------

    def _connection(self) -> ServerConnection:
        self._entered += 1
        return ServerConnection(self._entered, self)

    def enter(self, connection: ServerConnection) -> None:
        """Register a front door; it may send requests if the engine is ready."""
        self._connections[connection.number] = connection
        if self.status.state == "ready" and self.info is not None:
            connection.send(frames.Ready(self.info))

    def leave(self, connection: ServerConnection) -> None:
        """The connection of a front door is closed: cancel its requests."""
        if self._connections.pop(connection.number, None) is not None:
            for id in connection.running:
                self._send(frames.Cancel(id))

    def apply(self, connection: ServerConnection, frame: UpFrame | frames.Rejected) -> None:
        """Forward a front door's frame to the engine."""
        match frame:
            case frames.Add(request):
                request.id = connection.named(request.id)
                request.fork_of = None if request.fork_of is None else connection.named(request.fork_of)
                connection.running[request.id] = 0
                self._send(frame)
            case frames.Cancel(id):
                connection.running.pop(connection.named(id), None)
                self._send(frames.Cancel(connection.named(id)))
            case frames.Finish(id, at_token):
                self._send(frames.Finish(connection.named(id), at_token))
            case frames.Ping():
                connection.send(frames.Pong())
            case frames.Rejected():
                log.error("a frame could not be read: %s", frame.error)
                connection.send(frame)

    # -- the engine ----------------------------------------------------------------------------------------------

    def _received(self, frame: DownFrame) -> None:
        match frame:
            case frames.Deltas():
                self._scatter(frame)
            case frames.Rejected(id):
                connection, own = self._whose(id)
                if connection is not None:
                    connection.running.pop(id, None)
                    connection.send(replace(frame, id=own))
            case _:
                super()._received(frame)
        match frame:
            case frames.Ready():
                for connection in list(self._connections.values()):
                    connection.send(frame)
            case frames.Failed(message, running=running):
                self._part(message, running or [])

    def _whose(self, id: str) -> tuple[ServerConnection | None, str]:
        """The front door of a request (None if it has left), and the request's id there."""
        number, _, own = id.partition("/")
        return self._connections.get(int(number)), own

    def _scatter(self, frame: frames.Deltas) -> None:
        """Send each front door its own deltas and the step's trace."""
        deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        for delta in frame.deltas:
            connection, own = self._whose(delta.id)
            if connection is None:
                continue
            if delta.finish_reason is not None:
                connection.running.pop(delta.id, None)
            elif delta.id in connection.running:
                connection.running[delta.id] += 1
            delta.id = own
            deltas[connection.number].append(delta)
        for number, connection in list(self._connections.items()):
            if frame.trace is not None or number in deltas:
                connection.send(frames.Deltas(deltas[number], frame.trace))
        if frame.trace is not None:
            self._stepped(frame.trace)

    def _lose(self, reason: str, among: Collection[str] | None = ()) -> None:
        self._part(reason, among)
        super()._lose(reason, among)

    def _part(self, reason: str, among: Collection[str] | None) -> None:
        """Close all connections, after reporting to each front door which of its requests may have killed the engine:
        none if another front door's are equally suspect. among: the suspects; None: any."""
        connections, self._connections = self._connections, {}
        running = [
            (connection, id, count) for connection in connections.values() for id, count in connection.running.items()
        ]
        suspects = {
            connection.number for connection, id, count in running if count < PROOF and (among is None or id in among)
        }
        for connection in connections.values():
            own = None if among is None else [id.partition("/")[2] for id in among if id in connection.running]
            connection.send(frames.Failed(reason, running=own if suspects == {connection.number} else []))
            connection.close()
