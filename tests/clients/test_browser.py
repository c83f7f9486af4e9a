"""examples/browser.html in a real browser, served from another origin than the API."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from tests.dashboard.browsing import CHROMIUM, PATIENCE, SWITCHES
from tests.server.live import LiveServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="needs Chromium (apt install chromium)"
)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def page_origin() -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(EXAMPLES))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{files.server_port}"
        files.shutdown()


@pytest.fixture(scope="module")
def url(page_origin, tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with LiveServer(log, "--served-model-name", "story", "--cors-origin", page_origin) as server:
        yield server.wait_for_url()


async def test_a_page_of_another_origin_streams_both_ways(page_origin, url):
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=SWITCHES, timeout=PATIENCE)
        page = await browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        await page.goto(f"{page_origin}/browser.html?url={url}")
        for place in ("#events", "#socket"):
            await page.wait_for_selector(f"{place}[data-done=yes]", state="attached", timeout=PATIENCE)
            assert (await page.inner_text(place)).strip()
        assert [line for line in complaints if "favicon" not in line and "404" not in line] == []
        await browser.close()
