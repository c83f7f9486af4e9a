"""A server at its limit of open files."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from pathlib import Path

import pytest

from tests.server.live import LiveServer, status_of


def limit_of(process: int) -> tuple[int, int]:
    """Soft and hard."""
    return resource.prlimit(process, resource.RLIMIT_NOFILE)


def open_files(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


@pytest.mark.slow
async def test_clients_beyond_the_limit_wait_and_the_log_stays_short(tmp_path):
    with LiveServer(tmp_path / "log", "--draft", "none", "--max-model-len", "256") as server:
        url = await asyncio.to_thread(server.wait_for_url)
        process = server.process.pid
        soft, hard = limit_of(process)
        assert soft == hard
        resource.prlimit(process, resource.RLIMIT_NOFILE, (open_files(process) + 2, hard))
        before = len(server.output)
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        clients = [socket.create_connection(address) for _ in range(8)]
        try:
            deadline = time.monotonic() + 60
            while "open files it may have" not in server.output:
                assert time.monotonic() < deadline, server.output
                await asyncio.sleep(0.1)
            await asyncio.sleep(2.5)  # asyncio tries again every second, each time with a traceback of 2 kB or more
            said = server.output[before:]
            assert said.count("open files it may have") == 1
            assert "Traceback" not in said and len(said) < 1000
        finally:
            for client in clients:
                client.close()
        async with asyncio.timeout(60):
            assert await status_of(url, "/ready") == 200
