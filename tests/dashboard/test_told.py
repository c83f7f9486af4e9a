"""What the page says of a server whose answers are written down: doubts, deep drafts, requests, old figures."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from playwright.async_api import expect

from foresay.server.gateway.key_store import KeyStore
from foresay.server.http.auth import AuthMiddleware
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.budget.cost import CHANGED
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.showing import asked, shown, step
from tests.gateway.guarded import ALICE, BOB, bearer, guarded
from tests.server.scripted import INFO, ScriptedEngine

pytestmark = [needs_chromium, pytest.mark.slow]


async def test_a_speed_up_that_rests_on_little_is_unsure(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5]), tokenizer) as (service, visit):
        speed, chart = visit.page.locator("#speed"), visit.page.locator("#speed-over-time .line")
        for number in range(30):
            service.telemetry.step(step(number, CHANGED))
        await expect(speed).to_have_text(re.compile(r"^2\.70×as fast as without drafts\s*cannot tell\?"))
        await expect(speed.locator(".why")).to_have_text(re.compile(f"^Cannot tell, since {CHANGED}: "))
        assert await visit.page.title() == "Foresay: toy", "no headline that may be wrong"
        grey = await speed.locator("b").evaluate("one => getComputedStyle(one).color")
        await expect(chart.and_(visit.page.locator("[data-colour=none]"))).to_have_count(1)
        for number in range(100):
            service.telemetry.step(step(number, ""))
        await expect(speed).to_have_text(re.compile(r"^2\.70×as fast as without drafts\s*estimated speed-up\?"))
        assert await visit.page.title() == "2.70× · Foresay: toy"
        assert await speed.locator("b").evaluate("one => getComputedStyle(one).color") != grey


async def test_depths_beyond_eight_are_one(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5], run=14), tokenizer) as (_, visit):
        page = visit.page
        await asked(visit)
        labels = page.locator("#by-depth .below")
        await expect(labels).to_have_text(["1", "2", "3", "4", "5", "6", "7", "8", "9+"])
        await page.locator("#by-depth svg").focus()
        await page.keyboard.press("End")
        told = page.locator("#by-depth .when")
        await expect(told).to_have_text(re.compile(r"^token 9\+: right in \d+ % of the drafts, \d+ % of those"))
        await expect(page.locator("#tree .node")).to_have_count(10)
        await page.locator("#tree svg").focus()
        await page.keyboard.press("End")
        await expect(page.locator("#tree .told")).to_have_text(re.compile(r"^token 9\+: drafted \d+ times, right"))


async def test_requests_say_what_was_asked_for_and_nobody_else_is_told(tokenizer: Tokenizer) -> None:
    engine, key = ScriptedEngine([5], run=3), bearer(ALICE)
    async with guarded(engine, tokenizer, AuthMiddleware(KeyStore([ALICE, BOB]))) as client:
        said = {"role": "user", "content": "What does\n the fox say? " * 20}
        asks: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": "Tell me of the fox", "temperature": 0.7, "seed": 11}),
            ("/v1/completions", {"prompt": tokenizer.encode("once upon a time"), "seed": 12}),
            ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be brief."}, said]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": []}]}),
            ("/v1/responses", {"input": "a secret of mine", "store": False}),
        ]
        for path, fields in asks:
            limit = {"max_output_tokens": 6} if "responses" in path else {"max_tokens": 6}
            response = await client.post(path, json=fields | limit, headers=key)
            assert response.status == 200, await response.text()
        listed = await (await client.get("/dashboard/requests", headers=key)).json()
        assert (
            [one["prompt"] for one in listed]
            == [
                None,
                listed[1]["prompt"],  # of nothing said, what the chat template begins with
                ("What does the fox say? " * 4)[:80],
                "once upon a time",
                "Tell me of the fox",
            ]
        )
        assert [(one["temperature"], one["seed"]) for one in listed[3:]] == [(1.0, 12), (0.7, 11)]
        assert await (await client.get("/dashboard/requests", headers=bearer(BOB))).json() == []
        for path in ("state", f"requests/{listed[0]['id']}"):
            told = await (await client.get(f"/dashboard/{path}", headers=key)).text()
            assert "secret" not in told
            assert "fox" not in told


@pytest.mark.parametrize("width", [1280, 1501, 1920])
async def test_no_column_is_clipped(tokenizer: Tokenizer, width: int) -> None:
    async with shown(ScriptedEngine([5], run=3), tokenizer, viewport={"width": width, "height": 900}) as (_, visit):
        page = visit.page
        await asked(visit, prompt="a prompt that is much longer than any column of a table may be " * 4, seed=2**31 - 1)
        row = page.locator("#requests tr[data-id]")
        await expect(row.locator("small")).to_have_text(f"drafts by script, temperature 1, seed {2**31 - 1}")
        await expect(row.locator(".words")).to_have_text(re.compile("^a prompt that is much longer"))
        await expect(page.locator("#drafters tbody th")).to_have_text("script")
        clipped = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"
        assert await page.locator(".scroll").evaluate_all(clipped) == []
        assert await page.evaluate("document.documentElement.scrollWidth") == width


async def test_a_request_says_what_was_reused_and_where_its_prompt_differs(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([5], run=3)
    engine.info = msgspec.structs.replace(INFO, max_model_len=4000)
    async with shown(engine, tokenizer) as (_, visit):
        for word in ("fox", "owl"):
            said = [{"role": "user", "content": f"A {word}{' hides' * 400}"}]
            await asked(visit, "/v1/chat/completions", messages=said, prompt=None)
        row = visit.page.locator("#requests tr[data-id]").first
        await expect(row.locator("[data-head='prompt tokens']")).to_have_text(re.compile(r"^[\d,]+ \(3 reused\)$"))
        told = re.compile(r"^prompt differs at token \d+ of [\d,]+, in message 1 \(user\)$")
        await expect(row.locator("small").last).to_have_text(told)
