"""One model of a server: its settings, its engine process and its service. Loads and unloads on command."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from foresay.server.engine.generation import EngineStatus
from foresay.server.engine_process.child import Spawned, importing, spawn
from foresay.server.engine_process.client import MOST_STARTS, EngineClient
from foresay.server.engine_process.client_base import Resumed
from foresay.server.models.residency import NoMemory, NotRestored, Resident, log
from foresay.server.models.service import ModelNames, ServerState, Service, Text
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import (
    cached_target,
    check_config,
    check_names,
    choose_draft,
    nothing_to_fetch,
    target_directory,
)
from foresay.spec.errors import ForesayError
from foresay.spec.request import EngineInfo, Footprint
from foresay.verifier.model.config import ModelConfig

if TYPE_CHECKING:
    from foresay.server.replicas.fleet import Fleet

T = TypeVar("T")


class Model(Resident):
    """Its name is what clients call it. A single model starts with the server.

    names: what clients call it; responses use the first. on_status: called with every change of its engine's status.
    spawn: starts its engine process.
    """

    def __init__(
        self,
        names: Sequence[str],
        config: ServeConfig,
        server: ServerState,
        on_status: Callable[[EngineStatus], None],
        spawn: Callable[[], Spawned] = spawn,
    ) -> None:
        engine: EngineClient | Fleet
        engine = EngineClient(config, spawn) if config.replicas is None else _fleet(config, config.replicas)
        self.engine, self._on_status = engine, on_status
        self.service = Service(engine, config, ModelNames(tuple(names), config.any_model_name), server=server)
        super().__init__(self.service.names.own)
        engine.observe, engine.observe_status = self.service.telemetry.step, [self._changed]
        if not isinstance(engine, EngineClient):
            self.service.telemetry.replicas = engine.loads

    def _changed(self, status: EngineStatus) -> None:
        self.service.telemetry.see(status)
        self._on_status(status)

    # -- other settings ------------------------------------------------------------------------------------------

    async def reload(self, config: ServeConfig, text: Text, reserved: dict[str, int]) -> Resumed:
        """Run with other settings; if that cannot be, with the earlier ones again, and raise why. text: of these
        settings. reserved: see :meth:`load`."""
        assert isinstance(self.engine, EngineClient), "replicas are replaced one by one"
        try:
            resumed = await self.engine.reload(config, reserved)
        except Exception as error:
            known = isinstance(error, ForesayError)
            if known and self.engine.status.state == "ready":
                raise
            await self.engine.unload(str(error))
            raise NotRestored(str(error)) if known else error from None
        self.service.config, self.service.text, self.service.known_length = config, text, None
        if self.engine.info is None:
            with contextlib.suppress(ForesayError):
                await self.look()
        return resumed

    async def roll(self, config: ServeConfig, text: Text) -> Resumed:
        """Replace all replicas; see :meth:`Fleet.replace`."""
        assert not isinstance(self.engine, EngineClient), "one engine is stopped first"
        moved = await self.engine.replace(config)
        self.service.config, self.service.text = config, text
        return Resumed(moved, None)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def footprint(self) -> Footprint | None:
        return self.engine.footprint

    async def prepare(self) -> None:
        """Download missing files, and read the tokenizer; only the first time."""
        await self._have_text(self.read)

    async def read(self, config: ServeConfig) -> Text:
        """Check what can be checked of these settings without an engine, download what is missing, and read the
        tokenizer."""
        await _in_thread(fetch, config)
        return await self._read_text(config)

    async def look(self) -> None:
        """Read what the local files say before it is loaded."""
        async with self.service.server.reading:
            self.service.known_length = await _in_thread(longest_here, self.service.config)

    async def peek(self) -> None:
        """Read tokenizer and template if that needs no download."""
        if self.service.text is None and await _in_thread(cached_target, self.service.config) is not None:
            await self._have_text(self._read_text)

    async def _have_text(self, read: Callable[[ServeConfig], Awaitable[Text]]) -> None:
        """Read tokenizer and template unless they are there; again if the settings change meanwhile."""
        while self.service.text is None:
            text = await read(config := self.service.config)
            if self.service.config is config:
                self.service.text = text

    async def _read_text(self, config: ServeConfig) -> Text:
        async with self.service.server.reading:
            text = await _in_thread(Text.load, config)
            gc.freeze()  # it stays; no collection before it, which would stall other streams
            return text

    async def start(self) -> None:
        """Start loading at server start; returns at once."""
        await self.engine.start()

    async def arrived(self, starts: int | None = None) -> EngineInfo:
        """Wait for tokenizer and engine; the engine's info. starts: see :meth:`EngineClient.until_ready`."""
        _, info = await asyncio.gather(self._have_text(self._read_text), self.engine.until_ready(starts))
        return info

    async def until_ended(self) -> NoReturn:
        """Wait until there will be no engine, and raise why."""
        await self.engine.until_ended()

    async def load(self, reserved: dict[str, int]) -> None:
        began = time.monotonic()
        log.info("%s: loading", self.name)
        await self.engine.start(reserved)
        try:
            await self.arrived(MOST_STARTS)
        except ForesayError as error:
            lacks_memory = self.engine.lacks_memory
            await self.engine.unload("" if lacks_memory else str(error))
            raise NoMemory(str(error)) if lacks_memory else error from None
        log.info("%s: loaded in %.1f s", self.name, time.monotonic() - began)

    async def unload(self) -> None:
        await self.engine.unload()

    @property
    def info(self) -> EngineInfo | None:
        """The info of the engine, current or last; None if never loaded."""
        return self.service.engine.info

    @property
    def running(self) -> EngineInfo | None:
        """The info of the running engine; None while it is not loaded."""
        return self.info if self.service.engine.status.state == "ready" else None

    @property
    def target(self) -> str:
        """The target's name in the settings."""
        return self.service.config.target if self.info is None else self.info.target

    @property
    def status(self) -> str:
        """Its state in one word."""
        if self.service.server.draining:
            return "draining"
        if self.failure is not None:
            return "failed"
        return "ok" if self.service.refusal() is None else self.service.engine.status.state

    @property
    def message(self) -> str:
        """Details of its state; may be empty."""
        failure = self.failure
        return self.service.engine.status.message if failure is None else failure

    @property
    def is_well(self) -> bool:
        """Whether it runs, or will when requested."""
        ready = self.service.engine.status.state == "ready"
        return ready or (not self.loaded and self.failure is None)


def _fleet(config: ServeConfig, replicas: str) -> Fleet:
    from foresay.server.replicas.cluster_process import ClusterProcess
    from foresay.server.replicas.fleet import Fleet

    return Fleet(config, ClusterProcess(replicas, config.ray_address))


async def _in_thread(read: Callable[[ServeConfig], T], config: ServeConfig) -> T:
    """Call ``read`` in a thread; its exceptions become :class:`ForesayError`."""
    try:
        return await asyncio.to_thread(read, config)
    except (ForesayError, asyncio.CancelledError):
        raise
    except Exception as error:  # the system or the tokenizer library cannot read the files
        raise ForesayError(f"its files cannot be read ({type(error).__name__}: {error})") from error


def longest_here(config: ServeConfig) -> int | None:
    """The context length from settings or local files; None if they do not say."""
    directory = cached_target(config)
    if config.max_model_len is not None or directory is None:
        return config.max_model_len
    with contextlib.suppress(ForesayError):
        return ModelConfig.from_directory(directory).max_positions
    return None


def fetch(config: ServeConfig) -> None:
    """Download what the settings name and is missing locally; nothing else waits for it. Raises what
    :func:`~foresay.server.settings.resolved.check_names` and :func:`~foresay.server.settings.resolved.check_config`
    raise."""
    check_names(config)
    if check_config(config) is not None and nothing_to_fetch(choose_draft(config).value):
        return
    with importing:
        from foresay.server.engine.drafters.registry import drafts  # imports the drafters, and so torch
    target_directory(config)
    draft = choose_draft(config).value
    if not nothing_to_fetch(draft):
        drafts(config, draft)
