"""A page whose server always writes the same text, and what such a page asks for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import WebSocket

from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from tests.dashboard.browsing import Visit, visiting
from tests.server.scripted import ScriptedEngine, served


def sent(visit: Visit) -> list[dict[str, Any]]:
    """What the page asks for from now on."""
    frames: list[dict[str, Any]] = []

    def opened(socket: WebSocket) -> None:
        socket.on("framesent", lambda frame: frames.append(json.loads(frame)))

    visit.page.on("websocket", opened)
    return frames


@asynccontextmanager
async def writing(
    text: str,
    tokenizer: Tokenizer,
    defaults: SamplingDefaults | None = None,
    pause: float = 0.0,
    engine: ScriptedEngine | None = None,
    **context: Any,
) -> AsyncIterator[Visit]:
    """The open page of a server that always writes this text, a step every ``pause`` seconds."""
    engine = engine or ScriptedEngine(tokenizer.encode(text), run=3, pause=pause)
    async with (
        served(engine, tokenizer, defaults=defaults) as client,
        visiting(str(client.make_url("")).rstrip("/"), **context) as visit,
    ):
        await visit.go()
        await visit.ready()
        yield visit
