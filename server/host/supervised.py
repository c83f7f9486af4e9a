"""Something that is started, waited for, watched and ended: an engine process, or several engines that are one."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn

from server.engine.generation import EngineStatus
from server.host import frames
from server.host.resumption import AGAIN
from server.schemas.errors import EngineFailed
from spec.errors import ConfigurationError, ForesayError
from spec.request import EngineInfo, Footprint

log = logging.getLogger("foresay.server")


class Supervised(ABC):
    """One task, the supervisor, has it run; what that finds out is the status.

    info: of the engine that was ready last. footprint: of the one that was planned last. observe_status: told of every
    change; must not block.
    """

    def __init__(self) -> None:
        self.status = EngineStatus("unloaded")
        self.info: EngineInfo | None = None
        self.footprint: Footprint | None = None
        self.observe_status: list[Callable[[EngineStatus], None]] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._over: asyncio.Future[NoReturn] | None = None
        self._changed = asyncio.Event()
        self._failure: frames.Failed | None = None
        self._broken = False  # nobody watches over it

    @abstractmethod
    async def _supervise(self) -> None:
        """Have it run until cancelled; returns where that will never be."""

    @abstractmethod
    def _fail(self, error: Callable[[], Exception]) -> None:
        """There will be no engine: end all requests."""

    @abstractmethod
    async def stop(self) -> None:
        """End it; requests still running fail."""

    def _begin(self, message: str) -> None:
        """Start the supervisor. message: what goes on first."""
        self._broken = False
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        # Before the task has its first turn: nobody may take what was left for what is coming.
        self._set(EngineStatus("loading", message, starts=self.status.starts))
        self._supervisor = asyncio.create_task(self._supervise())
        self._supervisor.add_done_callback(self._supervision_ended)

    async def _cease(self) -> None:
        """End the supervisor."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None

    async def unload(self, why: str = "") -> None:
        """End it, which frees all it holds, until it is started again. why: if something went wrong."""
        await self.stop()
        self._set(EngineStatus("unloaded", why, starts=self.status.starts))

    @property
    def lacks_room(self) -> bool:
        """Whether it failed for nothing but others that were there."""
        return self._failure is not None and self._failure.footprint is not None

    async def until_ready(self, starts: int | None = None) -> EngineInfo:
        """Wait for the engine; :class:`ForesayError` if it will never come (:class:`ConfigurationError` if settings are
        wrong), or if so many engine processes ended without having been ready."""
        last = None if starts is None else self.status.starts + starts
        while True:
            if self.status.state == "ready" and self.info is not None:
                return self.info
            lost = self.status.cause is not None and last is not None and self.status.starts >= last
            if self.status.state == "failed" or lost:
                raise self._given_up()
            self._changed.clear()
            await self._changed.wait()

    async def until_ended(self) -> NoReturn:
        """Wait for the end of the supervision, and raise why: that there will be no engine, or what should not have
        happened. An engine that was ready once and cannot be loaded again is no end."""
        assert self._over is not None, "it was started"
        await asyncio.shield(self._over)
        raise AssertionError("it only ever ends with an error")

    def _supervision_ended(self, supervisor: asyncio.Task[None]) -> None:
        assert self._over is not None, "it was started"
        if supervisor.cancelled():
            return
        error = supervisor.exception()
        if error is not None:
            self._broken = True
            log.critical("nobody watches over the engine any more", exc_info=error)
            message = f"the supervision of the engine ended ({type(error).__name__}: {error})"
            self._set(EngineStatus("failed", message, starts=self.status.starts))
        self._fail(lambda: EngineFailed(f"{self.status.message}; {AGAIN}"))
        if (self._broken or self.info is None) and not self._over.done():
            self._over.set_exception(self._given_up())
            self._over.exception()  # there may be nobody who waits for it

    def _given_up(self) -> ForesayError:
        """Why there is no engine."""
        usage = not self._broken and self._failure is not None and self._failure.usage
        return (ConfigurationError if usage else ForesayError)(self.status.message)

    def _set(self, status: EngineStatus) -> None:
        self.status = status
        for observe in self.observe_status:
            observe(status)
        self._changed.set()
