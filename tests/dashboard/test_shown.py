"""What the page says of a server whose answers are written down, once, and only what is there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from foresay.server.metrics import selfcheck
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.trace import Statistics
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.showing import posted, shown, step
from tests.selfcheck.checking import Diverging
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
        await posted(visit)
        await expect(nothing).to_be_hidden()
        for place in ("#tiles", "#charts", "#requests", "#verdict", "#footer ul"):
            await expect(page.locator(place)).to_be_visible()


async def test_what_nobody_knows_is_left_out(tokenizer: Tokenizer) -> None:
    """Nothing is drafted, and nothing estimated: no tile and no chart tells of it."""
    async with shown(ScriptedEngine([5], run=1), tokenizer) as (_, visit):
        page = visit.page
        await posted(visit)
        await expect(page.locator("[data-tile='Tokens per pass']")).to_contain_text("1.00")
        await expect(page.locator("[data-tile='Drafts right']")).to_be_hidden()
        await expect(page.locator("#speed")).to_be_hidden()
        for chart in OF_DRAFTS:
            await expect(page.locator(f"#{chart}")).to_be_hidden()
        await expect(page.locator(".left-out")).to_have_text(
            "Nothing was drafted yet, so there are no charts of drafts."
        )
        assert "–" not in await page.locator("#tiles").inner_text()
        await expect(page.locator("#facts li")).not_to_have_count(0)
        assert await page.locator("[data-fact=check] button").count() == 0, "no answer is decoded again"


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
    monkeypatch.setattr(Statistics, "decode_tokens_per_second", 61.2499)
    async with shown(ScriptedEngine([5], run=3, pause=0.002), tokenizer) as (service, visit):
        metrics = (await posted(visit))["metrics"]
        for _ in range(200):  # behind it: figures are of the minute up to the second of the last step
            service.telemetry.step(step())
        page, seen = visit.page, Shown(visit.page)
        await expect(page.locator("#requests [data-head=end]")).to_have_text("token limit")
        of_response = {
            "first": metrics["time_to_first_token_ms"] / 1000,
            "rate": metrics["tokens_per_second"],
            "perPass": metrics["tokens_per_step"],
            "right": metrics["speculative_decoding"]["draft_acceptance_rate"],
        }
        spoken = {name: await page.evaluate(SAY, [name, value]) for name, value in of_response.items()}
        await expect(page.locator("[data-tile='Tokens per pass'] .value")).to_have_text(spoken["perPass"])
        assert spoken["rate"] == "61.3" == await seen.cell("tokens per second")
        first = await seen.tile("First token after")
        assert first == spoken["first"] == await seen.cell("first token after")
        assert first == await seen.legend("speed-over-time", "first token after")
        per_pass = await seen.tile("Tokens per pass")
        assert per_pass == spoken["perPass"] == await seen.cell("tokens per pass")
        assert per_pass == await seen.legend("tokens-per-step", "tokens per pass")
        assert await seen.tile("Drafts right") == spoken["right"] == await seen.cell("drafts right")
        assert await page.locator("#drafters tbody td").nth(1).inner_text() == spoken["right"]
        total = await seen.tile("Speed, all requests")
        assert total == await seen.legend("speed-over-time", "speed, all requests")
        speed_up = await page.locator("#speed b").inner_text()
        assert speed_up == "2.70×" == await seen.legend("speed-over-time", "times as fast")
        assert await page.title() == f"{speed_up} · Foresay: toy"
        await expect(page.locator("#speed")).to_have_text(
            re.compile(r"as fast as without drafts\s*estimated speed-up\?")
        )
        await expect(page.locator("#load .legend")).to_contain_text("kept 100.0 %")
        await expect(page.locator("#verdict")).to_contain_text("Speculation pays: 2.70 times")
        why = await page.locator("#speed .why").text_content() or ""
        tokens, drafted, plain = (float(found) for found in re.findall(r"[\d.]+(?= (?:tokens|ms))", why))
        assert tokens * plain / drafted == pytest.approx(2.7, rel=0.01), "the speed-up follows from what explains it"


# -- answers that were decoded again plainly ---------------------------------------------------------------------------


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
