"""What is not there yet is not shown as dashes and empty charts."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from foresay.server.text.tokenizer import Tokenizer
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.showing import asked, shown
from tests.server.scripted import ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]

OF_DRAFTS = ("by-depth", "tree", "drafters")


async def test_before_the_first_request_one_sentence_says_what_will_appear(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5], run=3), tokenizer) as (_, visit):
        page, nothing = visit.page, visit.page.locator(".nothing")
        await expect(nothing).to_have_text(re.compile("^Nothing has been asked yet. After the first answer this page"))
        assert await nothing.locator("a").get_attribute("href") == "#playground"
        for place in ("#tiles", "#charts", "#requests", "#speed", "#verdict", "#footer ul"):
            await expect(page.locator(place)).to_be_hidden()
        assert "–" not in await page.locator("body").inner_text()
        await asked(visit)
        await expect(nothing).to_be_hidden()
        for place in ("#tiles", "#charts", "#requests", "#verdict", "#footer ul"):
            await expect(page.locator(place)).to_be_visible()


async def test_what_nobody_knows_is_left_out(tokenizer: Tokenizer) -> None:
    """Nothing is drafted, and nothing estimated: no tile and no chart tells of it."""
    async with shown(ScriptedEngine([5], run=1), tokenizer) as (_, visit):
        page = visit.page
        await asked(visit)
        await expect(page.locator("[data-tile='Tokens per pass']")).to_contain_text("1.00")
        await expect(page.locator("[data-tile='Drafts right']")).to_be_hidden()
        await expect(page.locator("#speed")).to_be_hidden()
        for chart in OF_DRAFTS:
            await expect(page.locator(f"#{chart}")).to_be_hidden()
        await expect(page.locator(".left-out")).to_have_text(
            "Nothing was drafted yet, so there are no charts of drafts."
        )
        assert "–" not in await page.locator("#tiles").inner_text()


async def test_where_nothing_ran_in_the_time_chosen_a_sentence_says_so(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5], run=3), tokenizer) as (_, visit):
        page = visit.page
        await asked(visit)
        await expect(page.locator("#tokens-per-step")).to_be_visible()
        await expect(page.locator(".left-out")).to_be_hidden()
        await page.evaluate(
            """async () => {
              const { Timeline } = await import("/dashboard/static/timeline.js");
              Timeline.prototype.shown = () => [];
            }"""
        )
        await page.click("#span button[data-span='180']")
        await expect(page.locator(".left-out")).to_have_text("Nothing ran in the last 3 min.")
        await expect(page.locator("#tokens-per-step")).to_be_hidden()
        await expect(page.locator("#by-depth")).to_be_visible()
        await expect(page.locator("[data-tile='Tokens per pass']")).to_be_visible()
