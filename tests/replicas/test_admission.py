"""Who is let in to ask an engine."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from foresay.server.replicas import hosted
from foresay.server.replicas.hosted import NONCE_BYTES, PROOF_BYTES, admit, introduce
from foresay.server.schemas.errors import EngineFailed
from tests.server.wire import until

SECRET = os.urandom(32)


class Gate:
    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.let_in: list[asyncio.WriteTransport] = []

    def made(self) -> asyncio.Protocol:
        gate = self

        class Admitted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.WriteTransport)
                gate.let_in.append(transport)

        return Admitted()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate()
    task = asyncio.create_task(admit(made.listener, SECRET, made.made))
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    made.listener.close()
    for each in made.let_in:
        each.close()


async def test_who_knows_the_secret_is_let_in_and_what_follows_is_left_to_others(gate):
    with await introduce("127.0.0.1", gate.port, SECRET) as ours:
        await until(lambda: gate.let_in)
        gate.let_in[0].write(b"first frame")
        assert await asyncio.get_running_loop().sock_recv(ours, 100) == b"first frame"


async def test_who_does_not_know_it_is_not(gate):
    with pytest.raises(EngineFailed, match="does not let this server in"):
        await introduce("127.0.0.1", gate.port, os.urandom(32))
    assert not gate.let_in


async def test_strangers_do_not_keep_others_out(gate, monkeypatch):
    monkeypatch.setattr(hosted, "HANDSHAKE_SECONDS", 1.0)
    silent = [socket.create_connection(("127.0.0.1", gate.port)) for _ in range(hosted.MOST_UNAUTHENTICATED)]
    for each in silent[::2]:
        each.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(NONCE_BYTES + PROOF_BYTES))
    with await introduce("127.0.0.1", gate.port, SECRET):
        await until(lambda: gate.let_in)
        assert len(gate.let_in) == 1
    for each in silent:
        each.close()


async def test_a_server_without_the_secret_gets_nothing():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(os.urandom(NONCE_BYTES))
        requested.append(await reader.readexactly(NONCE_BYTES + PROOF_BYTES))
        writer.write(os.urandom(PROOF_BYTES))
        writer.close()

    requested: list[bytes] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with pytest.raises(EngineFailed, match="does not know this replica's secret"):
            await introduce("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
    assert SECRET not in requested[0]
