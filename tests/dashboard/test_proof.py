"""*Prove it*: an answer is written again the other way, and compared token by token."""

from __future__ import annotations

import hashlib
import re

import pytest
from playwright.async_api import expect

from foresay.server.engine.generation import Sink
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.request import Request
from tests.dashboard.browsing import SEND, STOP, needs_chromium
from tests.dashboard.showing import sent, writing
from tests.server.scripted import ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]

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
