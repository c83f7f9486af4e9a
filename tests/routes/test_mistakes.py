"""Mistakes of our own while a stream runs, put in on purpose: each API tells of them in its own way, and the connection
closes. Seen byte by byte, since clients hide what comes after a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from foresay.server.api.common import route
from foresay.server.host.service import Service
from foresay.server.observe.telemetry.request_stats import RequestStats
from foresay.server.observe.telemetry.telemetry import Telemetry
from foresay.server.text.choice import Choice
from tests.server.scripted import END, ScriptedEngine, served

TURNS: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "stream": True}
PROMPT: dict[str, Any] = {"model": "toy", "prompt": "x", "stream": True}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT | {"max_tokens": 50},
    "/v1/chat/completions": TURNS,
    "/v1/messages": TURNS | {"max_tokens": 50},
    "/v1/responses": {"input": "x", "stream": True},
    "/api/chat": TURNS,
    "/api/generate": PROMPT,
}
#: What says that an answer is whole.
WHOLE = (b"[DONE]", b"message_stop", b"response.completed", b'"done":true')


def saying(tokenizer) -> ScriptedEngine:
    """One that says a text and ends it."""
    return ScriptedEngine([*tokenizer.encode("once upon a time"), END], pause=0.002)


def last_of(path: str, body: bytes) -> dict[str, Any]:
    """The last event of a stream, or its last line."""
    end = b"\n" if path.startswith("/api/") else b"\n\n"
    assert body.endswith(end)
    last = body.removesuffix(end).split(end)[-1]
    event: dict[str, Any] = json.loads(last[last.index(b"{") :])
    return event


def error_of(path: str, event: dict[str, Any]) -> str:
    """What the API's own error event says; an assertion for any other event."""
    if path == "/v1/responses":
        assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
        return str(event["response"]["error"]["message"])
    if path == "/v1/messages":
        assert event["type"] == "error" and event["error"]["type"] == "api_error"
        return str(event["error"]["message"])
    if path.startswith("/api/"):
        return str(event["error"])
    assert event["error"]["type"] == event["error"]["code"] == "internal_error"
    return str(event["error"]["message"])


async def raw(client, path: str, body: dict[str, Any], ask: str = "POST", more: str = "") -> bytes:
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


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [(Choice, "take", 5), (RequestStats, "kept", 5), (RequestStats, "delivered", 5), (route, "one_line", 5)],
    ids=["text", "counts", "times", "encoding"],
)
async def test_a_mistake_in_mid_stream_is_told_in_the_stream(tokenizer, monkeypatch, caplog, path, owner, name, after):
    services: list[Service] = []
    async with served(saying(tokenizer), tokenizer, services.append) as client:
        breaks(monkeypatch, owner, name, after)
        received = await raw(client, path, ASKED[path])
        head, _, body = received.partition(b"\r\n\r\n")
        said, ended = unchunked(body)
        assert head.startswith(b"HTTP/1.1 200 ") and received.count(b"HTTP/1.") == 1
        assert ended, "the error is the last of it"
        assert not any(mark in said for mark in WHOLE)
        assert "the server's log says more about request mine" in error_of(path, last_of(path, said))
        assert caplog.text.count("KeyError: 'a mistake of ours'") == caplog.text.count("Traceback") == 1
        assert services[0].running == 0
        said = await (await client.post(path, json=ASKED[path])).read()
        assert any(mark in said for mark in WHOLE), "others are served as ever"


@pytest.mark.parametrize("path", ASKED)
async def test_a_mistake_before_the_first_byte_is_a_500(tokenizer, monkeypatch, path):
    async with served(saying(tokenizer), tokenizer) as client:
        breaks(monkeypatch, Choice, "take", 0)
        response = await client.post(path, json=ASKED[path])
        assert response.status == 500
        assert "the server's log says more about request" in await response.text()
        assert (await client.post(path, json=ASKED[path])).status == 200


@pytest.mark.parametrize("path", ASKED)
async def test_a_mistake_after_the_end_changes_nothing_of_what_was_said(tokenizer, monkeypatch, path):
    async with served(saying(tokenizer), tokenizer) as client:
        breaks(monkeypatch, RequestStats, "failed", 0)
        received = await raw(client, path, ASKED[path], more="Connection: close\r\n")
        said, ended = unchunked(received.partition(b"\r\n\r\n")[2])
        assert ended and received.count(b"HTTP/1.") == 1
        assert any(mark in said for mark in WHOLE)


@pytest.mark.parametrize(
    ("ask", "path", "owner", "name"),
    [("GET", "/dashboard/feed", Telemetry, "points"), ("POST", "/tokenize", route, "_write")],
    ids=["feed", "tokens"],
)
async def test_what_has_no_errors_of_its_own_is_cut_off(tokenizer, monkeypatch, ask, path, owner, name):
    async with served(ScriptedEngine([5]), tokenizer) as client:
        breaks(monkeypatch, owner, name, 1)
        received = await raw(client, path, {"prompt": "once upon a time"}, ask)
        assert received.startswith(b"HTTP/1.1 200 ") and received.count(b"HTTP/1.") == 1
        assert not unchunked(received.partition(b"\r\n\r\n")[2])[1], "nobody takes it for whole"
