"""The real server with keys from a file: nothing is shared between them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from foresay.server.gateway import keys
from tests.gateway.guarded import append, bearer
from tests.server.live import LiveServer

STORY = "There was once a miller who had three sons, a mill, a donkey and a cat. " * 6
ALICE, BOB = keys.new_key(), keys.new_key()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    append(path, "alice", ALICE)
    append(path, "bob", BOB)
    return path


@pytest.fixture(scope="module")
def server(file, tmp_path_factory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with LiveServer(log, "--api-key-file", str(file), "--access-log") as server:
        server.wait_for_url()
        yield server


@pytest.fixture
def url(server: LiveServer) -> str:
    return server.wait_for_url()


async def ask(url: str, key: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"prompt": STORY, "max_tokens": 2, "temperature": 0} | fields
    async with (
        aiohttp.ClientSession(url, headers=bearer(key)) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        return response.status, await response.json()


async def cached(url: str, key: str, **fields: Any) -> int:
    """Prompt tokens whose KV was there already."""
    status, body = await ask(url, key, **fields)
    assert status == 200, body
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_prompt_is_remembered_for_its_own_key_and_for_no_other(url):
    assert await cached(url, ALICE) == 0
    assert await cached(url, ALICE) > 0
    assert await cached(url, BOB) == 0, "or the time would tell bob what alice has asked"
    assert await cached(url, BOB) > 0
    assert await cached(url, ALICE, cache_salt="s") == 0
    assert await cached(url, BOB, cache_salt="s") == 0
    assert await cached(url, ALICE, cache_salt="s") > 0


async def test_nothing_is_inflated_for_anybody(server, url):
    """A megabyte on the wire would become a gigabyte. What is measured is the server's processor time."""
    squeezing, zeros = zlib.compressobj(9, wbits=31), bytes(1 << 24)
    head, body = (squeezing.compress(zeros) + squeezing.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb = head + 63 * body
    before = server.processor_seconds
    for headers, status in (({}, 401), (bearer(ALICE), 415)):
        async with (
            aiohttp.ClientSession(url, headers=headers | {"Content-Encoding": "gzip"}) as session,
            session.post("/v1/completions", data=bomb) as response,
        ):
            assert response.status == status
            assert status == 401 or response.headers["Accept-Encoding"] == "identity"
    await ask(url, ALICE)
    assert server.processor_seconds - before < seconds_to_inflate(bomb) / 4


def seconds_to_inflate(bomb: bytes) -> float:
    """Processor time, on whatever machine this is."""
    began, inflater, left = time.thread_time(), zlib.decompressobj(wbits=31), bomb
    while inflater.decompress(left, 1 << 20):
        left = inflater.unconsumed_tail
    return time.thread_time() - began
