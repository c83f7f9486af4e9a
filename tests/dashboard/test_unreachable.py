"""A server that is gone, and comes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from bench.serving import free_port
from tests.dashboard.browsing import dashboard, needs_chromium
from tests.server.live import LiveServer

pytestmark = [needs_chromium, pytest.mark.slow]


async def test_the_page_says_since_when_and_goes_on_by_itself(tmp_path: Path) -> None:
    flags = ("--draft", "ngram", "--threads", "1", "--port", str(free_port()))  # nobody is given it in between
    with LiveServer(tmp_path / "first", *flags) as server:
        url = server.wait_for_url()
        async with dashboard(url) as visit:
            page = visit.page
            await visit.run(max_output_tokens=8)
            notice, tiles = page.locator("#notice"), page.locator("#tiles")
            generated = page.locator("#footer li[data-total=generation_tokens] b")
            await expect(generated).to_have_text("8")
            await expect(notice).not_to_contain_text("unreachable")
            server.process.kill()
            server.process.wait()
            await expect(notice).to_have_text(re.compile(r"^Server unreachable since \d\d:\d\d:\d\d\. Trying again"))
            assert await tiles.evaluate("one => Number(getComputedStyle(one).opacity)") < 0.6
            assert "grayscale" in await tiles.evaluate("one => getComputedStyle(one).filter")
            since = await notice.inner_text()
            for _ in range(2):  # the second time what the first one changed is there
                await page.wait_for_event("requestfailed")
            assert await notice.inner_text() == since, "that moment does not move"
            await visit.keep_picture("unreachable", tmp_path)
            with LiveServer(tmp_path / "second", *flags) as again:
                again.wait_for_url()
                await expect(notice).not_to_contain_text("unreachable")  # another notice may stand there
                assert await tiles.evaluate("one => getComputedStyle(one).opacity") == "1"
                await expect(generated).to_have_text("0")
                await visit.run(max_output_tokens=6)
                await expect(generated).to_have_text("6")
