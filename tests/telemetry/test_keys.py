"""Metrics need a key where there are keys, and what one key asked is shown to no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from foresay.server.gateway.keys import Caller, KeyStore, serve
from foresay.server.http.app import create_app
from foresay.server.http.auth import AuthMiddleware
from foresay.server.metrics.report import HistoryReport, Snapshot
from foresay.server.metrics.telemetry import MOST_PER_TENANT, Telemetry
from foresay.server.models.service import Service, Text
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from tests.gateway.guarded import ALICE, BOB, bearer
from tests.provenance.drafting import Drafting, ids_of
from tests.server.staying import alone, service_of
from tests.telemetry.counted import chosen
from tests.telemetry.test_verdict import Engine

ANSWER = "Once upon a fox there was"
QUESTION = "naïve tart"
KEYS = KeyStore([ALICE, BOB])


@pytest.fixture
async def service(tokenizer: Tokenizer) -> Service:
    """After a request of Alice's and one of Bob's."""
    engine = Drafting(ids_of(ANSWER, tokenizer), seed=3)
    service = service_of(engine, Text(tokenizer, SamplingDefaults()))
    async with client_of(service) as client:
        for key in (ALICE, BOB):
            ask = {"prompt": QUESTION if key == ALICE else "Bob", "max_tokens": 60}
            response = await client.post("/v1/completions", json=ask, headers=bearer(key) | {"X-Request-Id": key[3:6]})
            assert response.status == 200
    return service


def client_of(service: Service) -> TestClient:
    return TestClient(TestServer(create_app(alone(service), AuthMiddleware(KEYS))))


async def test_metrics_need_a_key_and_hold_no_text(service: Service) -> None:
    async with client_of(service) as client:
        assert (await client.get("/metrics")).status == 401
        assert (await client.get("/metrics", headers=bearer("sk-eve-0123456789abcdef"))).status == 401
        response = await client.get("/metrics", headers=bearer(BOB))
        text = await response.text()
    assert response.status == 200 and "foresay:generation_tokens_total" in text
    hidden = (QUESTION, ANSWER, "fox", ALICE, BOB, "ali")
    assert [word for word in hidden if word in text] == []


async def test_what_everybody_sees_holds_no_text(service: Service) -> None:
    telemetry = service.telemetry
    for report, kind in ((await telemetry.snapshot(), Snapshot), (telemetry.history(), HistoryReport)):
        encoded = msgspec.json.encode(report)
        decoded = msgspec.json.decode(encoded, type=kind)
        assert msgspec.json.decode(msgspec.json.encode(decoded), type=kind) == decoded
        assert b"fox" not in encoded and QUESTION.encode() not in encoded and b"ali" not in encoded


@contextmanager
def asking(telemetry: Telemetry, tenant: str, id: str) -> Iterator[None]:
    """A request of a key, while it runs."""
    serve(caller=Caller(tenant=tenant))
    with telemetry.watching([chosen(id)]):
        yield


def ids(telemetry: Telemetry, tenant: str) -> list[str]:
    return [entry.id for entry in telemetry.requests(tenant)]


def test_each_key_sees_its_own_and_what_came_last_first() -> None:
    telemetry = Telemetry("toy", Engine(), count(1000.0).__next__)
    with asking(telemetry, "a", "1"), asking(telemetry, "b", "2"):
        with asking(telemetry, "b", "3"):
            pass
        assert (ids(telemetry, "a"), ids(telemetry, "b"), ids(telemetry, "c")) == (["1"], ["3", "2"], [])
    assert ids(telemetry, "b") == ["3", "2"], "by when they came, not by when they ended"


def test_the_oldest_of_a_key_makes_room() -> None:
    telemetry = Telemetry("toy", Engine(), count(1000.0).__next__)
    for tenant, id in [("b", "b"), *(("a", str(number)) for number in range(MOST_PER_TENANT + 3))]:
        with asking(telemetry, tenant, id):
            pass
    assert len(ids(telemetry, "a")) == MOST_PER_TENANT
    assert ids(telemetry, "a")[-1] == "3"
    assert ids(telemetry, "b") == ["b"]
