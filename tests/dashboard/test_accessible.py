"""axe-core finds nothing wrong with the playground, on phones and wide screens, in both themes."""

from __future__ import annotations

from importlib.resources import files

import pytest
from playwright.async_api import Page, expect

from foresay.server.text.tokenizer import Tokenizer
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.writing import writing

pytestmark = [needs_chromium, pytest.mark.slow]

#: Evaluated rather than added to the page, whose policy lets no such script in.
RUN = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
    .flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.target} ${node.failureSummary}`))"""
TEXT = "# Fox\n\nA **red** fox and `code`:\n\n- one\n- two\n\n```python\nfox()\n```\n\n|a|b|\n|-|-|\n|1|2|\n"
WIDTHS = {"light": (390, 768, 1200, 1600), "dark": (390, 1600)}  # what themes differ in is no question of width


async def violations(page: Page) -> list[str]:
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    found: list[str] = await page.evaluate(RUN)
    overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return [*found, *([f"{overflow} pixels too wide"] if overflow > 0 else [])]


@pytest.mark.parametrize("theme", WIDTHS)
async def test_the_playground_is_clean_at_every_width(tokenizer: Tokenizer, theme: str) -> None:
    found: dict[str, list[str]] = {}
    async with writing(TEXT, tokenizer, color_scheme=theme, reduced_motion="reduce") as visit:
        page = visit.page

        async def look(view: str) -> None:
            for width in WIDTHS[theme]:
                await page.set_viewport_size({"width": width, "height": 900})
                found[f"{view} at {width}"] = await violations(page)

        await look("first visit")
        await visit.ask("compare", max_output_tokens=60)
        await expect(page.locator(".race .answer[data-state=running]").first).to_be_visible()
        found["race"] = await violations(page)
        await page.wait_for_selector("#playground form[data-busy=false]")
        await visit.ask("on", max_output_tokens=len(tokenizer.encode(TEXT)))
        await expect(page.locator(".answer .markdown pre")).to_have_count(1)
        await look("conversation")
        assert visit.complaints == []
    assert {view: wrong for view, wrong in found.items() if wrong} == {}
