"""Who may speak to an engine over the network: whoever shows that it knows the secret, which itself is never sent.

::

    replica     -> front door    nonce
    front door  -> replica       its own nonce, and a keyed hash of both
    replica     -> front door    another one: that it knows the secret too

The hash is HMAC-SHA256. What follows is not encrypted: the network between replicas is to be a private one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import select
import socket
from collections.abc import Callable, Sequence

from foresay.server.schemas.errors import EngineFailed

NONCE, PROOF = 32, 32
#: What a stranger may take up: time to say who it is, and so many at once.
PATIENCE_SECONDS, MOST_STRANGERS = 5.0, 64


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, who + nonces, "sha256")


async def _read(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes: what follows them is for somebody else."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        more = await loop.sock_recv(connection, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def prompt(connection: socket.socket) -> None:
    """Have small frames sent at once, and a machine that is gone be noticed in half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def hang_up(connection: socket.socket) -> None:
    """Close a connection for good, whoever else holds it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def still_open(connections: Sequence[socket.socket]) -> list[socket.socket]:
    """Those that neither end has shut, the others are closed; reads nothing."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    shut = {descriptor for descriptor, _ in poll.poll(0)}
    for connection in connections:
        if connection.fileno() in shut:
            connection.close()
    return [connection for connection in connections if connection.fileno() >= 0]


async def admit(listener: socket.socket, secret: bytes, hand_over: Callable[[socket.socket], None]) -> None:
    """Hand over the connections of whoever knows the secret, until cancelled; those of others are closed."""
    places = asyncio.Semaphore(MOST_STRANGERS)
    async with asyncio.TaskGroup() as tasks:
        while True:
            await places.acquire()
            connection = await _next(listener)
            task = tasks.create_task(_greet(connection, secret, hand_over))
            task.add_done_callback(lambda task: places.release())


async def _next(listener: socket.socket) -> socket.socket:
    while True:
        try:
            return (await asyncio.get_running_loop().sock_accept(listener))[0]
        except OSError:  # no descriptor is free, or who came has left
            await asyncio.sleep(0.1)


async def _greet(connection: socket.socket, secret: bytes, hand_over: Callable[[socket.socket], None]) -> None:
    with connection, contextlib.suppress(OSError, EOFError, TimeoutError):
        connection.setblocking(False)
        prompt(connection)
        async with asyncio.timeout(PATIENCE_SECONDS):
            loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(NONCE)
            await loop.sock_sendall(connection, nonce)
            theirs = await _read(connection, NONCE)
            if hmac.compare_digest(await _read(connection, PROOF), _proof(secret, b"front door", nonce + theirs)):
                await loop.sock_sendall(connection, _proof(secret, b"replica", nonce + theirs))
                hand_over(connection)


async def introduce(host: str, port: int, secret: bytes) -> socket.socket:
    """A connection to a replica that let us in; OSError or :class:`EngineFailed` if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        prompt(connection)
        async with asyncio.timeout(PATIENCE_SECONDS):
            loop, ours = asyncio.get_running_loop(), secrets.token_bytes(NONCE)
            await loop.sock_connect(connection, (host, port))
            nonce = await _read(connection, NONCE)
            await loop.sock_sendall(connection, ours + _proof(secret, b"front door", nonce + ours))
            if not hmac.compare_digest(await _read(connection, PROOF), _proof(secret, b"replica", nonce + ours)):
                raise EngineFailed(f"the program that answers at {host}:{port} does not know this replica's secret")
        return connection
    except (EOFError, TimeoutError):
        connection.close()
        raise EngineFailed(f"the replica at {host}:{port} does not let this server in") from None
    except BaseException:
        connection.close()
        raise
