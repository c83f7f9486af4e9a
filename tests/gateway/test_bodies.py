"""Bodies that are long in coming: they have a deadline, and hold up nobody else."""

from __future__ import annotations

import asyncio
import json

import pytest

from foresay.server.http.auth import AuthMiddleware
from foresay.server.models.models import MODELS
from tests.gateway.guarded import ASK, guarded
from tests.server.scripted import END, ScriptedEngine


async def announced(
    client, length: str, body: bytes = b"", path: str = "/v1/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request of whose body so much comes."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode() + body)
    return reader, writer


@pytest.mark.parametrize(
    ("length", "body"), [("Content-Length: 4000000", b"{"), ("Transfer-Encoding: chunked", b"1\r\n{\r\n")]
)
async def test_bodies_that_are_announced_and_do_not_come_are_in_nobodys_way(tokenizer, length, body):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware(), max_body_bytes=4_000_000) as client:
        opened = [await announced(client, length, body) for _ in range(70)]
        response = await client.post("/v1/completions", json=ASK)
        for _, writer in opened:
            writer.close()
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/completions", {"type": "timeout_error", "code": "body_timeout"}),
        ("/v1/messages", {"type": "timeout_error"}),
        ("/api/generate", "10 bytes of the body came in 0.1 s"),
    ],
)
async def test_a_body_has_a_deadline(tokenizer, path, said):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware()) as client:
        client.app[MODELS].server.body_timeout = 0.1
        reader, writer = await announced(client, "Content-Length: 100", b" " * 10, path)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert b" 408 " in head.partition(b"\r\n")[0] and b"Connection: close" in head
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        error = json.loads(await reader.readexactly(length))["error"]
        assert "10 bytes of the body came in" in (error if isinstance(error, str) else error["message"])
        if isinstance(said, dict):
            assert error.items() >= said.items()
        writer.close()


async def test_a_body_that_trickles_has_the_same_deadline(tokenizer):
    async with guarded(ScriptedEngine([END]), tokenizer, AuthMiddleware()) as client:
        client.app[MODELS].server.body_timeout = 0.2
        reader, writer = await announced(client, "Content-Length: 100000")
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        assert b" 408 " in await answer
        writer.close()
