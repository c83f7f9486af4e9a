"""What the page says about answers that were decoded again plainly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from foresay.server.metrics import selfcheck
from foresay.server.text.tokenizer import Tokenizer
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.showing import posted, shown
from tests.selfcheck.checking import Diverging

pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "QUIET_SECONDS", 0.03)


async def shade(page: Page) -> str:
    """The colour of what the header says about checks."""
    colour: str = await page.locator("[data-fact=check] button").evaluate("one => getComputedStyle(one).color")
    return colour


async def test_the_header_says_how_many_differ_and_warns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = Diverging(tokenizer.encode("once upon a time there was a fox"), run=3)
    engine.differs_at = 1000
    async with shown(engine, tokenizer, self_check=1.0) as (_, visit):
        button = visit.page.locator("[data-fact=check] button")
        await expect(button).to_have_text("self-check: no answers yet")
        await posted(visit, max_tokens=12)
        await expect(button).to_have_text("self-check: 1 answer, 0 differ")
        await button.click()
        await expect(visit.page.locator(".why:popover-open")).to_have_text(
            re.compile(r"^100 % .*: 12 tokens compared, 0 waiting, 0 skipped$")
        )
        good = await shade(visit.page)
        engine.differs_at = 5
        await posted(visit, max_tokens=12)
        await expect(button).to_have_text("self-check: 2 answers, 1 differs")
        assert await shade(visit.page) != good
        assert await visit.page.locator("#facts .bad[data-fact=check]").count() == 1
        await visit.keep_picture("self-check", tmp_path)
        assert visit.complaints == []


async def test_nothing_is_shown_where_no_check_was_requested(tokenizer: Tokenizer) -> None:
    engine = Diverging(tokenizer.encode("once upon a time"), run=3)
    async with shown(engine, tokenizer) as (_, visit):
        await posted(visit, max_tokens=12)
        await expect(visit.page.locator("#footer li[data-total=generation_tokens] b")).to_have_text("12")
        await expect(visit.page.locator("#facts li")).not_to_have_count(0)
        assert await visit.page.locator("[data-fact=check] button").count() == 0
