"""A WebSocket client that does what a test requires, right or wrong: it may stop reading, break frames, or vanish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from typing import Any, Self

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
HANDSHAKE = (
    "GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


#: Fields of a request that every event about its response repeats: so large that a writer is stuck at once.
STUCK: dict[str, Any] = {
    "tools": [{"type": "function", "name": "look", "description": "x" * 60_000, "parameters": {"type": "object"}}],
    "tool_choice": "none",
}


class Bare:
    """One connection. Nothing is read, answered or closed unless a test says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int = 4096) -> Self:
        """Connect with a receive buffer so small that what is not read soon stays with the server."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
        writer.write(HANDSHAKE.encode())
        status = await reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in status.split(b"\r\n")[0], status
        return cls(reader, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, message: Any, opcode: int = TEXT, final: bool = True) -> None:
        """A frame; anything that is not bytes becomes JSON."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.writer.write(frame(data, opcode, final))
        await self.writer.drain()

    async def create(self, **fields: Any) -> None:
        """Ask for a response."""
        await self.send({"type": "response.create"} | fields)

    async def read(self) -> tuple[int, bytes]:
        """The next frame: opcode and payload. IncompleteReadError at the end of the connection."""
        first, length = await self.reader.readexactly(2)
        if length == 126:
            (length,) = struct.unpack("!H", await self.reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", await self.reader.readexactly(8))
        return first & 15, await self.reader.readexactly(length)

    async def event(self) -> dict[str, Any]:
        """The next text frame."""
        opcode, data = await self.read()
        assert opcode == TEXT, (opcode, data)
        event: dict[str, Any] = json.loads(data)
        return event

    async def close_code(self) -> int | None:
        """Read everything that is left; the code of the close frame, None if there was none."""
        try:
            while True:
                opcode, data = await self.read()
                if opcode == CLOSE:
                    return int.from_bytes(data[:2], "big")
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None

    def half_close(self) -> None:
        """Send no more, but stay."""
        self.writer.write_eof()

    def vanish(self) -> None:
        """Cut the connection."""
        self.writer.transport.abort()


def frame(data: bytes, opcode: int = TEXT, final: bool = True) -> bytes:
    """A client's frame, masked as it must be."""
    mask = os.urandom(4)
    head = bytes([(128 if final else 0) | opcode])
    if len(data) < 126:
        head += bytes([128 | len(data)])
    elif len(data) < 1 << 16:
        head += bytes([128 | 126]) + struct.pack("!H", len(data))
    else:
        head += bytes([128 | 127]) + struct.pack("!Q", len(data))
    repeated = (mask * (len(data) // 4 + 1))[: len(data)]
    masked = (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(data), "big")
    return head + mask + masked
