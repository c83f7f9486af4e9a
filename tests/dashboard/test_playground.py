"""The playground: conversations, who drafts, how tokens are sampled, what keys do, and *Prove it*."""

from __future__ import annotations

import hashlib
import re

import msgspec
import pytest
from playwright.async_api import expect

from foresay.server.engine.generation import Sink
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from foresay.spec.request import Origin, Request
from tests.dashboard.browsing import SEND, STOP, STORY, needs_chromium
from tests.dashboard.showing import sent, writing
from tests.server.scripted import ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]


async def test_the_first_visit_is_the_playground_and_the_dashboard_one_click_away(tokenizer: Tokenizer) -> None:
    async with writing("fox ", tokenizer) as visit:
        page = visit.page
        playground, dashboard = page.locator("#playground"), page.locator("#dashboard-view")
        await expect(playground).to_be_visible()
        await expect(dashboard).to_be_hidden()
        await expect(page.locator(".hero p")).to_have_count(2)
        await expect(page.locator(SEND)).to_have_text("Start the race")
        await visit.show("dashboard")
        await expect(dashboard).to_be_visible()
        await expect(playground).to_be_hidden()
        await expect(page.locator(".views [aria-current=page]")).to_have_text("Dashboard")
        await page.reload()
        await expect(dashboard).to_be_visible()
        await page.go_back()
        await expect(playground).to_be_visible()
        for path, shown in (("/dashboard", dashboard), ("/dashboard#playground", playground), ("/#prompt", playground)):
            await page.goto("about:blank")
            await visit.go(path)
            await expect(shown).to_be_visible()
        assert visit.complaints == []


async def test_a_conversation_goes_on_until_a_new_one_is_begun(tokenizer: Tokenizer) -> None:
    async with writing("the fox and the owl ", tokenizer) as visit:
        page, frames = visit.page, sent(visit)
        anew = page.locator("button.anew")
        await expect(anew).to_be_hidden()
        await visit.set(system="You are an owl.")
        await visit.run(max_output_tokens=12, seed=1)
        first = "".join(text for text, _ in await visit.tokens(page.locator(".answer")))
        await visit.run(prompt="And then?", max_output_tokens=8)
        users = page.locator(".turn .user")
        await expect(users).to_have_text([STORY, "And then?"])
        assert frames[1]["input"] == [
            {"role": "user", "content": STORY},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And then?"},
        ]
        assert frames[1]["instructions"] == "You are an owl."
        await visit.show("playground")
        await expect(anew).to_be_visible()
        await anew.press("Enter")
        await expect(users).to_have_count(0)
        await expect(page.locator("#prompt")).to_be_focused()
        await visit.set(system="")
        await visit.run(max_output_tokens=4)
        assert len(frames[2]["input"]) == 1
        assert "instructions" not in frames[2]


async def test_what_failed_is_no_part_of_the_conversation(tokenizer: Tokenizer) -> None:
    async with writing("fox ", tokenizer) as visit:
        frames = sent(visit)
        await visit.run(max_output_tokens=4, top_p=0)
        await expect(visit.page.locator("#playground > .outcome")).to_have_text(
            re.compile("^It failed: top_p: expected")
        )
        await expect(visit.page.locator(".turn")).to_have_count(0)
        await expect(visit.page.locator("#prompt")).to_have_value(STORY)
        await visit.run(max_output_tokens=4, top_p=1)
        assert len(frames[1]["input"]) == 1


class Chosen(ScriptedEngine):
    """All its drafts are those of the drafter that the last request names."""

    def origin(self, emitted: int, run: list[int]) -> Origin:
        return msgspec.structs.replace(super().origin(emitted, run), drafter=self.requests[-1].draft_method or "ngram")


async def test_the_drafter_that_is_chosen_drafts(tokenizer: Tokenizer) -> None:
    async with writing("", tokenizer, engine=Chosen(tokenizer.encode("the fox and the owl "), run=3)) as visit:
        page, frames = visit.page, sent(visit)
        await expect(page.locator("[name=method] option")).to_have_text(["auto", "draft_model", "ngram"])
        await visit.set()
        await page.select_option("[name=method]", "draft_model")
        colours = page.locator(".answer .coloured .t:not(.own)")
        await visit.run(max_output_tokens=40, temperature=1, seed=3)
        assert frames[-1]["speculation"] == {"method": "draft_model"}
        await expect(page.locator("#requests small").first).to_have_text("drafts by draft_model, temperature 1, seed 3")
        assert set(await colours.evaluate_all("all => all.map(one => one.dataset.colour)")) == {"draft_model"}
        await visit.show("playground")
        await page.select_option("[name=method]", "auto")
        await visit.run(max_output_tokens=4)
        assert "speculation" not in frames[-1]


@pytest.mark.parametrize(
    ("defaults", "used", "said"),
    [
        (SamplingDefaults(), (0.7, 0.95), "temperature 0.7, top-p 0.95 (the usual values: the model recommends none)"),
        (
            SamplingDefaults(temperature=0.2, top_k=20),
            (0.2, 0.95),
            "temperature 0.2, top-k 20, top-p 0.95 (temperature and top-k as the model recommends)",
        ),
    ],
)
async def test_people_sample_as_the_model_recommends_and_the_page_says_so(
    tokenizer: Tokenizer, defaults: SamplingDefaults, used: tuple[float, float], said: str
) -> None:
    async with writing("fox ", tokenizer, defaults) as visit:
        line, frames = visit.page.locator(".sampling"), sent(visit)
        await expect(line).to_have_text(re.compile(r"^temperature 0, .*\(temperature 0 for this idea\)$"))
        await visit.page.fill("#prompt", "And an owl?")
        await expect(line).to_have_text(said)
        await visit.run(max_output_tokens=4)
        assert (frames[-1]["temperature"], frames[-1]["top_p"]) == used
        await visit.run(temperature=1.5, max_output_tokens=4)
        assert (frames[-1]["temperature"], frames[-1]["top_p"]) == (1.5, 0.95)
        await expect(line).to_have_text(re.compile(r"^temperature 1\.5, .*\(temperature as set here\)$"))


async def test_enter_sends_and_shift_enter_breaks_the_line(tokenizer: Tokenizer) -> None:
    async with writing("fox ", tokenizer) as visit:
        page, prompt = visit.page, visit.page.locator("#prompt")
        await page.check("#playground input[value=on]", force=True)
        await visit.set(max_output_tokens=4)
        await prompt.fill("one")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("two")
        await expect(page.locator(".turn")).to_have_count(0)
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn .user")).to_have_text("one\ntwo")
        await expect(page.locator("#playground form")).to_have_attribute("data-busy", "false")
        await expect(prompt).to_have_value("")
        await expect(prompt).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn")).to_have_count(1)


async def test_an_answer_is_shown_as_the_model_means_it_or_by_token(tokenizer: Tokenizer) -> None:
    text = "# Fox\n\nA **red** fox:\n\n```python\nfox()\n```\n\n<b>owl</b>"
    async with writing(text, tokenizer, permissions=["clipboard-read", "clipboard-write"]) as visit:
        page, answer = visit.page, visit.page.locator(".answer")
        await visit.ask(max_output_tokens=len(tokenizer.encode(text)))
        await expect(answer.locator(".markdown h4")).to_have_text("Fox")
        await expect(answer.locator(".markdown strong")).to_have_text("red")
        await expect(answer.locator(".markdown pre")).to_have_text("fox()")
        await expect(answer.locator(".markdown")).to_contain_text("<b>owl</b>")
        await expect(answer.locator(".coloured")).to_be_hidden()
        await visit.keep_labels()
        await answer.locator(".code button").click()
        await expect(answer.locator(".code button")).to_have_text("Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == "fox()"
        await page.click("text=Show tokens")
        await expect(answer.locator(".markdown")).to_be_hidden()
        await expect(answer.locator(".coloured")).to_have_text(text)
        scrolls = "all => all.filter(one => one.scrollHeight > one.clientHeight + 1).map(one => one.className)"
        assert await page.locator("#playground :not(textarea, .hidden)").evaluate_all(scrolls) == []
        assert visit.complaints == []


# -- an answer is written again the other way, and compared token by token ---------------------------------------------


FOX = "the fox and the owl "


class Fickle(ScriptedEngine):
    """Without drafts it writes another text."""

    def add(self, request: Request, sink: Sink) -> None:
        if not request.speculate:
            self.tokens = [*self.tokens[:4], self.tokens[0], *self.tokens[5:]]
        super().add(request, sink)


@pytest.mark.parametrize("mode", ["on", "off"])
async def test_an_answer_is_written_again_the_other_way_and_compared(tokenizer: Tokenizer, mode: str) -> None:
    async with writing(FOX, tokenizer) as visit:
        page, frames = visit.page, sent(visit)
        await visit.ask(mode, max_output_tokens=20)
        await page.get_by_role("button", name="Prove it").click()
        outcome = page.locator(".proof")
        await expect(outcome).to_have_class(re.compile("good"))
        ids = (tokenizer.encode(FOX) * 20)[:20]
        digest = hashlib.sha256(str(ids).replace(" ", "").encode()).hexdigest()
        said = await outcome.inner_text()
        assert said.count(digest) == 2 and "the same 20 tokens" in said and "Fingerprint" in said
        first, second = frames[-2:]
        assert ("speculation" in first) != ("speculation" in second), "one with drafts, one without"
        assert second["seed"] is not None and second["cache_salt"] != first.get("cache_salt")
        assert second["input"] == first["input"]
        assert visit.complaints == []


async def test_of_an_answer_that_was_stopped_what_was_written_is_proved(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer.encode(FOX * 40), run=3, hold_after=22)
    async with writing("", tokenizer, engine=engine) as visit:
        page = visit.page
        await visit.ask("on", max_output_tokens=60, seed=3)
        await expect(page.locator(".answer .counts")).to_contain_text("22 tokens")
        await page.click(STOP)
        await expect(page.locator("#playground > .outcome")).to_have_text("Stopped.")
        await expect(page.locator(SEND)).to_be_visible()
        await expect(page.locator(".answer .markdown")).to_contain_text("fox")
        await page.get_by_role("button", name="Prove it").click()
        await expect(page.locator(".proof")).to_contain_text("Proved: the same 22 tokens without drafts.")


async def test_another_text_is_called_by_its_first_token_that_differs(tokenizer: Tokenizer) -> None:
    async with writing("", tokenizer, engine=Fickle(tokenizer.encode(FOX * 8), run=3)) as visit:
        await visit.ask("on", max_output_tokens=20, seed=3)
        await visit.page.get_by_role("button", name="Prove it").click()
        outcome = visit.page.locator(".proof")
        await expect(outcome).to_have_class(re.compile("bad"))
        await expect(outcome).to_contain_text("Not the same: token 5 differs without drafts.")
        await expect(visit.page.locator(SEND)).to_be_visible()
