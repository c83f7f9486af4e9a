"""Mistakes of our own while a stream runs, put in on purpose: each API tells of them in its own way, and the connection
closes. Seen byte by byte, since clients hide what comes after a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from foresay.server.api.common import route
from foresay.server.metrics.telemetry import RequestStats, Telemetry
from foresay.server.models.service import Service
from foresay.server.text.choice import Choice
from tests.routes.apis import APIS, Api
from tests.server.scripted import END, ScriptedEngine, served

apis = pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))


def saying(tokenizer) -> ScriptedEngine:
    """One that says a text and ends it."""
    return ScriptedEngine([*tokenizer.encode("once upon a time"), END], pause=0.002)


async def raw(client, path: str, body: Mapping[str, Any], ask: str = "POST", more: str = "") -> bytes:
    """All that a connection brings until the server closes it. more: headers, a line each."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    content = json.dumps(body).encode()
    about = f"Host: localhost\r\nX-Request-Id: mine\r\nContent-Length: {len(content)}\r\n{more}"
    writer.write(f"{ask} {path} HTTP/1.1\r\n{about}\r\n".encode() + content)
    async with asyncio.timeout(60):
        received = await reader.read()
    writer.close()
    return received


def unchunked(body: bytes) -> tuple[bytes, bool]:
    """What is in the chunks, and whether the last one says that it is."""
    found = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        if int(size, 16) == 0:
            assert rest == b"\r\n", "nothing comes after the end"
            return found, True
        found, body = found + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return found, False


def breaks(monkeypatch, owner: Any, name: str, after: int) -> None:
    """Have a function of ours raise from its call number ``after`` on."""
    plain, calls = getattr(owner, name), iter(range(1_000_000))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise KeyError("a mistake of ours")
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


@apis
@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [(Choice, "take", 5), (RequestStats, "kept", 5), (RequestStats, "delivered", 5), (route, "one_line", 5)],
    ids=["text", "counts", "times", "encoding"],
)
async def test_a_mistake_in_mid_stream_is_an_error_in_the_stream(
    tokenizer, monkeypatch, caplog, api: Api, owner, name, after
):
    services: list[Service] = []
    async with served(saying(tokenizer), tokenizer, services.append) as client:
        breaks(monkeypatch, owner, name, after)
        received = await raw(client, api.path, api.request(True))
        head, _, body = received.partition(b"\r\n\r\n")
        output, ended = unchunked(body)
        assert head.startswith(b"HTTP/1.1 200 ") and received.count(b"HTTP/1.") == 1
        assert ended, "the error is the last of it"
        assert api.whole not in output
        last = api.events(output.decode())[-1:]
        assert "the server's log says more about request mine" in (api.joined(last).error or "")
        assert last[0].get("type") in (None, "error", "response.failed")
        assert caplog.text.count("KeyError: 'a mistake of ours'") == caplog.text.count("Traceback") == 1
        assert services[0].running == 0
        output = await (await client.post(api.path, json=api.request(True))).read()
        assert api.whole in output, "others are served as ever"


@apis
async def test_a_mistake_before_the_first_byte_is_a_500(tokenizer, monkeypatch, api: Api):
    async with served(saying(tokenizer), tokenizer) as client:
        breaks(monkeypatch, Choice, "take", 0)
        response = await client.post(api.path, json=api.request(True))
        assert response.status == 500
        assert "the server's log says more about request" in await response.text()
        assert (await client.post(api.path, json=api.request(True))).status == 200


@apis
async def test_a_mistake_after_the_end_changes_nothing_of_the_answer(tokenizer, monkeypatch, api: Api):
    async with served(saying(tokenizer), tokenizer) as client:
        breaks(monkeypatch, RequestStats, "failed", 0)
        received = await raw(client, api.path, api.request(True), more="Connection: close\r\n")
        output, ended = unchunked(received.partition(b"\r\n\r\n")[2])
        assert ended and received.count(b"HTTP/1.") == 1
        assert api.whole in output


async def test_what_has_no_errors_of_its_own_is_cut_off(tokenizer, monkeypatch):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        breaks(monkeypatch, Telemetry, "points", 1)
        received = await raw(client, "/dashboard/feed", {}, "GET")
        assert received.startswith(b"HTTP/1.1 200 ") and received.count(b"HTTP/1.") == 1
        assert not unchunked(received.partition(b"\r\n\r\n")[2])[1], "nobody takes it for whole"
