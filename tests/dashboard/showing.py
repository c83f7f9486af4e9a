"""A page on a server whose answers are written down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from foresay.server.host.service import Service
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.trace import StepTrace
from tests.dashboard.browsing import Visit, visiting
from tests.server.scripted import STEP, ScriptedEngine, served

ASK: dict[str, Any] = {"prompt": "Tell me of the fox", "max_tokens": 40, "ignore_eos": True}


@asynccontextmanager
async def shown(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str = "/dashboard", **context: Any
) -> AsyncIterator[tuple[Any, Visit]]:
    """The service of an open page."""
    services: list[Service] = []
    async with (
        served(engine, tokenizer, services.append) as client,
        visiting(str(client.make_url("")).rstrip("/"), **{"reduced_motion": "reduce"} | context) as visit,
    ):
        await visit.go(path)
        await visit.ready()
        yield services[0], visit


async def asked(visit: Visit, path: str = "/v1/completions", **fields: Any) -> Any:
    """Ask the server of the page for something."""
    async with aiohttp.ClientSession() as session, session.post(visit.url + path, json=ASK | fields) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def step(doubt: str = "") -> StepTrace:
    """One step of one request: 3 tokens in 10 ms, where a step without drafts takes 9."""
    counted = {"rows": 5, "drafted": 4, "accepted": 2, "emitted": 3}
    return msgspec.structs.replace(STEP, **counted, seconds={"forward": 0.01}, root_seconds=0.009, doubt=doubt)
