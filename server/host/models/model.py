"""One model of a server: its settings, its engine process and its service. Loads and unloads as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, NoReturn, TypeVar

from foresay.server.engine.generation import EngineStatus
from foresay.server.host.child import Spawned, spawn
from foresay.server.host.client import EngineClient
from foresay.server.host.imports import importing
from foresay.server.host.models.residency import log
from foresay.server.host.models.resident import NoPlace
from foresay.server.host.replacement import Progress
from foresay.server.host.service import Service, Text
from foresay.server.host.state import ServerState
from foresay.server.schemas.bounds import largest_body
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import Names, cached_target, choose_draft, nothing_to_fetch, target_directory
from foresay.spec.errors import ForesayError
from foresay.spec.request import EngineInfo, Footprint
from foresay.verifier.model.config import ModelConfig

if TYPE_CHECKING:
    from foresay.server.host.replicas.fleet import Fleet

T = TypeVar("T")

#: So many engine processes may end while a model is loaded for requests that wait, before these are told.
MOST_STARTS = 3


class Model:
    """A :class:`~foresay.server.host.models.resident.Loadable` with its service; one alone is started with the server.

    names: what clients call it, the first one for answers. on_status: told of every change of its engine's status.
    spawn: starts its engine process. reloading: the change to other settings that goes on, or was the last; it is
    finished whether or not the client that asked for it is still there.
    """

    reloading: asyncio.Task[int] | None = None

    def __init__(
        self,
        names: Sequence[str],
        config: ServeConfig,
        server: ServerState,
        on_status: Callable[[EngineStatus], None],
        spawn: Callable[[], Spawned] = spawn,
    ) -> None:
        self._spawn = spawn
        self.engine: EngineClient | Fleet
        self.engine = EngineClient(config, spawn) if config.replicas is None else _fleet(config, config.replicas)
        self.service = Service(self.engine, config, Names(tuple(names), config.any_model_name), server=server)
        telemetry = self.service.telemetry
        self.engine.observe, self.engine.observe_shadow = telemetry.step, telemetry.shadowed
        if not isinstance(self.engine, EngineClient):
            telemetry.replicas = self.engine.loads
        self.engine.observe_status = [telemetry.startup.see, on_status]
        self._longest: int | None = None

    def successor(self, config: ServeConfig) -> Model:
        """Another model for the requests that come to this one, once it takes over; then both count as one."""
        other, telemetry = copy(self), self.service.telemetry
        other.engine = engine = EngineClient(config, self._spawn)
        engine.status = EngineStatus("unloaded", starts=self.engine.status.starts)
        engine.observe, engine.observe_shadow = telemetry.count, telemetry.shadowed
        engine.observe_status = [telemetry.startup.count]
        other._longest = None
        other.service = self.service.successor(engine, config)
        return other

    def take_over(self, before: Model) -> None:
        """Requests come to this one from now on. Those of the one before end there."""
        self.engine.observe, before.engine.observe = before.engine.observe, self.engine.observe
        self.engine.watched_as(before.engine)
        self.service.take_over()

    @contextmanager
    def telling(self, told: Callable[[EngineStatus], None]) -> Iterator[None]:
        """Meanwhile tell of every change of its engine's status."""
        observers = self.engine.observe_status
        observers.append(told)
        try:
            yield
        finally:
            observers.remove(told)

    @property
    def config(self) -> ServeConfig:
        """Its settings."""
        return self.service.config

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.service.names.own

    @property
    def footprint(self) -> Footprint | None:
        """What it holds when it is loaded; None until that was planned once."""
        return self.engine.footprint

    async def prepare(self) -> None:
        """Download what is not here, and read the tokenizer. The first time only."""
        if self.service.text is None:
            async with self.service.server.reading:
                await asyncio.to_thread(_import)
            await _beside(fetch, self.config)
            await self._read_text()

    async def look(self) -> None:
        """See what its files tell before it is loaded, as far as they are here."""
        async with self.service.server.reading:
            self._longest = await _beside(longest_here, self.config)
        self.service.server.allow_bodies(largest_body(self._longest or 0))

    async def peek(self) -> None:
        """Read its text if that needs no download."""
        if self.service.text is None and await _beside(is_here, self.config):
            await self._read_text()

    async def _read_text(self) -> None:
        async with self.service.server.reading:
            if self.service.text is None:
                self.service.text = await _beside(Text.load, self.config)
                gc.freeze()  # it stays; no collection before it, which would hold up the streams of others

    async def replace(self, config: ServeConfig, tell: Progress, changed: bool) -> int:
        """Go on in an engine of these settings; see :meth:`EngineClient.replace`. changed: it has other files."""
        text = await _beside(Text.load, config) if changed else self.service.text
        moved = await self.engine.replace(config, tell, changed)
        self.become(config, text)
        return moved

    def become(self, config: ServeConfig, text: Text | None) -> None:
        """These are the settings and the text from now on; clients call it as before."""
        self.service.config, self.service.text = config, text
        self.service.places.most = config.most_running
        self.engine.configure(config)

    async def start(self) -> None:
        """Begin to load it at the start of the server; returns at once."""
        await self.engine.start()

    async def arrived(self, starts: int | None = None) -> EngineInfo:
        """What runs, once tokenizer and engine are there. starts: see :meth:`EngineClient.until_ready`."""
        _, info = await asyncio.gather(self._read_text(), self.engine.until_ready(starts))
        self.service.server.allow_bodies(self.service.largest_body)
        return info

    async def until_ended(self) -> NoReturn:
        """Wait until there will be no engine any more, and raise why."""
        await self.engine.until_ended()

    async def load(self, beside: dict[str, int]) -> None:
        """Start the engine and wait until it is ready; see :class:`~foresay.server.host.models.resident.Loadable`."""
        began = time.monotonic()
        log.info("%s: loading", self.name)
        await self.engine.start(beside)
        try:
            await self.arrived(MOST_STARTS)
        except ForesayError as error:
            lacks_room = self.engine.lacks_room
            await self.engine.unload("" if lacks_room else str(error))
            raise NoPlace(str(error)) if lacks_room else error from None
        log.info("%s: loaded in %.1f s", self.name, time.monotonic() - began)

    async def unload(self) -> None:
        """End the engine; all it held is free then."""
        await self.engine.unload()

    @property
    def longest(self) -> int | None:
        """The longest text, as the engine said, else as its files do; None if nobody knows."""
        return self._longest if self.engine.info is None else self.engine.info.max_model_len


def _fleet(config: ServeConfig, replicas: str) -> Fleet:
    from foresay.server.host.replicas.cluster_process import ClusterProcess
    from foresay.server.host.replicas.fleet import Fleet

    return Fleet(config, ClusterProcess(replicas, config.ray_address))


async def _beside(read: Callable[[ServeConfig], T], config: ServeConfig) -> T:
    """What ``read`` makes of the files, in a thread; whatever it raises as a :class:`ForesayError`."""
    try:
        return await asyncio.to_thread(read, config)
    except (ForesayError, asyncio.CancelledError):
        raise
    except Exception as error:  # of the system's or of the tokenizer's library, about what the files hold
        raise ForesayError(f"its files cannot be read ({type(error).__name__}: {error})") from error


def _import() -> None:
    """Whatever :func:`fetch` needs, by one thread at a time."""
    import foresay.server.engine.build  # noqa: F401


def is_here(config: ServeConfig) -> bool:
    """Whether nothing has to be downloaded to read the target's text."""
    return cached_target(config) is not None


def longest_here(config: ServeConfig) -> int | None:
    """The longest text, as far as settings and files that are here tell; None if they do not."""
    directory = cached_target(config)
    if config.max_model_len is not None or directory is None:
        return config.max_model_len
    with contextlib.suppress(ForesayError):
        return ModelConfig.from_directory(directory).max_positions
    return None


def fetch(config: ServeConfig) -> None:
    """Download what the settings name and is not here: while a model is downloaded nobody else has to wait."""
    target_directory(config)
    draft = choose_draft(config).value
    if not nothing_to_fetch(draft):
        with importing:
            from foresay.server.engine.drafters.registry import drafts  # knows the drafters, and with them torch
        drafts(config, draft)
