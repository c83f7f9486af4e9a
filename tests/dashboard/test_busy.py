"""A machine that does something else beside."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.dashboard.browsing import needs_chromium, visiting
from tests.server.live import LiveServer, openai_client

pytestmark = [
    needs_chromium,
    pytest.mark.soak,  # the others' tests would wait for the cores that this one keeps busy
    pytest.mark.skipif(
        not Path("/proc/self/schedstat").exists(), reason="a kernel that does not count run delay, so nobody knows"
    ),
]
BUSY = "Other programs keep this machine busy: the engine spends "


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many that want a core each."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


async def test_the_page_and_the_log_say_that_something_else_keeps_it_busy(tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    with LiveServer(tmp_path / "server", "--draft", "ngram", "--threads", str(cores)) as server:
        url = server.wait_for_url()
        async with visiting(url) as visit, openai_client(url) as client:
            notice = visit.page.locator("#notice")
            await visit.go("/dashboard")
            await visit.ready()
            with busy(2 * cores):
                for seed in range(6):
                    await client.completions.create(
                        model="bundled", prompt=f"{seed}", max_tokens=400, seed=seed, extra_body={"ignore_eos": True}
                    )
                await expect(notice).to_have_text(re.compile(f"^{BUSY}\\d+ % of its time"))
                await visit.keep_picture("busy", tmp_path)
                async with asyncio.timeout(60):
                    while BUSY not in server.output:
                        await asyncio.sleep(0.5)
            await expect(notice).to_be_hidden()
