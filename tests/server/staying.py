"""A model whose engine is not the server's to start or stop: what tests give an application besides a service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

from foresay.server.engine.generation import ServedEngine
from foresay.server.models.model import Model
from foresay.server.models.models import Models
from foresay.server.models.residency import Resident
from foresay.server.models.service import ModelNames, ServerState, Service, Text
from foresay.server.settings.config import ServeConfig
from foresay.spec.request import EngineInfo, Footprint


class Staying(Model):
    """It is there from the start, and stays."""

    footprint: Footprint | None = None

    def __init__(self, service: Service) -> None:
        Resident.__init__(self, service.names.own)
        self.service = service

    async def prepare(self) -> None: ...

    async def load(self, beside: dict[str, int]) -> None: ...

    async def unload(self) -> None: ...

    async def look(self) -> None: ...

    async def peek(self) -> None: ...

    async def start(self) -> None: ...

    async def arrived(self, starts: int | None = None) -> EngineInfo | None:  # type: ignore[override]
        return self.service.engine.info

    async def until_ended(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def service_of(
    engine: ServedEngine,
    text: Text | None = None,
    server: ServerState | None = None,
    *,
    model: str = "toy",
    aliases: Sequence[str] = (),
    any_model: bool = False,
    most_running: int | None = None,
    ping_seconds: float = Service.ping_seconds,
    most_pending_tokens: int = Service.most_pending_tokens,
    **settings: Any,
) -> Service:
    """A service called ``toy``. most_running: requests that run and wait. settings: of a server."""
    if most_running is not None:
        settings |= {"max_seqs": 1, "max_queue": most_running - 1}
    service = Service(engine, ServeConfig(**settings), ModelNames((model, *aliases), any_model), text, server)
    service.ping_seconds, service.most_pending_tokens = ping_seconds, most_pending_tokens
    return service


def alone(service: Service) -> Models:
    """The models of a server that has this service alone."""
    return Models([Staying(service)])
