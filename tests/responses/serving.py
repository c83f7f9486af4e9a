"""A server with ``/v1/responses`` around a scripted engine, on a real port, for the official client."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
from aiohttp.test_utils import TestClient, TestServer, get_port_socket

from foresay.server.api.responses.store import Responses, SocketLimits, StoreLimits
from foresay.server.http.app import create_app
from foresay.server.http.auth import AuthMiddleware
from foresay.server.models.service import ServerState, Service, Text
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from tests.replicas.scripted import asked
from tests.server.live import openai_client
from tests.server.scripted import END, ScriptedEngine
from tests.server.staying import alone, service_of

STORY = "Once upon a time there was a fox."


def saying(tokenizer: Tokenizer, text: str = STORY, **options: Any) -> ScriptedEngine:
    """An engine that says ``text`` to everybody."""
    return ScriptedEngine([*tokenizer.encode(text, False), END], **options)


@asynccontextmanager
async def serving(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    sockets: SocketLimits | None = None,
    stored: StoreLimits | None = None,
    middleware: Callable[..., Any] | None = None,
    auth: AuthMiddleware | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> AsyncIterator[tuple[TestClient, Service]]:
    """The server's HTTP client and its service. send_buffer: bytes the kernel holds for a client that does not read."""
    text = Text(tokenizer, SamplingDefaults(), ChatFormat.of(tokenizer))
    state = ServerState(Responses(stored, sockets))

    def listening(host: str, port: int, family: socket.AddressFamily) -> socket.socket:
        opened = get_port_socket(host, port, family)
        if send_buffer is not None:  # accepted sockets inherit it
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        return opened

    async with asked(engine) as asking:
        service = service_of(asking, text, state, **options)
        app = create_app(alone(service), auth)
        if middleware is not None:
            app.middlewares.append(middleware)
        async with TestClient(TestServer(app, socket_factory=listening)) as client:
            yield client, service


def address(http: TestClient) -> str:
    """Where the server listens."""
    return str(http.make_url("")).rstrip("/")


@asynccontextmanager
async def asking(engine: ScriptedEngine, tokenizer: Tokenizer, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of such a server."""
    async with serving(engine, tokenizer, **options) as (http, _), openai_client(address(http)) as client:
        yield client
