"""What a server has of a model: its service, and how it comes and goes; and a model that always stays."""

from __future__ import annotations

import asyncio
from typing import NoReturn, Protocol

from server.host.models.resident import Loadable
from server.host.service import Service
from spec.request import EngineInfo, Footprint


class Served(Loadable, Protocol):
    """A model with its service. Those of a server that has one model alone are started with it."""

    @property
    def service(self) -> Service:
        """What the routes ask."""
        ...

    @property
    def longest(self) -> int | None:
        """The longest text, prompt and output together; None if nobody knows yet."""
        ...

    async def look(self) -> None:
        """See what its files tell before it is loaded, as far as they are here."""
        ...

    async def peek(self) -> None:
        """Read its text, if that needs neither loading nor a download."""
        ...

    async def start(self) -> None:
        """Begin to load it with the server; returns at once."""
        ...

    async def arrived(self) -> EngineInfo | None:
        """What runs, once it is loaded. Raises a :class:`ForesayError` if it never will be."""
        ...

    async def until_ended(self) -> NoReturn:
        """Wait until there will be no engine any more, and raise why."""
        ...


class Staying:
    """A model whose engine is not ours to start or stop."""

    footprint: Footprint | None = None

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def longest(self) -> int | None:
        """As its engine says."""
        return None if self.service.engine.info is None else self.service.engine.info.max_model_len

    async def prepare(self) -> None:
        """It is there."""

    async def load(self, beside: dict[str, int]) -> None:
        """It is there."""

    async def unload(self) -> None:
        """It stays."""

    async def look(self) -> None:
        """It is loaded."""

    async def peek(self) -> None:
        """It was read."""

    async def start(self) -> None:
        """It was started."""

    async def arrived(self) -> EngineInfo | None:
        """What runs."""
        return self.service.engine.info

    async def until_ended(self) -> NoReturn:
        """Never."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")
