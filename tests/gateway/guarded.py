"""The scripted server behind the keys and limits of a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from foresay.server.gateway.keys import entry_text
from foresay.server.http.app import HTTP_LOG, create_app
from foresay.server.http.auth import AuthMiddleware
from foresay.server.models.service import Text
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from tests.server.scripted import ScriptedEngine
from tests.server.staying import alone, service_of

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef"
ASK = {"prompt": "Tell", "max_tokens": 4}


def append(path: Path, name: str, key: str) -> None:
    """Add a key to a file of keys, as ``foresay keys new NAME >> FILE`` does, for its owner's eyes only."""
    path.touch(0o600)
    path.write_text(path.read_text() + entry_text(name, key))


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def guarded(
    engine: ScriptedEngine, tokenizer: Tokenizer, auth: AuthMiddleware, **options: Any
) -> AsyncIterator[TestClient]:
    """A client of a server around ``engine`` and behind ``auth``."""
    service = service_of(engine, Text(tokenizer, SamplingDefaults()), **options)
    server = TestServer(create_app(alone(service), auth))
    await server.start_server(logger=HTTP_LOG, access_log=None, auto_decompress=False)
    async with TestClient(server) as client:
        yield client
