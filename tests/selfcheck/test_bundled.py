"""The bundled pair behind a real server in this process: its answers are those of plain decoding, and when they are not
the self-check reports it. The numbers about traffic know nothing of re-runs."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from foresay.kvpaging import KVStore
from foresay.server.http.app import create_app
from foresay.server.models.service import Service, Text
from foresay.server.settings.config import ServeConfig
from foresay.spec.engine import EngineCore
from tests.selfcheck.inprocess import SteppedEngine, bundled, take_first_children
from tests.server.staying import alone, service_of
from tests.server.wire import until
from tests.telemetry.scraping import Scrape

ASKS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time there was a fox who lived in a house. " * 2, "max_tokens": 24, "temperature": 0},
    {"prompt": "Once upon a time there was a fox who lived in a house. " * 2, "max_tokens": 24, "temperature": 1},
    {"prompt": "The king said", "max_tokens": 30, "temperature": 0.9, "seed": 4, "stop": [" the"]},
    {"prompt": "The king said", "max_tokens": 12, "temperature": 1, "seed": 6, "n": 2, "logprobs": 2},
    {"prompt": "Tell me", "max_tokens": 20, "temperature": 1, "structured_outputs": {"regex": "[a-c]{9,14}!"}},
    {"prompt": "One", "max_tokens": 16, "temperature": 1, "frequency_penalty": 1.5, "min_tokens": 16, "top_k": 40},
]

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    return bundled()


@asynccontextmanager
async def serving(engine: EngineCore, share: float = 1.0) -> AsyncIterator[tuple[TestClient, Service, SteppedEngine]]:
    stepped = SteppedEngine(engine)
    service = service_of(stepped, Text.load(ServeConfig()), model="bundled", seed=11, self_check=share)
    stepped.observe = service.telemetry.step
    async with TestClient(TestServer(create_app(alone(service)))) as client:
        yield client, service, stepped


async def answered(client: TestClient, id: str = "one", **ask: Any) -> dict[str, Any]:
    async with client.post("/v1/completions", json=ask, headers={"X-Request-Id": id}) as response:
        body: dict[str, Any] = await response.json()
        assert response.status == 200, body
        return body


async def test_all_kinds_of_answers_are_those_of_plain_decoding(engine: EngineCore) -> None:
    async with serving(engine) as (client, service, stepped):
        tokens, choices = 0, 0
        for ask in ASKS:
            body = await answered(client, **ask)
            tokens += body["usage"]["completion_tokens"]
            choices += len(body["choices"])
        counts = service.telemetry.self_check
        await until(lambda: counts.self_check_requests == choices)
        assert (counts.self_check_mismatch, counts.self_check_skipped, counts.self_check_waiting) == (0, 0, 0)
        assert counts.self_check_tokens == tokens
        assert all(not again.speculate and again.fork_of is None for again in stepped.checks)
        assert len({again.params.seed for again in stepped.checks if len(again.prompt) < 6}) == 4
    engine.check()


async def test_re_runs_leave_the_numbers_of_the_traffic_alone(engine: EngineCore) -> None:
    async with serving(engine) as (client, service, _):
        telemetry, counts = service.telemetry, service.telemetry.self_check
        await answered(client, prompt="The old king", max_tokens=20, temperature=1)
        before, kept = telemetry.totals(), engine.pool.idle
        await until(lambda: counts.self_check_requests == 1)
        after = telemetry.totals()
        for name in ("engine_steps", "generation_tokens", "decode_seconds", "prompt_tokens", "request_success"):
            assert getattr(before, name) == getattr(after, name), name
        assert before.step_seconds.counts == after.step_seconds.counts
        assert engine.pool.idle == kept, "no page of it stays"
        assert telemetry.plain_seconds != engine.info.root_seconds, "but what a plain step takes is learnt from them"
        [summary] = telemetry.requests("")
        assert summary.output_tokens == 20
        scrape = Scrape(await (await client.get("/metrics")).text())
        assert scrape.sum("foresay:request_success_total") == 1
        assert scrape.sum("foresay:self_check_requests_total") == 1
        assert scrape.sum("foresay:self_check_tokens_total") == 20
        assert scrape.sum("foresay:self_check_mismatch_total") == scrape.sum("foresay:self_check_skipped_total") == 0


async def test_a_broken_accept_rule_is_found(
    engine: EngineCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_first_children(monkeypatch)
    async with serving(engine) as (client, service, _):
        counts = service.telemetry.self_check
        with caplog.at_level(logging.WARNING, "foresay.selfcheck"):
            body = await answered(client, "found", prompt="Once upon a time", max_tokens=40, temperature=1)
            await until(lambda: counts.self_check_requests == 1)
        assert counts.self_check_mismatch == 1
        assert 0 < counts.self_check_tokens <= 40
        state = await (await client.get("/dashboard/state")).json()
        scrape = Scrape(await (await client.get("/metrics")).text())
    assert (
        state["snapshot"]["self_check"]["self_check_mismatch"] == scrape.sum("foresay:self_check_mismatch_total") == 1
    )
    [line] = [record.getMessage() for record in caplog.records if record.name == "foresay.selfcheck"]
    assert re.match(r"self-check: request \w+-0 \(X-Request-Id found, seed 11\) differs at output position \d+", line)
    assert line.endswith("on this machine, which claims to be exact")
    assert not {word for word in body["choices"][0]["text"].split() if len(word) > 4} & set(line.split())


async def test_kept_kv_that_went_bad_is_found(engine: EngineCore) -> None:
    """The re-run takes none of it, or both would be wrong in the same way."""
    ask: dict[str, Any] = {
        "prompt": "In a land far away there lived a miller with his three sons and a cat. ",
        "max_tokens": 24,
    }
    async with serving(engine) as (client, service, _):
        counts = service.telemetry.self_check
        first = await answered(client, **ask)
        await until(lambda: counts.self_check_requests == 1)
        assert counts.self_check_mismatch == 0
        spoil_kept_pages(engine)
        second = await answered(client, **ask)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert second["choices"][0]["text"] != first["choices"][0]["text"]
        await until(lambda: counts.self_check_requests == 2)
        assert counts.self_check_mismatch == 1
    assert engine.prefix is not None
    engine.pool.evict(len(engine.prefix))


def spoil_kept_pages(engine: EngineCore) -> None:
    """Turn the values in all pages that are kept for reuse around."""
    for store in [each for each in engine.pool.stores if isinstance(each, KVStore)]:
        by_page = store.tensors[1].unflatten(1, (-1, engine.pool.page_size))
        by_page[:, sorted(engine.prefix or ())] *= -1
