"""A page on a server whose answers are written down, and what such a page sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from playwright.async_api import WebSocket

from foresay.server.models.service import Service
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from foresay.spec.trace import StepTrace
from tests.dashboard.browsing import Visit, visiting
from tests.server.scripted import STEP, ScriptedEngine, served

ASK: dict[str, Any] = {"prompt": "Tell me of the fox", "max_tokens": 40, "ignore_eos": True}
#: A race is over when it was measured: a page shows it for 2.5 seconds.
HASTE = {"SHORTEST": 0.1}


@asynccontextmanager
async def shown(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    path: str = "/dashboard",
    defaults: SamplingDefaults | None = None,
    self_check: float = 0.0,
    **context: Any,
) -> AsyncIterator[tuple[Service, Visit]]:
    """The service of an open page. context: of the browser. A race is shown in no more time than it took: what of it
    is to be seen in between is asked with a ``pace`` of the test's own."""
    services: list[Service] = []
    async with (
        served(engine, tokenizer, services.append, defaults, self_check=self_check) as client,
        visiting(
            str(client.make_url("")).rstrip("/"), **{"reduced_motion": "reduce", "pace": HASTE} | context
        ) as visit,
    ):
        await visit.go(path)
        await visit.ready()
        yield services[0], visit


@asynccontextmanager
async def writing(
    text: str,
    tokenizer: Tokenizer,
    defaults: SamplingDefaults | None = None,
    engine: ScriptedEngine | None = None,
    **context: Any,
) -> AsyncIterator[Visit]:
    """The open playground of a server that always writes this text."""
    engine = engine or ScriptedEngine(tokenizer.encode(text), run=3)
    async with shown(engine, tokenizer, "/", defaults, **context) as (_, visit):
        yield visit


def sent(visit: Visit) -> list[dict[str, Any]]:
    """The messages of the page from now on."""
    frames: list[dict[str, Any]] = []

    def opened(socket: WebSocket) -> None:
        socket.on("framesent", lambda frame: frames.append(json.loads(frame)))

    visit.page.on("websocket", opened)
    return frames


async def posted(visit: Visit, path: str = "/v1/completions", **fields: Any) -> Any:
    """The answer of the page's server to a request."""
    async with aiohttp.ClientSession() as session, session.post(visit.url + path, json=ASK | fields) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def step() -> StepTrace:
    """One step of one request: 3 tokens in 10 ms, where a step without drafts takes 9."""
    counted = {"rows": 5, "drafted": 4, "accepted": 2, "emitted": 3, "kept_pages": 10**6}
    return msgspec.structs.replace(STEP, **counted, seconds={"forward": 0.01}, root_seconds=0.009)
