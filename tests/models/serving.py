"""A server of models whose engines are scripted, and which come and go as those of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from foresay.server.engine.generation import EngineStatus
from foresay.server.http.app import create_app
from foresay.server.http.auth import AuthMiddleware
from foresay.server.models.models import Models
from foresay.server.models.service import ServerState, Text
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from foresay.spec.errors import ForesayError
from foresay.spec.request import Footprint
from tests.server.scripted import END, INFO, ScriptedEngine
from tests.server.staying import Staying, service_of


class ComingModel(Staying):
    """A served model that says ``text``. gate: loading waits until it is set. wrong: why it cannot be loaded. loads,
    unloads: so often."""

    engine: ScriptedEngine  # type: ignore[assignment]

    def __init__(self, name: str, tokenizer: Tokenizer, server: ServerState, text: str, **options: Any) -> None:
        self.engine = ScriptedEngine([*tokenizer.encode(text, False), END])
        self.engine.status, self.engine.info = EngineStatus("unloaded"), None
        self._read = Text(tokenizer, SamplingDefaults(), ChatFormat.of(tokenizer))
        settings = {"model": name, "target": f"/models/{name}", **options}
        super().__init__(service_of(self.engine, server=server, **settings))
        self.footprint: Footprint | None = None
        self.gate, self.wrong = asyncio.Event(), ""
        self.gate.set()
        self.loads = self.unloads = 0

    async def prepare(self) -> None:
        await self.peek()

    async def peek(self) -> None:
        self.service.text = self._read

    async def load(self, beside: dict[str, int]) -> None:
        self.engine.status = EngineStatus("loading", "loading the target")
        await self.gate.wait()
        if self.wrong:
            self.engine.status = EngineStatus("unloaded", self.wrong)
            raise ForesayError(self.wrong)
        self.loads += 1
        self.engine.info, self.engine.status = INFO, EngineStatus("ready")

    async def unload(self) -> None:
        self.unloads += 1
        self.engine.status = EngineStatus("unloaded")

    async def start(self) -> None:
        await self.load({})
        await self.peek()


class Serving:
    """A running server: its client and its models by name."""

    def __init__(self, client: TestClient, models: Models, by_name: dict[str, ComingModel]) -> None:
        self.client, self.models, self.by_name = client, models, by_name

    @property
    def loads(self) -> dict[str, int]:
        return {name: model.loads for name, model in self.by_name.items()}

    async def json(self, path: str, status: int = 200, **fields: Any) -> Any:
        """The answer to a body, or to a GET without one."""
        response = await (self.client.post(path, json=fields) if fields else self.client.get(path))
        body = await response.json()
        assert response.status == status, body
        return body

    async def settle(self, name: str, state: str) -> None:
        """Until the model stands so."""
        async with asyncio.timeout(60):
            while self.models.find(name).state != state:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer,
    texts: dict[str, str],
    most: int | None = 1,
    keep: float | None = None,
    auth: AuthMiddleware | None = None,
    **options: Any,
) -> AsyncIterator[Serving]:
    """Several models, each of which says its text; one model alone is loaded from the start, as with ``serve``."""
    state = ServerState()
    by_name = {name: ComingModel(name, tokenizer, state, text, **options) for name, text in texts.items()}
    several = len(texts) > 1
    models = Models(list(by_name.values()), several, keep, most if several else None)
    async with TestClient(TestServer(create_app(models, auth))) as client:
        await models.start()
        await models.arrived()
        yield Serving(client, models, by_name)
