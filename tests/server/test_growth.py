"""A server at its limits: no more memory than it needs, and no more files than it may open."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.live import LiveServer, status_of
from tests.verifier.families import make

ROOT = Path(__file__).resolve().parents[2]

#: MiB; what oneDNN kept of 140 other lengths, 700 other products, once took 170.
MOST = 20.0

#: Prints MiB that an engine in int4 holds without using them.
HELD = """
import ctypes, sys
from pathlib import Path
from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig

def resident() -> int:
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

config = EngineConfig(target=sys.argv[1], draft="none", dtype="bfloat16", quantize="int4", kv_tokens=1024, threads=1)
engine, held = build_engine(config), resident()
ctypes.CDLL(None).malloc_trim(0)
print((held - resident()) / 1024)
"""


def said(arguments: list[str]) -> str:
    """What a Python of its own prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_prompts_of_new_lengths_leave_no_memory_behind(tmp_path):
    make("llama2", tmp_path, hidden_size=192, intermediate_size=384, vocab_size=512, num_hidden_layers=1)
    assert float(said(["-m", "tests.server.growth", str(tmp_path)])) < MOST


@pytest.mark.slow
def test_what_loading_needed_is_given_back(tmp_path):
    make("llama2", tmp_path, hidden_size=1024, intermediate_size=4096, vocab_size=512, num_hidden_layers=2)
    assert float(said(["-c", HELD, str(tmp_path)])) < MOST


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
