"""The dashboard in a browser: of a real server, of one that is gone and comes back, of several models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import expect

from bench.serving import free_port
from foresay.server.gateway.keys import KeyStore
from foresay.server.http.auth import AuthMiddleware
from tests.dashboard.browsing import dashboard, needs_chromium, visiting
from tests.gateway.guarded import guarded
from tests.models.serving import serving
from tests.server.live import LiveServer
from tests.server.scripted import ScriptedEngine
from tests.telemetry.scraping import scraped

pytestmark = [needs_chromium, pytest.mark.slow]

KEY = "sk-page-0123456789abcdef"
CHARTS = (
    *("speed-over-time", "tokens-per-step", "time-per-step", "choices", "load", "by-depth"),
    *("chunk-gaps", "token-times", "tree"),
)
COUNTED = {
    name: f"foresay:{name}_total"
    for name in ("generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
}


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with LiveServer(log, "--draft-tree", "3,2,1", "--threads", "1") as server:
        yield server.wait_for_url()


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
        grown = {name: after.sum(counter) - before.sum(counter) for name, counter in COUNTED.items()}
        assert tuple(grown.values()) == (count, drafted, accepted)
        for name, counter in COUNTED.items():
            shown = page.locator(f"#footer li[data-total={name}] b")
            await expect(shown).to_have_text(f"{after.sum(counter):,.0f}")
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


# -- a server that is gone, and comes back -----------------------------------------------------------------------------


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


# -- several models ----------------------------------------------------------------------------------------------------


TEXTS = {"fox": "said the fox", "org/owl&1.5:q": "said the owl"}


async def test_the_model_is_chosen_in_the_header_and_answers_in_the_playground(tokenizer):
    async with serving(tokenizer, TEXTS) as server, visiting(str(server.client.make_url("")).rstrip("/")) as visit:
        page = visit.page
        await visit.go()
        await visit.ready()
        options = page.locator("#model option")
        await expect(options).to_have_text(["fox (not loaded)", "org/owl&1.5:q (not loaded)"])
        await expect(page.locator("#notice")).to_contain_text("Not loaded: the next request loads it.")
        await page.select_option("#model", "org/owl&1.5:q")
        await page.wait_for_url("**model=org**")
        await visit.ready()
        assert await page.locator("#model").input_value() == "org/owl&1.5:q"
        await visit.run()
        await expect(page.locator(".answer .markdown")).to_contain_text("said the owl")
        await expect(options).to_have_text(["fox (not loaded)", "org/owl&1.5:q"])
        await expect(page.locator("#notice")).not_to_contain_text("Not loaded")
        await expect(page.locator("#requests tbody tr[data-id]")).to_have_count(2)  # loading it, and the answer
        assert server.loads == {"fox": 0, "org/owl&1.5:q": 1}
        assert visit.complaints == []
        assert visit.tried == []
