"""One model of a server: its settings, its engine process and its service. Loads and unloads as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from typing import NoReturn

from server.config import ServeConfig
from server.engine_client import EngineClient
from server.models.residency import NoPlace, log
from server.server_state import ServerState
from server.service import Service, ServiceOptions, Text
from spec.errors import ForesayError
from spec.request import EngineInfo, Footprint
from verifier.model.config import ModelConfig
from verifier.model.hub import cached

#: So many engine processes may end while a model is loaded for requests that wait, before these are told.
MOST_STARTS = 3


class Model:
    """A :class:`~server.models.residency.Loadable`. name: what clients call it."""

    def __init__(self, name: str, config: ServeConfig, server: ServerState) -> None:
        self.config = config
        self.engine = EngineClient(config)
        self.service = Service(self.engine, ServiceOptions.of(config, name), server=server)
        telemetry = self.service.telemetry
        self.engine.observe, self.engine.observe_shadow = telemetry.step, telemetry.shadowed
        self.engine.observe_status = telemetry.startup.see

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.service.options.model

    @property
    def footprint(self) -> Footprint | None:
        """What it holds when it is loaded; None until that was planned once."""
        return self.engine.footprint

    async def prepare(self) -> None:
        """Download what is not here, and read the tokenizer. The first time only."""
        if self.service.text is None:
            await asyncio.to_thread(fetch, self.config)
            await self.read_text()

    async def read_text(self) -> None:
        """Read what the checkpoint says about text, if that is not done."""
        async with self.service.server.reading:
            if self.service.text is None:
                self.service.text = await self._text()

    async def _text(self) -> Text:
        try:
            text = await asyncio.to_thread(Text.load, self.config)
        except (ForesayError, asyncio.CancelledError):
            raise
        except Exception as error:  # of the tokenizer's library, about what the files hold
            raise ForesayError(f"its tokenizer cannot be read ({type(error).__name__}: {error})") from error
        gc.freeze()  # it stays; no collection before it, which would hold up the streams of others
        return text

    async def start(self) -> None:
        """Begin to load it at the start of the server; returns at once."""
        await self.engine.start()

    async def arrived(self, starts: int | None = None) -> EngineInfo:
        """What runs, once tokenizer and engine are there. starts: see :meth:`EngineClient.until_ready`."""
        _, info = await asyncio.gather(self.read_text(), self.engine.until_ready(starts))
        self.service.server.allow_bodies(self.service.largest_body)
        return info

    async def until_ended(self) -> NoReturn:
        """Wait until there will be no engine any more, and raise why."""
        await self.engine.until_ended()

    async def load(self, beside: dict[str, int]) -> None:
        """Start the engine and wait until it is ready; see :class:`~server.models.residency.Loadable`."""
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
    def is_here(self) -> bool:
        """Whether nothing has to be downloaded to read its text."""
        return self.config.target == "bundled" or cached(self.config.target) is not None

    @property
    def longest(self) -> int | None:
        """The longest text, as the engine said, or as far as the files that are here tell; None if nobody knows."""
        if self.engine.info is not None:
            return self.engine.info.max_model_len
        if self.config.max_model_len is not None:
            return self.config.max_model_len
        with contextlib.suppress(ForesayError):
            directory = cached(self.config.target)
            return None if directory is None else ModelConfig.from_directory(directory).max_positions
        return None


def fetch(config: ServeConfig) -> None:
    """Download what the settings name and is not here: while a model is downloaded nobody else has to wait."""
    from server.build import choose_draft, target_directory
    from server.drafting import Drafts

    target_directory(config)
    Drafts.of(config, choose_draft(config).value)
