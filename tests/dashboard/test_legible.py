"""What the page shows can be read for what it is: code as code, one scale and one denominator for what is compared,
nothing in front of data, and names that a reader knows."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from playwright.async_api import expect

from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.request import Origin, Request
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.showing import posted, shown, step, writing
from tests.dashboard.test_playground import Chosen
from tests.dashboard.test_race import finished
from tests.server.scripted import INFO, ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]

CHARTS = ("speed-over-time", "tokens-per-step", "time-per-step", "choices")
CODE = "```python\ndef fox():\n    return owl\n```"
TEXT = f"A fox:\n{CODE}\nAn owl."
#: The text of each font, joined.
FONTS = """all => all.reduce((found, one) => {
  const font = getComputedStyle(one).fontFamily.split(",")[0];
  return { ...found, [font]: (found[font] ?? "") + one.textContent };
}, {})"""
#: Notes what is written on a canvas: the text, the font, and how far right.
PENS = """() => {
globalThis.written = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  written.push([text, this.font, x]);
  write.call(this, text, x, y);
}; }"""


async def test_code_is_set_as_code_and_all_else_as_the_page_is(tokenizer: Tokenizer) -> None:
    async with writing(TEXT, tokenizer) as visit:
        page = visit.page
        await visit.ask(max_output_tokens=len(tokenizer.encode(TEXT)))
        await page.click("text=Show tokens")
        text = page.locator(".answer .coloured")
        await expect(text).to_have_text(TEXT)
        fonts = await text.locator("span").evaluate_all(FONTS)
        sans, code = fonts
        assert (code, sans) == (
            "ui-monospace",
            await page.evaluate("getComputedStyle(document.body).fontFamily.split(',')[0]"),
        )
        assert fonts[code].strip("\n`") == CODE.strip("\n`"), "but for marks that this tokenizer cuts"
        assert await text.evaluate("one => getComputedStyle(one).whiteSpace") == "pre-wrap", "with its indentation"


async def test_code_on_the_picture_is_indented_too(tokenizer: Tokenizer) -> None:
    async with writing(TEXT, tokenizer) as visit:
        page = visit.page
        await visit.ask("compare", max_output_tokens=len(tokenizer.encode(TEXT)))
        await finished(visit)
        await page.evaluate(PENS)
        async with page.expect_download():
            await page.click("text=Save picture")
        written = [part for part in await page.evaluate("written") if part[0].strip()]
        began = [part[0] for part in written].index("A")
        (_, sans, left), *parts = written[began:]
        assert "monospace" not in sans
        lanes = [part for part in parts if "monospace" in part[1]]
        assert "".join(text for text, *_ in lanes).count("deffox():") == 2
        assert {x - left > 20 for text, _, x in lanes if text.startswith("re") and x < 500} == {True}


async def test_both_lanes_have_one_scale_and_say_so(tokenizer: Tokenizer) -> None:
    async with writing("the fox and the owl ", tokenizer) as visit:
        page = visit.page
        await visit.ask("compare", max_output_tokens=40)
        await finished(visit)
        blocks = "all => all.map(one => [one.getAttribute('width'), one.getAttribute('height')])"
        own = [
            await lane.locator(".step [data-colour=none]").evaluate_all(blocks)
            for lane in await page.locator(".lanes .answer").all()
        ]
        assert {tuple(block) for block in own[0]} == {tuple(block) for block in own[1]}
        captions = page.locator(".lanes .strip .readout")
        for caption in await captions.all():
            await expect(caption).to_be_visible()
        await expect(captions).to_have_text(
            [re.compile(r"^\d+ passes: the tokens of each, .*; both on one scale$")] * 2
        )


async def test_no_label_stands_before_data(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5], run=3), tokenizer) as (service, visit):
        for _ in range(200):
            service.telemetry.step(step())
        await posted(visit)
        for chart in CHARTS:
            await visit.paints(chart)
        covered = """all => all.flatMap((svg) => {
          const box = (one) => one.getBoundingClientRect(),
            axis = [...svg.querySelectorAll("line[data-colour=grid]")].map(box),
            [left, right] = [Math.min(...axis.map((one) => one.left)), Math.max(...axis.map((one) => one.right))],
            within = (one) => one.right > left + 1 && one.left < right,
            data = [...svg.querySelectorAll("line.level, .line, .fill")].map(box),
            meets = (one, other) => one.top < other.bottom && one.bottom > other.top;
          return [...svg.querySelectorAll("text")]
            .filter((text) => within(box(text)) && data.some((other) => meets(box(text), other)))
            .map((text) => text.textContent);
        })"""
        assert await visit.page.locator(", ".join(f"#{chart} svg" for chart in CHARTS)).evaluate_all(covered) == []


class Uneven(ScriptedEngine):
    """Drafts one token, of which one is right, then three, of which three are right, then three again, of which one."""

    def run_length(self, request: Request, emitted: int) -> int:
        return (2, 4, 2)[self.steps % 3] if emitted else 1

    def origin(self, emitted: int, run: list[int]) -> Origin:
        self.run = (2, 4, 4)[self.steps % 3]
        return super().origin(emitted, run)


async def test_depths_and_tree_tell_the_same_shares(tokenizer: Tokenizer) -> None:
    async with shown(Uneven([5]), tokenizer) as (_, visit):
        page = visit.page
        await posted(visit, max_tokens=81)
        nodes = page.locator("#tree .node:not(.root) text")
        await expect(nodes).to_have_count(3)
        await page.locator("#by-depth summary").click()
        right = page.locator("#by-depth tbody tr td:nth-child(2)")
        await expect(right).to_have_text([re.compile(r"^\d+ %$")] * 3)
        depths = [text.removesuffix(" %") for text in await right.all_inner_texts()]
        assert await nodes.all_text_contents() == depths
        assert int(depths[2]) < 45, "of all drafts, also of those that were shorter"


@pytest.mark.parametrize("width", [390, 1440])
async def test_the_shares_of_the_tree_can_be_read(tokenizer: Tokenizer, width: int) -> None:
    viewport = {"width": width, "height": 844}
    async with shown(ScriptedEngine([5], run=14), tokenizer, viewport=viewport) as (_, visit):
        await posted(visit)
        names = visit.page.locator("#tree .node text")
        await expect(names).to_have_text(["text", *[re.compile(r"^\d+$")] * 9])
        boxes: list[dict[str, float]] = await names.evaluate_all(
            "all => all.map(one => one.getBoundingClientRect().toJSON())"
        )
        assert all(one["right"] < other["left"] for one, other in pairwise(boxes)), boxes
        assert min(box["height"] for box in boxes) > 10


async def test_each_tile_says_what_it_is_of(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5], run=3, pause=0.002), tokenizer) as (_, visit):
        await posted(visit)
        rests = visit.page.locator("#tiles li:visible .rest")
        await expect(rests).to_have_count(7)
        for text in await rests.all_inner_texts():
            assert re.search(r"; mean, last minute\b|\bnow\b", text), text


async def test_the_model_s_own_has_a_colour_and_no_empty_box(tokenizer: Tokenizer) -> None:
    async with writing("the fox ", tokenizer) as visit:
        page = visit.page
        await visit.ask(max_output_tokens=20)
        await page.click("text=Show tokens")
        own = page.locator(".answer .legend li").first
        await expect(own).to_have_text("the model's own, plain in the text")
        paint = "one => getComputedStyle(one).backgroundColor"
        block = page.locator(".answer .step [data-colour=none]").first
        assert await own.locator("i").evaluate(paint) == await block.evaluate("one => getComputedStyle(one).fill")


async def test_nothing_stands_before_a_race_that_is_over(tokenizer: Tokenizer) -> None:
    position = "one => getComputedStyle(one).position"
    async with writing("the fox and the owl ", tokenizer) as visit:
        form = visit.page.locator("form.composer")
        await visit.page.evaluate("document.querySelector('.settings').open = false")
        await visit.page.click("#playground button[type=submit]")
        await finished(visit)
        assert await form.evaluate(position) == "static"
        await visit.page.check("#playground input[value=on]", force=True)
        await visit.page.fill("#prompt", "And then?")
        await visit.page.click("#playground button[type=submit]")
        await finished(visit)
        assert await form.evaluate(position) == "sticky", "a conversation goes on"


async def test_what_is_open_stays_in_view(tokenizer: Tokenizer) -> None:
    text = "the fox and the owl "
    async with shown(ScriptedEngine(tokenizer.encode(text), run=3), tokenizer) as (_, visit):
        page = visit.page
        for number in range(4):
            await posted(visit, prompt=f"fox {number}", max_tokens=150)
        rows, detail = page.locator("#requests tr[data-id]"), page.locator("#request-detail")
        await expect(rows.locator(".words")).to_have_text([f"fox {number}" for number in (3, 2, 1, 0)])
        await rows.nth(1).locator("button").click()
        await expect(detail.locator(".coloured")).to_contain_text(text)
        opened = page.locator("#requests tr.open")
        await expect(opened.locator("+ tr #request-detail")).to_be_visible()
        await expect(opened).to_be_in_viewport()
        await asyncio.gather(*(posted(visit, prompt=f"owl {number}") for number in range(9)))
        await expect(page.locator("#requests .more")).to_have_text("Show all 13")
        await expect(opened.locator(".words")).to_have_text("fox 2")
        await expect(opened.locator("+ tr .coloured")).to_contain_text(text)


async def test_drafters_have_the_names_of_their_models(tokenizer: Tokenizer) -> None:
    engine: Any = Chosen(tokenizer.encode("the fox and the owl "), run=3)
    files = "draft_model:/a/place/Qwen2.5-0.5B-q4_k_m.gguf, ngram"
    engine.info = msgspec.structs.replace(INFO, drafter="draft_model, ngram", draft=files)
    name = "Qwen2.5-0.5B-q4_k_m"
    async with writing("", tokenizer, engine=engine) as visit:
        page = visit.page
        await expect(page.locator("#pair .drafter")).to_have_text(f"{name}, ngram")
        await expect(page.locator("[name=method] option")).to_have_text(["auto", name, "ngram"])
        await visit.set()
        await page.select_option("[name=method]", "draft_model")
        await visit.run(max_output_tokens=40, seed=3)
        await expect(page.locator("#requests small").first).to_have_text(re.compile(f"^drafts by {name}, "))
        await expect(page.locator("#drafters tbody th")).to_have_text(name)
        await expect(page.locator("#choices .legend li").first).to_have_text(re.compile(f"^{name} "))
        await page.locator("#requests tr[data-id] button").first.click()
        await expect(page.locator("#request-detail .legend li").last).to_have_text(re.compile(f"{name}, by depth$"))
