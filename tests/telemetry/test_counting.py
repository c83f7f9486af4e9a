"""Random trees, runs, stop strings and cancellations: the counters are the sums of what the responses say."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp.test_utils import TestClient
from hypothesis import given, settings
from hypothesis import strategies as some

from foresay.server.metrics.telemetry import Telemetry
from foresay.server.models.service import Service
from tests.provenance.drafting import Drafting, ids_of
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import served
from tests.telemetry.scraping import Scrape, Sums

TOKENIZER = byte_level_tokenizer()
STORY = "Once upon a fox there was a 🦊🐍. The fox said: 'naïve tart' and 世界 ended."
ACTIVE, DURATION = "vllm:websocket_connections_active", "vllm:websocket_connection_duration_seconds"
STOPS = ["fox", " the", ".", "🐍", "d: 'n", "world", "x t", "世", "ended!"]

asked = some.fixed_dictionaries(
    {
        "max_tokens": some.integers(1, 70),
        "stop": some.lists(some.sampled_from(STOPS), max_size=3, unique=True),
        "n": some.integers(1, 3),
        "stream": some.booleans(),
        "chat": some.booleans(),
    }
)


@settings(max_examples=25)
@given(asks=some.lists(asked, min_size=1, max_size=4), seed=some.integers(0, 1 << 30), longest=some.integers(2, 9))
async def test_counters_are_the_sums_of_the_responses(asks: list[dict[str, Any]], seed: int, longest: int) -> None:
    sums = Sums()
    async with served(Drafting(ids_of(STORY, TOKENIZER), seed, longest), TOKENIZER) as client:
        for ask in asks:
            sums.add(await ended(client, ask), ask["n"])
        sums.check(Scrape(await (await client.get("/metrics")).text()))


async def ended(client: TestClient[Any, Any], ask: dict[str, Any]) -> dict[str, Any]:
    """The usage and metrics of a response."""
    chat, stream = ask["chat"], ask["stream"]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    body |= {name: value for name, value in ask.items() if name != "chat"} | {"spec_decode_metrics": "detailed"}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = await client.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    if not stream:
        whole: dict[str, Any] = await response.json()
        return whole
    last: dict[str, Any] = json.loads((await response.text()).split("\n\n")[-3].removeprefix("data: "))
    return last


async def test_a_client_that_leaves_is_a_cancel_and_no_error() -> None:
    kept: list[Service] = []
    engine = Drafting(ids_of(STORY, TOKENIZER) * 4, pause=0.01)
    async with served(engine, TOKENIZER, kept.append) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 500, "ignore_eos": True}
        )
        await response.content.readline()
        running = Scrape(await (await client.get("/metrics")).text())
        response.close()
        telemetry = kept[0].telemetry
        await until_over(telemetry)
        scrape = Scrape(await (await client.get("/metrics")).text())
        [summary] = telemetry.requests("")
    assert running.sum("foresay:request_success_total") == 0
    assert scrape.by("foresay:request_success_total", "finished_reason")["abort"] == 1
    assert scrape.sum("foresay:request_success_total") == 1
    assert scrape.sum("foresay:request_errors_total") == 0
    assert scrape.sum("vllm:generation_tokens_total") == summary.output_tokens > 0
    assert summary.finish_reason == "cancelled"
    assert scrape.sum("vllm:spec_decode_num_accepted_tokens_total") == summary.accepted


async def test_a_request_that_fails_is_counted_by_its_code() -> None:
    engine = Drafting(ids_of(STORY, TOKENIZER))
    engine.fail_after = 5
    async with served(engine, TOKENIZER) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 50})
        assert response.status == 500
        scrape = Scrape(await (await client.get("/metrics")).text())
    assert scrape.by("foresay:request_errors_total", "code") == {"engine_error": 1}
    assert scrape.by("vllm:request_success_total", "finished_reason")["error"] == 1
    assert scrape.by("foresay:http_responses_total", "status") == {"500": 1}


async def test_what_requests_ask_for_is_counted_once_for_all_choices_of_a_prompt() -> None:
    engine = Drafting(ids_of(STORY, TOKENIZER))
    async with served(engine, TOKENIZER) as client:
        for ask in ({"prompt": ["x", "y"], "n": 3, "max_tokens": 7}, {"prompt": "x", "max_tokens": 30}):
            assert (await client.post("/v1/completions", json=ask)).status == 200
        scrape = Scrape(await (await client.get("/metrics")).text())
    for prefix in ("foresay:", "vllm:"):
        sums = {name: scrape.sum(f"{prefix}request_params_{name}") for name in ("n_sum", "n_count", "max_tokens_sum")}
        assert sums == {"n_sum": 3 + 3 + 1, "n_count": 3, "max_tokens_sum": 6 * 7 + 30}
    assert {dict(labels)["engine"] for labels in scrape.samples["vllm:request_params_n_count"]} == {"0"}


async def test_websockets_are_counted_while_they_are_open_and_timed_when_they_are_not() -> None:
    began = time.monotonic()
    async with served(Drafting(ids_of(STORY, TOKENIZER)), TOKENIZER) as client:
        async with client.ws_connect("/v1/responses"), client.ws_connect("/v1/responses"):
            during = Scrape(await (await client.get("/metrics")).text())
            await asyncio.sleep(0.2)
        async with asyncio.timeout(60):
            while (after := Scrape(await (await client.get("/metrics")).text())).sum(ACTIVE):
                await asyncio.sleep(0.02)
    assert (during.sum(ACTIVE), during.sum(f"{DURATION}_count")) == (2, 0)
    assert after.sum(f"{DURATION}_count") == 2
    assert 0.4 <= after.sum(f"{DURATION}_sum") <= 2 * (time.monotonic() - began)


async def until_over(telemetry: Telemetry) -> None:
    async with asyncio.timeout(60):
        while any(summary.finish_reason is None for summary in telemetry.requests("")):
            await asyncio.sleep(0.01)
