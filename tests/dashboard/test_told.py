"""What the page says of a server whose answers are written down: doubts, deep drafts, requests, old figures."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from playwright.async_api import expect

from foresay.server.gateway.key_store import KeyStore
from foresay.server.host.service import Service
from foresay.server.http.auth import AuthMiddleware
from foresay.server.observe.telemetry import views
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.plain import CHANGED
from foresay.spec.trace import StepTrace
from tests.dashboard.browsing import Visit, needs_chromium, visiting
from tests.gateway.guarded import ALICE, BOB, bearer, guarded
from tests.server.scripted import ScriptedEngine, served

pytestmark = [needs_chromium, pytest.mark.slow]

ASK: dict[str, Any] = {"prompt": "Tell me of the fox", "max_tokens": 40, "ignore_eos": True}


@asynccontextmanager
async def shown(engine: ScriptedEngine, tokenizer: Tokenizer, **context: Any) -> AsyncIterator[tuple[Any, Visit]]:
    """The service behind an open page."""
    services: list[Service] = []
    async with (
        served(engine, tokenizer, services.append) as client,
        visiting(str(client.make_url("")).rstrip("/"), **context) as visit,
    ):
        await visit.go()
        await visit.ready()
        yield services[0], visit


async def asked(visit: Visit, path: str = "/v1/completions", **fields: Any) -> None:
    """Ask the server behind the page for something."""
    async with aiohttp.ClientSession() as session, session.post(visit.url + path, json=ASK | fields) as response:
        assert response.status == 200, await response.text()


def step(number: int, doubt: str) -> StepTrace:
    return StepTrace(
        number=number,
        rows=5,
        sequences=1,
        prefill_rows=0,
        drafted=4,
        accepted=2,
        emitted=3,
        seconds={"forward": 0.01},
        root_seconds=0.009,
        doubt=doubt,
    )


async def test_a_speed_up_that_rests_on_little_is_unsure(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5]), tokenizer) as (service, visit):
        speed, chart = visit.page.locator("#speed"), visit.page.locator("#speed-over-time .line")
        for number in range(30):
            service.telemetry.step(step(number, CHANGED))
        await expect(speed).to_have_text(re.compile(r"^2\.70×\s*speed-up now\s*cannot tell$"))
        await expect(speed).to_have_attribute("title", re.compile(f"^Cannot tell, since {CHANGED}: "))
        assert await visit.page.title() == "Foresay: toy", "no headline that may be wrong"
        grey = await speed.locator("b").evaluate("one => getComputedStyle(one).color")
        await expect(chart.and_(visit.page.locator("[data-colour=none]"))).to_have_count(1)
        for number in range(100):
            service.telemetry.step(step(number, ""))
        await expect(speed).to_have_text(re.compile(r"^2\.70×\s*speed-up now\s*estimated$"))
        assert await visit.page.title() == "2.70× · Foresay: toy"
        assert await speed.locator("b").evaluate("one => getComputedStyle(one).color") != grey


async def test_the_tile_tells_the_last_request_where_nothing_runs(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "RATE_SECONDS", 1)
    async with shown(ScriptedEngine([5], run=2, pause=0.01), tokenizer) as (_, visit):
        tile = visit.page.locator("#tiles [data-tile=Throughput]")
        await expect(tile).to_have_text(re.compile("–"))
        await asked(visit)
        await expect(tile).to_have_text(re.compile(r"^Throughput\d[\d.]* tok/slast request$"))
        shown_rate = await tile.locator("b").inner_text()
        listed = await visit.page.locator("#requests tr[data-id] td").nth(5).inner_text()
        assert shown_rate == listed, "one number, in the tile and in the list"


async def test_depths_beyond_eight_are_one(tokenizer: Tokenizer) -> None:
    async with shown(ScriptedEngine([5], run=14), tokenizer) as (_, visit):
        page = visit.page
        await asked(visit)
        labels = page.locator("#by-depth .below")
        await expect(labels).to_have_text(["1", "2", "3", "4", "5", "6", "7", "8", "9+"])
        await page.locator("#by-depth svg").focus()
        await page.keyboard.press("End")
        told = page.locator("#by-depth .when")
        await expect(told).to_have_text(re.compile(r"^depth 9\+: cumulative \d+ %, conditional \d+ %"))
        await expect(page.locator("#tree .node")).to_have_count(10)
        await page.locator("#tree svg").focus()
        await page.keyboard.press("End")
        await expect(page.locator("#tree .told")).to_have_text(re.compile(r"^depth 9\+: drafted \d+ times, accepted"))


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
        await expect(row.locator("small")).to_have_text(f"script, T 1.00, seed {2**31 - 1}")
        await expect(row.locator(".words")).to_have_text(re.compile("^a prompt that is much longer"))
        await expect(page.locator("#drafters tbody th")).to_have_text("script")
        clipped = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"
        assert await page.locator(".scroll").evaluate_all(clipped) == []
        assert await page.evaluate("document.documentElement.scrollWidth") == width
