"""Two answers that race: how they are measured, how they are shown, the verdict, and the picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from foresay.server.engine.generation import Sink
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.request import Request
from tests.dashboard.browsing import STOP, STORY, Visit, needs_chromium, visiting
from tests.dashboard.showing import sent, writing
from tests.server.scripted import ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]
TIME = re.compile(r"^[\d.]+ m?s$")


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
        clocks = [await lane.locator(".clock").inner_text() for lane in (drafted, plain)]
        await expect(page.locator(".races li b")).to_have_count(6)
        assert await page.locator(".races li b").all_inner_texts() == [*clocks, *[TIME_OF_ANY] * 4]
        await expect(page.locator(".outcome span")).to_have_text(re.compile("^Same text in all 3 races: "))
        await visit.keep_picture("race", tmp_path)
        assert visit.complaints == []


class _Any:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and bool(TIME.match(other))


TIME_OF_ANY = _Any()


async def test_both_ways_take_turns_and_neither_profits_from_the_other(tokenizer: Tokenizer) -> None:
    async with writing("the fox and the owl ", tokenizer) as visit:
        frames = sent(visit)
        await visit.ask("compare", max_output_tokens=20, seed=40)
        await expect(visit.page.locator(".races li")).to_have_count(3)
        await finished(visit)
        rounds = [frames[at : at + 4] for at in range(0, len(frames), 4)]
        assert len(rounds) == 4, "a pair that does not count, and three races"
        for prepared, drafted, again, plain in rounds:
            assert prepared["generate"] is False, "the prompt is ready for both"
            assert again == prepared
            assert "speculation" not in drafted
            assert plain == drafted | {"speculation": {"off": True}}
            assert drafted["cache_salt"] == prepared["cache_salt"]
        assert len({one["cache_salt"] for one in frames}) == 4, "no race finds answers of another"
        assert [drafted["seed"] for _, drafted, _, _ in rounds[1:]] == [40, 41, 42]
        assert [drafted["max_output_tokens"] for _, drafted, _, _ in rounds] == [8, 20, 20, 20]
        assert {one["input"][0]["content"] for one in frames} == {STORY}


async def test_the_lanes_are_side_by_side_on_a_phone_too(tokenizer: Tokenizer) -> None:
    async with writing("the fox and the owl ", tokenizer, viewport={"width": 390, "height": 900}) as visit:
        await visit.ask("compare", max_output_tokens=24, seed=5)
        lanes = visit.page.locator(".lanes .answer")
        await expect(lanes).to_have_count(2)
        left, right = await lanes.evaluate_all("all => all.map(lane => lane.getBoundingClientRect().toJSON())")
        assert left["top"] == right["top"]
        assert left["right"] <= right["left"]
        await finished(visit)
        for place in (0, 1):
            await expect(lanes.nth(place).locator(".clock")).to_have_text(TIME)
        assert await visit.page.evaluate("document.documentElement.scrollWidth") == 390


class Halting(ScriptedEngine):
    """Answers as many requests; the next one waits until it is cancelled."""

    def __init__(self, tokens: list[int], most: int) -> None:
        super().__init__(tokens, run=3)
        self.most = most

    def add(self, request: Request, sink: Sink) -> None:
        self.pause = 3600.0 if len(self.requests) >= self.most else 0.0
        super().add(request, sink)


async def test_one_race_is_called_one_race_and_can_be_left_at_that(tokenizer: Tokenizer) -> None:
    engine = Halting(tokenizer.encode("the fox and the owl "), most=8)  # four make a race; the first does not count
    async with writing("", tokenizer, engine=engine) as visit:
        page = visit.page
        await visit.ask("compare", max_output_tokens=40)
        await expect(page.locator(".outcome b")).to_have_text("One race, same text")
        await page.click(STOP)
        await finished(visit)
        await expect(page.locator(".outcome b")).to_have_text("One race, same text")
        await expect(page.locator(".races li")).to_have_count(1)
        await expect(page.locator(".lanes .coloured").first).to_contain_text("the fox and the owl")
        await expect(page.locator(".turn")).to_have_count(1)


async def test_a_race_that_is_stopped_before_it_was_shown_leaves_the_prompt(tokenizer: Tokenizer) -> None:
    engine = Halting(tokenizer.encode("the fox and the owl "), most=5)
    async with writing("", tokenizer, engine=engine) as visit:
        await visit.ask("compare", max_output_tokens=400)
        await expect(visit.page.locator(".race .outcome b")).to_have_text("Measuring: with drafts")
        await visit.page.click(STOP)
        await finished(visit)
        await expect(visit.page.locator(".turn")).to_have_count(0)
        await expect(visit.page.locator("#playground > .outcome")).to_have_text("Stopped.")
        await expect(visit.page.locator("#prompt")).to_have_value(STORY)


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


async def test_the_result_is_a_picture_to_save_or_to_copy(tokenizer: Tokenizer, tmp_path: Path) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    async with writing("the fox and the owl ", tokenizer, permissions=permissions) as visit:
        page = visit.page
        await visit.ask("compare", max_output_tokens=24)
        await finished(visit)
        async with page.expect_download() as download:
            await page.click("text=Save picture")
        saved = tmp_path / "race.png"
        await (await download.value).save_as(saved)
        assert saved.read_bytes().startswith(b"\x89PNG")
        assert len(saved.read_bytes()) > 20_000, "there is something on it"
        await visit.keep_labels()
        await page.click("text=Copy picture")
        await expect(page.locator("text=Copied")).to_be_visible()
        types = "async () => (await navigator.clipboard.read()).flatMap((one) => one.types)"
        assert await page.evaluate(types) == ["image/png"]
        assert visit.complaints == []


ALL = "Same text in all 3 races: "
SLOW = [[9, 1], [0.6, 0.3], [0.6, 0.3], [0.6, 0.3]]
VERDICTS = [
    (
        [[9, 1], [0.3, 0.6]],
        0,
        [
            "One race, same text",
            "300 ms with drafts, 600 ms without. That says little yet: a verdict takes 3 races.",
            "",
        ],
    ),
    ([[9, 1], [0.6, 0.3], [0.6, 0.3]], 0, ["2 races, same text", "1.20 s with drafts, 600 ms without. That says "]),
    (SLOW, 0, ["Speculation does not pay here", f"{ALL}1.80 s with drafts, 900 ms without.", "warn"]),
    (SLOW, 0.4, ["Cannot tell: this machine is busy", f"{ALL}1.80 s with drafts, 900 ms without. The engine spent 40"]),
    (SLOW, 0.3, ["Speculation does not pay here", f"{ALL}1.80 s with drafts, 900 ms without. The engine spent 30 %"]),
    (
        [[9, 1], [0.3, 0.6], [0.3, 0.6], [0.4, 0.3]],
        0.1,
        ["33 % of the time saved", f"{ALL}1.00 s with drafts, 1.50 s without.", "good"],
    ),
    ([[9, 1], [0.3, 0.31], [0.31, 0.3], [0.3, 0.3]], 0, ["As fast as each other", ALL]),
    ([[9, 1], [0.1, 0.4], [0.4, 0.1], [0.4, 0.1]], 0, ["Cannot tell: this machine is busy", ALL]),
]


async def test_a_verdict_on_speculation_takes_several_races_and_a_quiet_machine(tokenizer: Tokenizer) -> None:
    async with writing("", tokenizer) as visit:
        script = "async ([times, crowded]) => (await import('/dashboard/static/compare.js')).verdict(times, crowded)"
        for times, crowded, expected in VERDICTS:
            output = await visit.page.evaluate(script, [times, crowded])
            assert all(one.startswith(start) for one, start in zip(output, expected, strict=False)), output
