"""Acceptance as counted in /metrics, told by the response, told token by token, and traced step by step: one number."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from server.tracing.reader import Session, Told, read
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
    """What a server was asked, and what was found in each of the four places."""

    def __init__(self, bodies: list[Json], scrape: Scrape, session: Session) -> None:
        self.bodies, self.scrape, self.session = bodies, scrape, session

    @property
    def told(self) -> list[Told]:
        return asked(self.session)


def asked(session: Session) -> list[Told]:
    """The requests that came from clients."""
    return [told for told in session.requests.values() if not told.begin.aside]


@pytest.fixture(scope="module")
def seen(url: str, trace_file: Path) -> Seen:
    return asyncio.run(_seen(url, trace_file))


async def _seen(url: str, trace_file: Path) -> Seen:
    async with aiohttp.ClientSession() as session:
        bodies = [await posted(session, url, ask) for ask in ASKS]
        bodies += await asyncio.gather(*(posted(session, url, ask) for ask in ASKS))
    scrape = await scraped(url)
    async with asyncio.timeout(20):
        while True:  # the last line is written behind the last answer
            trace = read(trace_file)
            (lived,) = trace.sessions
            told = asked(lived)
            if len(told) == choices(bodies) and all(one.end for one in told):
                assert trace.broken == 0
                return Seen(bodies, scrape, lived)
            await asyncio.sleep(0.05)


def choices(bodies: list[Json]) -> int:
    return sum(len(body["choices"]) for body in bodies)


def of_metrics(scrape: Scrape) -> tuple[float, float, float]:
    names = ("num_draft_tokens", "num_accepted_tokens", "num_discarded_tokens")
    drafted, accepted, discarded = (scrape.sum(f"foresay:spec_decode_{name}_total") for name in names)
    return drafted, accepted, discarded


def test_four_tellings_of_one_number(seen: Seen) -> None:
    sums = Sums()
    for body in seen.bodies:
        sums.add(body, len(body["choices"]))
    sums.check(seen.scrape)
    steps = [step for body in seen.bodies for choice in body["choices"] for step in choice["provenance"]["steps"]]
    counts = [told.counts() for told in seen.told]
    responses = (sums.drafted, sums.accepted)
    wire = (sum(step["drafted"] for step in steps), sum(step["accepted"] for step in steps))
    traced = (sum(sum(c.per_step_drafted) for c in counts), sum(sum(c.per_step_accepted) for c in counts))
    assert (responses, wire, traced) == (of_metrics(seen.scrape)[:2],) * 3
    assert sums.accepted > 100
    assert of_metrics(seen.scrape)[2] == sum(told.emitted - told.kept for told in seen.told) > 10, (
        "stop strings cut runs"
    )


def test_the_trace_holds_the_texts(seen: Seen) -> None:
    said = sorted(choice["token_ids"] for body in seen.bodies for choice in body["choices"])
    assert sorted(output for told in seen.told if (output := told.output()) is not None) == said


def test_the_shadow_walked_along_every_text_that_may_be_drafted_for(seen: Seen) -> None:
    tokens = sum(told.kept for told in seen.told if told.begin.speculate and not told.begin.grammar)
    by = {name: seen.scrape.sum(f"foresay:shadow_{name}_total", drafter="ngram") for name in ("tokens", "steps")}
    assert by["tokens"] == pytest.approx(tokens, abs=30), "a cut in a run that has ended already comes too late"
    # A stop string may be found when a step behind it is walked already; of that step no token counts.
    assert 0 < by["steps"] <= by["tokens"] + len(seen.told)
    drafted = seen.scrape.sum("foresay:shadow_draft_tokens_total")
    assert 0 < seen.scrape.sum("foresay:shadow_accepted_tokens_total") <= drafted
