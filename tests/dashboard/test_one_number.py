"""One number for one thing: what the page shows in several places is the same in each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from playwright.async_api import Page, expect

from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.trace import SequenceTrace, Statistics
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.showing import asked, shown, step
from tests.server.scripted import ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]

#: A figure of the page as the page itself writes it.
SAY = """async ([name, value]) => {
  const { FIGURES, say } = await import("/dashboard/static/figures.js");
  return say(FIGURES[name], value);
}"""


@dataclass
class Shown:
    """Where the page shows figures."""

    page: Page

    async def tile(self, name: str) -> str:
        return " ".join((await self.page.locator(f"[data-tile='{name}'] .value").inner_text()).split())

    async def legend(self, chart: str, name: str) -> str:
        entry = self.page.locator(f"#{chart} .legend li").filter(has_text=re.compile(f"^{name} "))
        return (await entry.locator("b").inner_text()).strip()

    async def cell(self, name: str) -> str:
        return await self.page.locator(f"#requests [data-head='{name}']").first.inner_text()


async def test_a_figure_is_the_same_wherever_it_stands(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    plainly = SequenceTrace.statistics

    def timed(*args: int) -> Statistics:
        statistics = plainly(*args)  # type: ignore[arg-type]
        statistics.decode_tokens_per_second = 61.25
        return statistics

    monkeypatch.setattr(SequenceTrace, "statistics", timed)
    async with shown(ScriptedEngine([5], run=3, pause=0.002), tokenizer) as (service, visit):
        for number in range(200):
            service.telemetry.step(step(number))
        metrics = (await asked(visit))["metrics"]
        page, seen = visit.page, Shown(visit.page)
        await expect(page.locator("#requests tr[data-id]")).to_have_count(1)
        await expect(page.locator("[data-tile='Tokens per pass']")).to_be_visible()
        await expect(page.locator("#tokens-per-step .legend b")).not_to_have_count(0)
        of_response = {
            "first": metrics["time_to_first_token_ms"] / 1000,
            "rate": metrics["tokens_per_second"],
            "perPass": metrics["tokens_per_step"],
            "right": metrics["speculative_decoding"]["draft_acceptance_rate"],
        }
        said = {name: await page.evaluate(SAY, [name, value]) for name, value in of_response.items()}
        assert said["rate"] == "61.3" == await seen.cell("tokens per second")
        first = await seen.tile("First token after")
        assert first == said["first"] == await seen.cell("first token after")
        assert first == await seen.legend("speed-over-time", "first token after")
        per_pass = await seen.tile("Tokens per pass")
        assert per_pass == said["perPass"] == await seen.cell("tokens per pass")
        assert per_pass == await seen.legend("tokens-per-step", "tokens per pass")
        assert await seen.tile("Drafts right") == said["right"] == await seen.cell("drafts right")
        assert await page.locator("#drafters tbody td").nth(1).inner_text() == said["right"]
        total = await seen.tile("Speed, all requests")
        assert total == await seen.legend("speed-over-time", "speed, all requests")
        speed_up = await page.locator("#speed b").inner_text()
        assert speed_up == "2.70×" == await seen.legend("speed-over-time", "times as fast")
        assert await page.title() == f"{speed_up} · Foresay: toy"
        await expect(page.locator("#verdict")).to_contain_text("Speculation pays: 2.70 times")
        why = await page.locator("#speed .why").text_content() or ""
        tokens, drafted, plain = (float(found) for found in re.findall(r"[\d.]+(?= (?:tokens|ms))", why))
        assert tokens * plain / drafted == pytest.approx(2.7, rel=0.01), "the speed-up follows from what explains it"


async def test_what_the_table_of_a_chart_says_is_what_the_chart_shows(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5], run=3), tokenizer) as (_, visit):
        page = visit.page
        await asked(visit)
        rows = {"tokens-per-step": "tokens per pass", "by-depth": "token of the draft", "tree": "token"}
        for chart, head in rows.items():
            await page.locator(f"#{chart} summary").click()
            await expect(page.locator(f"#{chart} thead th").filter(has_text=head).first).to_be_visible()
            await expect(page.locator(f"#{chart} tbody tr")).not_to_have_count(0)
        per_pass = await page.locator("#tokens-per-step tbody td").inner_text()
        assert per_pass == await Shown(page).tile("Tokens per pass")
        await page.locator("#by-depth svg").focus()
        await page.keyboard.press("Home")
        first = await page.locator("#by-depth tbody tr").first.locator("td").first.inner_text()
        await expect(page.locator("#by-depth .when")).to_have_text(re.compile(f"^token 1: right in {first} of"))
