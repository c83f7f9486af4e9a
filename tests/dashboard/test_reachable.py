"""All that the page says is reached by touch and by keyboard; axe-core finds nothing, in both themes, at all widths."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest
from playwright.async_api import Page, expect

from foresay.server.text.tokenizer import Tokenizer
from tests.dashboard.browsing import Visit, dashboard, needs_chromium
from tests.dashboard.showing import posted, shown, step, writing
from tests.models.serving import serving
from tests.server.scripted import ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]

#: Evaluated rather than added to the page, whose policy lets no such script in.
RUN = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
    .flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.target} ${node.failureSummary}`))"""

TEXT = "# Fox\n\nA **red** fox and `code`:\n\n- one\n- two\n\n```python\nfox()\n```\n\n|a|b|\n|-|-|\n|1|2|\n"

WIDTHS = {"light": (390, 1200), "dark": (1600,)}  # what themes differ in is no question of width


async def violations(page: Page) -> list[str]:
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    found: list[str] = await page.evaluate(RUN)
    overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return [*found, *([f"{overflow} pixels too wide"] if overflow > 0 else [])]


@pytest.mark.parametrize("theme", WIDTHS)
async def test_the_playground_is_clean_at_every_width(tokenizer: Tokenizer, theme: str) -> None:
    found: dict[str, list[str]] = {}
    async with writing(TEXT, tokenizer, color_scheme=theme, pace=None) as visit:  # a race as long as it is shown
        page = visit.page

        async def look(view: str) -> None:
            for width in WIDTHS[theme]:
                await visit.resize(width)
                found[f"{view} at {width}"] = await violations(page)

        await look("first visit")
        await visit.ask("compare", max_output_tokens=60)
        await expect(page.locator(".race .answer:not([data-state=waiting])").first).to_be_visible()
        found["race"] = await violations(page)
        await page.wait_for_selector("#playground form[data-busy=false]")
        await visit.ask("on", max_output_tokens=len(tokenizer.encode(TEXT)))
        await expect(page.locator(".answer .markdown pre")).to_have_count(1)
        await look("conversation")
        assert visit.complaints == []
    assert {view: wrong for view, wrong in found.items() if wrong} == {}


#: What is said only to those who can hover, and what scrolls within the page that scrolls.
HIDDEN = "() => [...document.querySelectorAll('main [title], header [title], svg title')].map((one) => one.outerHTML)"

SCROLLERS = """() => [...document.querySelectorAll("#tiles, #charts *, #requests, #requests > *, #requests table *")]
  .filter((one) => ["auto", "scroll"].includes(getComputedStyle(one).overflowY) && one.scrollHeight > one.clientHeight)
  .map((one) => one.outerHTML.slice(0, 200))"""


async def sound(visit: Visit, theme: str) -> None:
    """Nothing is wrong with the page, at any width."""
    assert await visit.page.evaluate(HIDDEN) == []
    for width in WIDTHS[theme]:
        await visit.resize(width)
        assert await visit.page.evaluate(SCROLLERS) == [], width
        assert await violations(visit.page) == [], width


@pytest.mark.parametrize("theme", WIDTHS)
async def test_the_dashboard_is_sound_before_and_after_the_first_request(tokenizer: Tokenizer, theme: str) -> None:
    async with shown(ScriptedEngine([5], run=3), tokenizer, color_scheme=theme) as (service, visit):
        page = visit.page
        await sound(visit, theme)
        for _ in range(200):
            service.telemetry.step(step())
        for seed in range(9):
            await posted(visit, prompt="a prompt that is much longer than a column " * 3, seed=seed)
        await expect(page.locator("#requests tr[data-id]")).to_have_count(8)
        for summary in await page.locator("#charts summary").all():
            await summary.click()
        await page.get_by_role("button", name="Show all 9").click()
        await page.locator("#tiles .ask").first.click()
        await sound(visit, theme)
        assert visit.complaints == []


@pytest.mark.parametrize("theme", WIDTHS)
async def test_the_page_of_several_models_is_sound(tokenizer: Tokenizer, theme: str) -> None:
    texts = {"fox": "said the fox", "a-model-of-a-very-long-name-and-then-some-more-of-it": "said the owl"}
    async with (
        serving(tokenizer, texts) as server,
        dashboard(str(server.client.make_url("")).rstrip("/"), color_scheme=theme) as visit,
    ):
        await sound(visit, theme)


async def test_explanations_open_by_keyboard_and_close_with_escape(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5], run=3), tokenizer) as (_, visit):
        page, open_ = visit.page, visit.page.locator(".why:popover-open")
        await posted(visit)
        asks = page.locator("button.ask:visible, button.chip, #pair button")
        await expect(page.locator("[data-tile='Drafts right']")).to_be_visible()
        assert await asks.count() >= 10
        for ask in await asks.all():
            await ask.press("Enter")
            await expect(open_).to_have_count(1)
            await expect(open_).to_have_text(re.compile(r"\w"))
            await page.keyboard.press("Escape")
            await expect(open_).to_have_count(0)
            assert await ask.evaluate("(ask) => ask === document.activeElement")


async def test_a_finger_reads_explanations_and_charts(tokenizer: Tokenizer) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    async with shown(ScriptedEngine([5], run=3), tokenizer, **phone) as (_, visit):
        page = visit.page
        await posted(visit)
        why = page.get_by_role("button", name="What is meant: Drafts right")
        await why.tap()
        box = await page.locator(".why:popover-open").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
        await why.tap()
        await expect(page.locator(".why:popover-open")).to_have_count(0)
        depth, reported = page.locator("#by-depth svg"), page.locator("#by-depth .when")
        await depth.tap(position={"x": 80, "y": 60})
        await expect(reported).to_have_text(re.compile("^token 1: right in"))
        await posted(visit)
        await expect(page.locator("[data-total=request_success] b")).to_have_text("2")  # and all of it is drawn again
        await expect(reported).to_have_text(re.compile("^token 1: right in"))
        await expect(page.locator("#by-depth .bar").first).to_have_class("bar chosen")
