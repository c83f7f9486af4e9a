"""A model whose engine is not the server's to start or stop: what tests give an application besides a service."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from foresay.server.host.models.model import Model
from foresay.server.host.models.models import Models
from foresay.server.host.service import Service
from foresay.spec.request import EngineInfo, Footprint


class Staying(Model):
    """It is there from the start, and stays."""

    footprint: Footprint | None = None

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def longest(self) -> int | None:
        return None if self.service.engine.info is None else self.service.engine.info.max_model_len

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


def alone(service: Service) -> Models:
    """The models of a server that has this service alone."""
    return Models([Staying(service)])
