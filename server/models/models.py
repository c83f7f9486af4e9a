"""The models of a server by name: lookup, and the leases by which routes hold a model."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NoReturn

from aiohttp import web

from foresay.server.engine.generation import EngineStatus
from foresay.server.engine_process.child import Spawned, spawn
from foresay.server.engine_process.client import EngineClient
from foresay.server.engine_process.client_base import Resumed
from foresay.server.gateway.keys import CONTEXT
from foresay.server.metrics.exposition import Exposition
from foresay.server.models.model import Model
from foresay.server.models.residency import Keep, Lease, Residency
from foresay.server.models.service import ServerState, Service
from foresay.server.schemas.bounds import largest_body
from foresay.server.schemas.errors import ModelNotFound, Unavailable
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import model_names
from foresay.spec.errors import ForesayError, InvalidRequest
from foresay.spec.request import EngineInfo


class Models:
    """The models of one server, the first one first.

    several: whether they have names and are loaded on request; a single model is loaded at the start.
    keep: seconds that each stays loaded without a request; None: for ever. most: that may be loaded at once.
    """

    def __init__(
        self, models: Sequence[Model], several: bool = False, keep: float | None = None, most: int | None = None
    ) -> None:
        self.several = several
        for model in models:
            model.enter(keep, "out" if several else "in")
        self._entries = {model.name: model for model in models}
        self.residency = Residency(models, most)
        self.exposition = Exposition(*[entry.service.telemetry for entry in self])
        #: The running or last change to other settings, by the model's name.
        self.reloading: dict[str, asyncio.Task[Resumed]] = {}
        self._running: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    def of(
        cls, config: ServeConfig, on_status: Callable[[EngineStatus], None], spawn: Callable[[], Spawned] = spawn
    ) -> Models:
        """The models that the settings name. on_status: called with every change of an engine's status. spawn: starts
        the engine processes."""
        server = ServerState()
        server.body_timeout = config.body_timeout
        named: list[tuple[Sequence[str], ServeConfig]] = [((name,), one) for name, one in config.models.items()]
        named = named or [(model_names(config), config)]
        models = [Model(names, one, server, on_status, spawn) for names, one in named]
        return cls(models, bool(config.models), config.idle_seconds, config.max_loaded_models)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._entries.values())

    @property
    def first(self) -> Model:
        """The only one, or the first that the settings name."""
        return next(iter(self))

    @property
    def server(self) -> ServerState:
        """What all models share."""
        return self.first.service.server

    @property
    def largest_body(self) -> int:
        """Most bytes of a body or a WebSocket message, for any model."""
        services = [entry.service for entry in self]
        return max(one.config.max_body_bytes or largest_body(one.longest or 0) for one in services)

    # -- names ---------------------------------------------------------------------------------------------------

    def find(self, name: str | None) -> Model:
        """The model that a request names, with or without Ollama's tag; the first one for any other name if any name is
        accepted. Raises :class:`ModelNotFound` if there is none.
        """
        if name is None and not self.several:
            return self.first
        found = None if name is None else next((one for one in self if one.service.names.has(name)), None)
        if found is not None:
            return found
        if self.first.service.names.any:
            return self.first
        if name is None:
            raise InvalidRequest("model", f" is required; this server has {self._listed()}")
        raise ModelNotFound(f"The model {name!r} was not found; this server has {self._listed()}")

    def chosen(self, name: str | None) -> Model:
        """The named model; the first one without a name."""
        return self.first if name is None else self.find(name)

    def _listed(self) -> str:
        return " or ".join(repr(name) for entry in self for name in entry.service.names.known)

    # -- requests ------------------------------------------------------------------------------------------------

    def forget(self, entry: Model) -> None:
        """Unload a model as soon as it is idle, unless other keys share it."""
        if CONTEXT.get().caller.alone:
            self.residency.forget(entry)

    def check_open(self) -> None:
        """Raise :class:`~foresay.server.schemas.errors.Unavailable` if no request is taken, before reading its body."""
        if (refusal := self.server.refusal() if self.several else self._refusal(self.first)) is not None:
            raise refusal

    def _refusal(self, entry: Model) -> Unavailable | None:
        """Why requests for it are refused now; None if they are taken, even if they must wait."""
        return entry.service.refusal() if entry.loaded else self.server.refusal()

    @asynccontextmanager
    async def lease(self, name: str | None, keep: Keep = "usual") -> AsyncIterator[Service]:
        """The service of the model that a request names. The model stays loaded until its engine is done with the
        request, or the context ends; a request for one that is not loaded waits. From here on the request is accepted:
        if its engine dies while it is prepared, it runs in the next one.

        keep: how long the model stays loaded afterwards; ignored if there are several keys, which share it.
        """
        entry = self.find(name)
        if (refusal := self._refusal(entry)) is not None:
            raise refusal
        with await self._leased(entry, keep if CONTEXT.get().caller.alone else "usual") as lease:
            yield entry.service.leased(lease)

    @asynccontextmanager
    async def reading(self, name: str | None) -> AsyncIterator[Service]:
        """As :meth:`lease`, for requests that run no inference: a model that was once loaded is not loaded for them."""
        entry = self.find(name)
        if entry.service.known:
            yield entry.service
            return
        async with self.lease(name) as service:
            yield service

    async def _leased(self, entry: Model, keep: Keep) -> Lease:
        """Lease the model, and record how long that took. A waiting request counts against the queue limit."""
        if entry.loaded:
            return await self.residency.lease(entry, keep)
        began = time.monotonic()
        with entry.service.arriving():
            lease = await self.residency.lease(entry, keep)
        lease.waited = time.monotonic() - began
        return lease

    # -- life ----------------------------------------------------------------------------------------------------

    async def life(self, app: web.Application) -> AsyncIterator[None]:
        """Load and unload while the server runs."""
        self._running = asyncio.create_task(self.residency.run())
        yield
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def reload(self, entry: Model, config: ServeConfig, moves: bool) -> Resumed:
        """Replace a model's engine by one with other settings; new requests wait meanwhile.

        moves: running ones go on in the next engine; else, since that has another model, they end in this one first.
        Raises :class:`ForesayError` if it does not become ready: then the earlier settings hold."""
        text = await entry.read(config)
        if not isinstance(entry.engine, EngineClient):
            return await entry.roll(config, text)
        return await self.residency.reload(entry, partial(entry.reload, config, text), moves)

    async def start(self) -> None:
        """Start loading the single model, or inspecting the files of several; returns at once."""
        if self.several:
            self._looking = asyncio.create_task(self._look())
        else:
            await self.first.start()

    async def _look(self) -> None:
        for entry in self:
            with contextlib.suppress(ForesayError):
                await entry.look()

    async def arrived(self) -> EngineInfo | None:
        """Wait for the model loaded at the start; its info, None if there is none."""
        if self.several:
            return None
        info = await self.first.arrived()
        gc.collect()
        gc.freeze()  # what was loaded stays; a full collection would traverse all of it while streams wait
        self.residency.arrived(self.first)
        return info

    async def until_ended(self) -> NoReturn:
        """Wait until a task that the server depends on ends, and raise why."""
        assert self._running is not None, "the application was started"
        waits = [self._running] if self.several else [self._running, asyncio.create_task(self.first.until_ended())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in waits[1:]:
                task.cancel()
        raise AssertionError("neither ends but with an error")

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish for ``seconds``, then end them with an error. Those that wait
        for a model have not started and fail at once."""
        self.server.draining = True
        self.residency.close()
        await asyncio.gather(*[entry.service.drain(seconds) for entry in self])

    async def stop(self) -> None:
        """End all engines; requests still running fail."""
        tasks = [task for task in (*self.reloading.values(), self._running, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*[resident.unload() for resident in self.residency.residents])


#: The models that an application serves.
MODELS: web.AppKey[Models] = web.AppKey("models", Models)
