"""The playground: conversations, who drafts, and two answers side by side, with the bundled pair."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.async_api import WebSocket, expect

from tests.dashboard.browsing import Visit, needs_chromium, visiting
from tests.server.live import LiveServer

pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, slow_target: str) -> Iterator[str]:
    """A server with two drafters to choose from."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with LiveServer(log, slow_target, "--draft", "draft_model,ngram", "--threads", "1") as server:
        yield server.wait_for_url()


def sent(visit: Visit) -> list[dict[str, Any]]:
    """What the page asks for from now on."""
    frames: list[dict[str, Any]] = []

    def opened(socket: WebSocket) -> None:
        socket.on("framesent", lambda frame: frames.append(json.loads(frame)))

    visit.page.on("websocket", opened)
    return frames


async def test_a_conversation_goes_on_until_a_new_one_is_begun(url: str) -> None:
    async with visiting(url) as visit:
        page, frames = visit.page, sent(visit)
        await visit.go()
        await visit.ready()
        anew = page.locator("button.anew")
        await expect(anew).to_be_disabled()
        await page.fill("[name=system]", "You are an owl.")
        await visit.run(max_output_tokens=12, seed=1)
        first = "".join(text for text, _ in await visit.tokens(page.locator(".answer")))
        await page.fill("#prompt", "And then?")
        await visit.run(max_output_tokens=8)
        users = page.locator(".turn .user")
        await expect(users).to_have_text(["Tell me a story about a fox and an owl.", "And then?"])
        assert frames[1]["input"] == [
            {"role": "user", "content": "Tell me a story about a fox and an owl."},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And then?"},
        ]
        assert frames[1]["instructions"] == "You are an owl."
        await expect(page.locator("#requests .words").first).to_have_text("And then?")
        await anew.focus()
        await page.keyboard.press("Enter")
        await expect(users).to_have_count(0)
        await page.fill("[name=system]", "")
        await visit.run(max_output_tokens=4)
        assert len(frames[2]["input"]) == 1
        assert "instructions" not in frames[2]


async def test_what_failed_is_no_part_of_the_conversation(url: str) -> None:
    async with visiting(url) as visit:
        frames = sent(visit)
        await visit.go()
        await visit.ready()
        await visit.run(max_output_tokens=4, top_p=0)
        await expect(visit.page.locator(".outcome")).to_have_text(re.compile("^It failed: top_p must be"))
        await expect(visit.page.locator(".turn")).to_have_count(0)
        await visit.run(max_output_tokens=4, top_p=1)
        assert len(frames[1]["input"]) == 1


async def test_the_drafter_that_is_chosen_drafts(url: str) -> None:
    async with visiting(url) as visit:
        page, frames = visit.page, sent(visit)
        await visit.go()
        await visit.ready()
        await expect(page.locator("[name=method] option")).to_have_text(["auto", "draft_model", "ngram"])
        await page.select_option("[name=method]", "draft_model")
        colours = page.locator(".answer .coloured .t:not(.own)")
        await visit.run(max_output_tokens=40, seed=3)
        assert frames[-1]["speculation"] == {"method": "draft_model"}
        await expect(page.locator("#requests small").first).to_have_text("drafts by draft_model, temperature 1, seed 3")
        assert set(await colours.evaluate_all("all => all.map(one => one.dataset.colour)")) == {"draft_model"}
        await page.select_option("[name=method]", "auto")
        await visit.run(max_output_tokens=4)
        assert "speculation" not in frames[-1]


async def test_compare_stands_side_by_side_with_both_clocks(url: str) -> None:
    for width in (1280, 390):
        async with visiting(url, viewport={"width": width, "height": 900}) as visit:
            await visit.go()
            await visit.ready()
            await visit.run("compare", max_output_tokens=24, seed=5)
            answers = visit.page.locator(".compared .answer")
            await expect(answers).to_have_count(2)
            left, right = [await answers.nth(place).bounding_box() for place in (0, 1)]
            assert left is not None
            assert right is not None
            assert left["y"] == right["y"]
            assert left["x"] + left["width"] <= right["x"]
            await expect(answers.nth(0).locator(".clock")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
            await expect(answers.nth(1).locator(".clock")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
            assert await visit.page.evaluate("document.documentElement.scrollWidth") == width


async def test_the_answer_says_the_same_as_the_list(url: str) -> None:
    async with visiting(url) as visit:
        page = visit.page
        await visit.go()
        await visit.ready()
        await visit.run(max_output_tokens=60, seed=6)
        said = dict(
            zip(
                await page.locator(".numbers-said dt").all_inner_texts(),
                await page.locator(".numbers-said dd").all_inner_texts(),
                strict=True,
            )
        )
        cells = page.locator("#requests tr[data-id]").first.locator("td")
        await expect(cells.nth(3)).to_have_text(said["tokens"])
        await expect(cells.nth(6)).to_have_text(said["tokens per step"])
        await expect(cells.nth(7)).to_have_text(said["accepted"])


VERDICTS = [
    ([[0.3, 0.6]], "Same text: 300 ms with drafts, 600 ms without, 50 % of the time saved.", "good"),
    (
        [[0.6, 0.3]],
        "Same text: 600 ms with drafts, 300 ms without. One answer says little; compare a few more.",
        "good",
    ),
    ([[9, 1], [0.6, 0.3], [0.6, 0.3]], "One answer says little; compare a few more.", "good"),
    (
        [[9, 1], [0.6, 0.3], [0.6, 0.3], [0.6, 0.3]],
        "The last 3 answers: 1.80 s with drafts, 900 ms without: speculation does not pay here.",
        "warn",
    ),
    (
        [[9, 1], [0.3, 0.6], [0.3, 0.6], [0.4, 0.3]],
        "The last 3 answers: 1.00 s with drafts, 1.50 s without, 33 % of the time saved.",
        "good",
    ),
    ([[9, 1], [0.3, 0.31], [0.31, 0.3], [0.3, 0.3]], "without: as fast as each other.", "good"),
    ([[9, 1], [0.1, 0.4], [0.4, 0.1], [0.4, 0.1]], "they differ too much to tell. Is this machine busy?", "warn"),
    ([[0, 0]], "Same text.", "good"),
]


async def test_a_verdict_on_speculation_needs_several_answers(url: str) -> None:
    async with visiting(url) as visit:
        await visit.go()
        script = "async times => (await import('/dashboard/static/compare.js')).verdict(times)"
        for times, sentence, kind in VERDICTS:
            said = await visit.page.evaluate(script, times)
            assert said[0].endswith(sentence) and said[1] == kind, said
