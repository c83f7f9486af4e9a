"""Two answers that race: how they are measured, how they are shown, the verdict, and the picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from foresay.server.text.tokenizer import Tokenizer
from tests.dashboard.browsing import STORY, Visit, needs_chromium, visiting
from tests.dashboard.showing import sent, writing
from tests.server.scripted import ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]


async def finished(visit: Visit) -> None:
    await visit.page.wait_for_selector("#playground form[data-busy=false]")


async def test_a_race_shows_the_same_text_both_ways_and_fewer_passes(url: str, tmp_path: Path) -> None:
    async with visiting(url, color_scheme="dark") as visit:
        page = visit.page
        await visit.go()
        await visit.ready()
        await visit.ask("compare", max_output_tokens=48, temperature=1)
        await finished(visit)
        drafted, plain = page.locator(".lanes .answer").nth(0), page.locator(".lanes .answer").nth(1)
        assert [text for text, _ in await visit.tokens(drafted)] == [text for text, _ in await visit.tokens(plain)]
        assert {depth for _, depth in await visit.tokens(plain)} == {0}
        assert any(depth for _, depth in await visit.tokens(drafted))
        count = (await visit.counts(drafted))[0]
        assert await visit.counts(plain) == (count, 0, 0)
        passes = [int(await lane.locator(".counts b").nth(1).inner_text()) for lane in (drafted, plain)]
        assert passes[0] < passes[1] == count
        await expect(plain.locator(".counts")).to_have_text(f"{count} tokens, {count} passes")
        await expect(plain.locator(".strip .step")).to_have_count(count)
        await expect(page.locator(".race .outcome b")).to_have_text(
            f"{passes[0]} passes instead of {passes[1]}, the same text"
        )
        clocks = await page.locator(".lanes .clock").all_inner_texts()
        said = re.escape("{} with drafts, {} without.".format(*clocks))
        await expect(page.locator(".race .outcome span")).to_have_text(re.compile(f"^{said} "))
        await visit.keep_picture("race", tmp_path)
        assert visit.complaints == []


async def test_races_of_the_same_settings_are_judged_together_and_are_a_picture(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    async with writing("the fox and the owl ", tokenizer, permissions=permissions) as visit:
        page, items = visit.page, visit.page.locator(".turn:last-child .races li")
        for number, prompt in enumerate((STORY, "And of an owl?"), 1):
            await visit.ask("compare", prompt, max_output_tokens=24, temperature=1)
            await finished(visit)
            await expect(page.locator(".race")).to_have_count(number)
        await expect(items).to_have_count(2)
        clocks = await page.locator(".lanes .clock").all_inner_texts()
        assert await page.locator(".turn:last-child .races b").all_inner_texts() == clocks
        await page.click(".turn:last-child button:text-is('Race again')")
        await finished(visit)
        await expect(page.locator(".turn .user")).to_have_text([STORY, "And of an owl?"])
        await expect(items).to_have_count(3)
        clocks = await page.locator(".turn:last-child .lanes .clock").all_inner_texts()
        assert (await page.locator(".turn:last-child .races b").all_inner_texts())[-2:] == clocks
        await visit.ask("compare", "A third", max_output_tokens=20)
        await finished(visit)
        await expect(items).to_have_count(0)
        async with page.expect_download() as download:
            await page.click(".turn:last-child >> text=Save picture")
        saved = tmp_path / "race.png"
        await (await download.value).save_as(saved)
        assert saved.read_bytes().startswith(b"\x89PNG")
        assert len(saved.read_bytes()) > 20_000, "there is something on it"
        await visit.keep_labels()
        await page.click(".turn:last-child >> text=Copy picture")
        await expect(page.locator("text=Copied")).to_be_visible()
        types = "async () => (await navigator.clipboard.read()).flatMap((one) => one.types)"
        assert await page.evaluate(types) == ["image/png"]
        assert visit.complaints == []


async def test_both_ways_take_turns_and_neither_profits_from_the_other(tokenizer: Tokenizer) -> None:
    async with writing("the fox and the owl ", tokenizer) as visit:
        frames = sent(visit)
        await visit.ask("compare", max_output_tokens=20, seed=40)
        await finished(visit)
        await visit.page.click("text=Race again")
        await finished(visit)
        rounds = [frames[at : at + 4] for at in range(0, len(frames), 4)]
        assert len(rounds) == 3, "a pair that does not count, and two races"
        for prepared, drafted, again, plain in rounds:
            assert prepared["generate"] is False, "the prompt is ready for both"
            assert again == prepared
            assert "speculation" not in drafted
            assert plain == drafted | {"speculation": {"off": True}}
            assert drafted["cache_salt"] == prepared["cache_salt"]
        assert len({one["cache_salt"] for one in frames}) == 3, "no race finds answers of another"
        assert [drafted["seed"] for _, drafted, _, _ in rounds] == [40, 40, 40]
        assert [drafted["max_output_tokens"] for _, drafted, _, _ in rounds] == [8, 20, 20]
        assert {one["input"][0]["content"] for one in frames} == {STORY}


class Forgetful(ScriptedEngine):
    """Writes something else each time, as no exact server does."""

    def script_of(self, request):
        return [*self.tokens[len(self.requests) :], *self.tokens]


async def test_texts_that_differ_are_reported(tokenizer: Tokenizer) -> None:
    engine = Forgetful(tokenizer.encode("abcdefghijklmnopqrstuvwxyz"), run=3)
    async with writing("", tokenizer, engine=engine) as visit:
        await visit.ask("compare", max_output_tokens=6, seed=7)
        await finished(visit)
        await expect(visit.page.locator(".race .outcome")).to_have_text(
            "The texts differFrom character 1 on (seed 7). This should not happen: please report it."
        )


STEADY, UNSTEADY = [0.01] * 8, [0.004, 0.004, 0.03, 0.02, 0.004, 0.004, 0.006, 0.008]


def race(drafted: float, plain: float, passes: list[float] = STEADY) -> dict[str, Any]:
    return {"seconds": [drafted, plain], "passes": [passes, passes]}


VERDICTS = [
    (
        [race(0.3, 0.6)],
        "300 ms with drafts, 600 ms without. That is 2.00 times as fast (between 2.00 and 2.00).",
        "good",
    ),
    ([race(0.6, 0.3)], "600 ms with drafts, 300 ms without. That is slower: 0.50 times as fast", "warn"),
    ([race(0.3, 0.305)], "300 ms with drafts, 305 ms without. That is as fast either way.", "good"),
    (
        [race(0.3, 0.4, UNSTEADY)],
        "300 ms with drafts, 400 ms without. Which is faster cannot be told yet: between 0",
        "",
    ),
    ([race(0.3, 6, UNSTEADY)], "300 ms with drafts, 6.00 s without. That is 20.0 times as fast (between 2", "good"),
    (
        [race(0.3, 0.9, UNSTEADY)] * 9,
        "300 ms with drafts, 900 ms without. Over 9 races it is on average 3.00 times as fast",
        "good",
    ),
    (
        [race(0.1, 0.4), race(0.4, 0.2)],
        "400 ms with drafts, 200 ms without. Over 2 races it is on average 1.41",
        "good",
    ),
    (
        [race(0.3, 0.6, [0.1])] * 2,
        "300 ms with drafts, 600 ms without. Which is faster cannot be told yet: the answers are",
        "",
    ),
    ([race(0.3, 0.6, [0.1])] * 3, "300 ms with drafts, 600 ms without. Over 3 races it is on average 2.00", "good"),
    ([race(0.3, 0.2, [1]), race(0.3, 0.9, [1]), race(0.3, 0.4, [1])], "300 ms with drafts, 400 ms without. Which", ""),
]
DOUBTS = [
    ([race(0.3, 0.6)], 1.6, ""),
    ([race(0.3, 0.6)], 0.8, "the races on this page say between 2.00 and 2.00 times as fast"),
    ([race(0.3, 0.4, UNSTEADY)], 1.6, "the races on this page say between "),
    ([race(0.3, 0.3)], 1.0, ""),
    ([race(0.3, 0.4, [0.1])], 1.6, ""),
    ([race(0.3, 0.3)], 1.5, "the races on this page say between 1.00 and 1.00 times as fast"),
]


async def test_verdicts_and_doubts_go_no_further_than_the_passes_bear_out(tokenizer: Tokenizer) -> None:
    async with writing("", tokenizer) as visit:
        script = "async ([name, ...given]) => (await import('/dashboard/static/compare.js'))[name](...given)"
        for races, begins, kind in VERDICTS:
            sentence, found = await visit.page.evaluate(script, ["verdict", races])
            assert (sentence[: len(begins)], found) == (begins, kind), sentence
        for races, estimate, begins in DOUBTS:
            doubt = await visit.page.evaluate(script, ["doubted", races, estimate])
            assert doubt.startswith(begins) and bool(doubt) == bool(begins), (doubt, begins)
