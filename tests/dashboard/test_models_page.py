"""The page of a server with several models: it says whose numbers it shows, and asks the one that is chosen."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.dashboard.browsing import needs_chromium, visiting
from tests.models.serving import serving

pytestmark = [needs_chromium, pytest.mark.slow]
TEXTS = {"fox": "said the fox", "org/owl&1.5:q": "said the owl"}


async def test_the_model_is_chosen_in_the_header_and_answers_in_the_playground(tokenizer):
    async with serving(tokenizer, TEXTS) as server, visiting(str(server.client.make_url("")).rstrip("/")) as visit:
        page = visit.page
        await visit.go()
        await visit.ready()
        options = page.locator("#model option")
        await expect(options).to_have_text(["fox (not loaded)", "org/owl&1.5:q (not loaded)"])
        await expect(page.locator("#notice")).to_contain_text("Not loaded: the next request loads it.")
        await page.select_option("#model", "org/owl&1.5:q")
        await page.wait_for_url("**model=org**")
        await visit.ready()
        assert await page.locator("#model").input_value() == "org/owl&1.5:q"
        await visit.run()
        await expect(page.locator(".answer .markdown")).to_contain_text("said the owl")
        await expect(options).to_have_text(["fox (not loaded)", "org/owl&1.5:q"])
        await expect(page.locator("#notice")).not_to_contain_text("Not loaded")
        await expect(page.locator("#requests tbody tr[data-id]")).to_have_count(2)  # loading it, and the answer
        assert server.loads == {"fox": 0, "org/owl&1.5:q": 1}
        assert visit.complaints == []
        assert visit.tried == []
