"""Numbers that are shown in several views: in /metrics, by responses, token by token, on the page, in the log. Each is
one number."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest

from foresay.spec.accept import ByDepth, tokens_per_step
from tests.server.live import LiveServer
from tests.telemetry.scraping import Scrape, Sums, scraped

Json = dict[str, Any]

EXTRA: Json = {"spec_decode_metrics": "detailed", "provenance": True, "return_token_ids": True}
ASKS: list[Json] = [
    {"prompt": "Once upon a time " * 12, "max_tokens": 60, "temperature": 0},
    {"prompt": "The little fox said", "max_tokens": 64, "temperature": 0.8, "seed": 5, "stop": ["e t", "."]},
    {"prompt": "The little fox said", "max_tokens": 24, "temperature": 1, "seed": 6, "n": 3},
    {"prompt": "Tell me", "max_tokens": 20, "structured_outputs": {"choice": ["once upon a time", "the end of it"]}},
    {"prompt": "One day", "max_tokens": 12, "speculation": {"off": True}},
    # Stop strings of one letter end texts in any place of a run, in the last one too, which the limit has ended.
    *({"prompt": "Then the", "max_tokens": 4 + seed % 9, "seed": seed, "stop": ["a", "i"]} for seed in range(24)),
]


async def posted(session: aiohttp.ClientSession, url: str, ask: Json) -> Json:
    async with session.post(f"{url}/v1/completions", json=ask | EXTRA) as response:
        assert response.status == 200, await response.text()
        body: Json = await response.json()
        return body


class Seen:
    """The requests of a server, and what each of its views shows. state, listed: of the page."""

    def __init__(self, bodies: list[Json], scrape: Scrape, state: Json, listed: list[Json], log: str) -> None:
        self.bodies, self.scrape, self.state, self.listed, self.log = bodies, scrape, state, listed, log

    @property
    def choices(self) -> list[Json]:
        return [choice for body in self.bodies for choice in body["choices"]]


@pytest.fixture(scope="module")
def seen(url: str, live: LiveServer) -> Seen:
    return asyncio.run(_seen(url, live))


async def _seen(url: str, live: LiveServer) -> Seen:
    async with aiohttp.ClientSession() as session:
        bodies = [await posted(session, url, ask) for ask in ASKS]
        bodies += await asyncio.gather(*(posted(session, url, ask) for ask in ASKS))
        drafted = of_metrics(await scraped(url))[0]
        async with asyncio.timeout(120):  # until the log has the last of them
            while sum(int(line["drafted"].replace(",", "")) for line in LINE.finditer(live.output)) < drafted:
                await asyncio.sleep(0.1)

        async def page(name: str) -> Any:
            return await (await session.get(f"{url}/dashboard/{name}")).json()

        tokens, state = sum(body["usage"]["completion_tokens"] for body in bodies), await page("state")
        async with asyncio.timeout(60):  # the last step may have drafted nothing, and its second goes on
            while sum(point["tokens"] for point in state["history"]["seconds"]) < tokens:
                await asyncio.sleep(0.1)
                state = await page("state")
        listed = await page("requests")
    return Seen(bodies, await scraped(url), state, listed, live.output)


def of_metrics(scrape: Scrape) -> tuple[float, float, float]:
    names = ("num_draft_tokens", "num_accepted_tokens", "num_discarded_tokens")
    drafted, accepted, discarded = (scrape.sum(f"foresay:spec_decode_{name}_total") for name in names)
    return drafted, accepted, discarded


def test_three_tellings_of_one_number(seen: Seen) -> None:
    sums = Sums()
    for body in seen.bodies:
        sums.add(body, len(body["choices"]))
    sums.check(seen.scrape)
    steps = [step for choice in seen.choices for step in choice["provenance"]["steps"]]
    responses = (sums.drafted, sums.accepted)
    wire = (sum(step["drafted"] for step in steps), sum(step["accepted"] for step in steps))
    listed = (sum(one["drafted"] for one in seen.listed), sum(one["accepted"] for one in seen.listed))
    assert (responses, wire, listed) == (of_metrics(seen.scrape)[:2],) * 3
    assert sums.accepted > 100
    assert of_metrics(seen.scrape)[2] == sum(one["discarded"] for one in seen.listed) > 10, "stop strings cut runs"


def test_tokens_per_step_is_one_number(seen: Seen) -> None:
    """Of all answers together, and of each: in /metrics, twice on the page, by the responses."""
    steps = {
        (body["id"], choice["index"]): len(choice["provenance"]["steps"])
        for body in seen.bodies
        for choice in body["choices"]
    }
    tokens = sum(body["usage"]["completion_tokens"] for body in seen.bodies)
    wanted = tokens_per_step(tokens, sum(steps.values()))
    histogram = "foresay:spec_decode_tokens_per_step"
    assert seen.scrape.sum(f"{histogram}_sum") / seen.scrape.sum(f"{histogram}_count") == wanted
    points = seen.state["history"]["seconds"]
    assert sum(point["tokens"] for point in points) / sum(point["runs"] for point in points) == wanted
    assert sum(one["output_tokens"] for one in seen.listed) / sum(one["steps"] for one in seen.listed) == wanted
    for body in seen.bodies:
        own = sum(steps[body["id"], choice["index"]] for choice in body["choices"])
        assert body["metrics"]["tokens_per_step"] == round(body["usage"]["completion_tokens"] / own, 4)
    each = sorted(round(one["tokens_per_step"], 4) for one in seen.listed)
    written = [(len(choice["token_ids"]), len(choice["provenance"]["steps"])) for choice in seen.choices]
    assert each == sorted(round(length / passes, 4) for length, passes in written)
    plain = [body for body in seen.bodies if body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0]
    assert any(body["metrics"]["tokens_per_step"] == 1 for body in plain), "steps without drafts count"


def test_accepted_by_depth_is_two_numbers(seen: Seen) -> None:
    page = ByDepth(**seen.state["snapshot"]["accepted_by_depth_hour"])
    positions = seen.scrape.by("foresay:spec_decode_num_accepted_tokens_per_pos_total", "position")
    counted = [int(positions[str(place)]) for place in range(len(positions))]
    of_metrics = ByDepth.of(counted, int(seen.scrape.sum("foresay:spec_decode_num_drafts_total")))
    tellings = [body["metrics"]["speculative_decoding"] for body in seen.bodies]
    accepted = [depths for telling in tellings for depths in telling["per_step_accepted"]]
    of_answers = ByDepth.of([sum(one > depth for one in accepted) for depth in range(len(counted))], len(accepted))
    assert page == of_metrics == of_answers
    assert len(page.cumulative) >= 4
    assert page.cumulative[1:] != page.conditional[1:]


LINE = re.compile(
    r"Speculation: (?P<per_step>[\d.]+) tokens per step, (?P<accepted>[\d,]+) of (?P<drafted>[\d,]+) drafted tokens"
)


def test_the_log_agrees(seen: Seen) -> None:
    lines = [found.groupdict() for found in LINE.finditer(seen.log)]
    assert len(lines) == seen.log.count("Speculation: ")
    assert lines
    drafted, accepted, _ = of_metrics(seen.scrape)
    assert sum(int(line["drafted"].replace(",", "")) for line in lines) == drafted
    assert sum(int(line["accepted"].replace(",", "")) for line in lines) == accepted
    rates = [float(line["per_step"]) for line in lines]
    whole, steps = (seen.scrape.sum(f"foresay:spec_decode_tokens_per_step_{part}") for part in ("sum", "count"))
    assert min(rates) - 0.01 <= whole / steps <= max(rates) + 0.01
