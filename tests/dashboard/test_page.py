"""The dashboard in a browser, of a real server with the bundled pair."""

from __future__ import annotations

import re
from collections.abc import Iterator

import aiohttp
import pytest
from playwright.async_api import expect

from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import AuthMiddleware
from tests.dashboard.browsing import dashboard, needs_chromium, visiting
from tests.gateway.guarded import guarded
from tests.server.live import LiveServer
from tests.server.scripted import ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]

KEY = "sk-page-0123456789abcdef"
CHARTS = (
    *("speed-over-time", "tokens-per-step", "time-per-step", "choices", "load", "by-depth"),
    *("chunk-gaps", "token-times", "tree"),
)
COUNTED = {
    "generation_tokens": "generation_tokens_total",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with LiveServer(log, "--draft-tree", "3,2,1", "--threads", "1") as server:
        yield server.wait_for_url()


async def scraped(url: str) -> dict[str, float]:
    """The counters of /metrics, labels added up."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = re.findall(r"^foresay:(\w+?)(?:\{.*\})? ([\d.e+-]+)$", await response.text(), re.MULTILINE)
    found: dict[str, float] = {}
    for name, value in lines:
        found[name] = found.get(name, 0.0) + float(value)
    return found


async def test_the_playground_fills_the_charts_and_all_numbers_agree(url, tmp_path):
    async with dashboard(url) as visit:
        page = visit.page
        before = await scraped(url)
        await visit.run(max_output_tokens=60, temperature=0.8, seed=3)
        assert len(visit.sockets) == 1
        answer = page.locator(".answer")
        count, drafted, accepted = await visit.counts(answer)
        tokens = await visit.tokens(answer)
        assert 0 <= count - len(tokens) <= 1, "all tokens but the one that ends the text are shown"
        assert 0 <= accepted - sum(1 for _, depth in tokens if depth) <= 1
        assert drafted > accepted > 0
        after = await scraped(url)
        grown = {name: after[counter] - before.get(counter, 0) for name, counter in COUNTED.items()}
        assert tuple(grown.values()) == (count, drafted, accepted)
        for name, counter in COUNTED.items():
            shown = page.locator(f"#footer li[data-total={name}] b")
            await expect(shown).to_have_text(f"{after[counter]:,.0f}")
        for chart in CHARTS:
            await page.wait_for_selector(f"#{chart} :is(.fill, .line)", state="attached")
            await visit.paints(chart)
        await expect(page.locator("#speed b")).to_have_text(re.compile(r"^[\d.]+×$"))
        await expect(page.locator("#pair")).to_contain_text("bundled")
        await visit.keep_picture("light", tmp_path)
        assert visit.complaints == []


async def test_light_and_dark_and_what_was_chosen_stays(url):
    background = "getComputedStyle(document.body).backgroundColor"
    shades = {}
    for scheme in ("light", "dark"):
        async with dashboard(url, color_scheme=scheme) as visit:
            shades[scheme] = await visit.page.evaluate(background)
            await visit.page.click("#theme")
            other = await visit.page.evaluate(background)
            assert other != shades[scheme]
            await visit.page.reload()
            assert await visit.page.evaluate(background) == other
    assert (
        sum(map(int, re.findall(r"\d+", shades["dark"])))
        < 150
        < 600
        < sum(map(int, re.findall(r"\d+", shades["light"])))
    )


async def test_a_key_is_requested_once_and_a_wrong_one_refused(tokenizer, tmp_path):
    async with (
        guarded(ScriptedEngine(tokenizer.encode("a fox ")), tokenizer, AuthMiddleware(KeyStore([KEY]))) as client,
        visiting(f"http://127.0.0.1:{client.port}") as visit,
    ):
        page = visit.page
        await visit.go("/dashboard")
        dialog, field = page.locator("dialog#key"), page.locator("#key-value")
        await expect(dialog).to_be_visible()
        await expect(page.locator("#key-wrong")).to_be_empty()
        await field.fill("sk-wrong-0123456789abcdef")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-wrong")).to_have_text(re.compile("does not know this key"))
        await visit.keep_picture("key", tmp_path)
        await field.fill(KEY)
        await page.keyboard.press("Enter")
        await visit.ready()
        await expect(dialog).to_be_hidden()
        await visit.run(max_output_tokens=12)
        assert await visit.tokens(page.locator(".answer"))
        await expect(page.locator("#requests tr[data-id]")).to_have_count(1)
        await page.reload()
        await visit.ready()
        await expect(dialog).to_be_hidden()
        assert await page.evaluate("localStorage.length") == 0
