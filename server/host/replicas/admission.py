"""Authentication of connections to a replica: both ends prove that they know the secret, which is never sent.

::

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
from collections.abc import Callable

from foresay.server.schemas.errors import EngineFailed

NONCE, PROOF = 32, 32
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
        loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(NONCE)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await loop.sock_sendall(connection, nonce)
            theirs = await _read(connection, NONCE)
            if not hmac.compare_digest(await _read(connection, PROOF), _proof(secret, b"front door", nonce + theirs)):
                return
            await loop.sock_sendall(connection, _proof(secret, b"replica", nonce + theirs))
        await loop.create_connection(made, sock=connection)
        unless_admitted.pop_all()


async def introduce(host: str, port: int, secret: bytes) -> socket.socket:
    """Connect to a replica and authenticate; raises OSError or :class:`EngineFailed`."""
    loop, ours = asyncio.get_running_loop(), secrets.token_bytes(NONCE)
    with contextlib.ExitStack() as unless_admitted:
        connection = unless_admitted.enter_context(socket.socket(family(host), socket.SOCK_STREAM))
        connection.setblocking(False)
        prompt(connection)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await loop.sock_connect(connection, (host, port))
                nonce = await _read(connection, NONCE)
                await loop.sock_sendall(connection, ours + _proof(secret, b"front door", nonce + ours))
                answer = await _read(connection, PROOF)
        except (EOFError, TimeoutError):
            raise EngineFailed(f"the replica at {host}:{port} does not let this server in") from None
        if not hmac.compare_digest(answer, _proof(secret, b"replica", nonce + ours)):
            raise EngineFailed(f"the program that answers at {host}:{port} does not know this replica's secret")
        unless_admitted.pop_all()
        return connection
