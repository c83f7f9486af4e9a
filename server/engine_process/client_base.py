"""What an engine client and a fleet of replicas share: start, readiness, supervision and end."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from foresay.server.engine.generation import EngineStatus
from foresay.server.engine_process import frames
from foresay.server.engine_process.resumption import AGAIN
from foresay.server.schemas.errors import EngineFailed
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.spec.request import EngineInfo, Footprint
from foresay.spec.trace import StepTrace

log = logging.getLogger("foresay.server")
#: Called with the current phase and the share done (0 to 1, None if unknown).
Progress = Callable[[str, float | None], None]
T = TypeVar("T")


class Resumed(NamedTuple):
    """moved: requests that go on in the next engine. pause: seconds for which they had none; None if they
    were moved one by one."""

    moved: int
    pause: float | None


class Supervised(ABC):
    """One task, the supervisor, keeps the engine running and sets ``status``.

    info: of the engine that was last ready. footprint: of the one that was last planned. observe: called with every
    engine step; observe_status: with every change. Neither may block; what they raise is logged once for each.
    """

    def __init__(self) -> None:
        self.status = EngineStatus("unloaded")
        self.info: EngineInfo | None = None
        self.footprint: Footprint | None = None
        self.observe: Callable[[StepTrace], None] | None = None
        self.observe_status: list[Callable[[EngineStatus], None]] = []
        self._failed: set[object] = set()
        self._supervisor: asyncio.Task[None] | None = None
        self._over: asyncio.Future[NoReturn] | None = None
        self._changed = asyncio.Event()
        self._failure: frames.Failed | None = None
        self._broken = False  # the supervisor itself failed
        self._served = False  # an engine was ready, perhaps of earlier settings

    @abstractmethod
    async def _supervise(self) -> None:
        """Keep the engine running until cancelled; returns if it can never run."""

    @abstractmethod
    def _fail(self, error: Callable[[], Exception]) -> None:
        """There will be no engine: end all requests."""

    @abstractmethod
    async def stop(self) -> None:
        """End it; requests still running fail."""

    def _begin(self, message: str) -> None:
        """Start the supervisor. message: of the first status."""
        self._broken = False
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        # Before the task first runs, so that the previous status is not taken for the new one.
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
        """Stop the engine and free all it holds, until the next start. why: if something went wrong."""
        await self.stop()
        self._set(EngineStatus("unloaded", why, starts=self.status.starts))

    @property
    def lacks_memory(self) -> bool:
        """Whether it failed only because other engines hold the memory."""
        return self._failure is not None and self._failure.footprint is not None

    async def until_ready(self, starts: int | None = None) -> EngineInfo:
        """Wait until the engine is ready. Raises :class:`ForesayError` if it never will be (:class:`ConfigurationError`
        for wrong settings), or after ``starts`` engine processes that ended before they were ready."""
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
        """Wait until supervision ends, and raise why: there will be no engine, or there was an internal error. Failing
        to reload an engine that was once ready does not end it."""
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
            log.critical("the engine is no longer supervised", exc_info=error)
            message = f"the supervision of the engine ended ({type(error).__name__}: {error})"
            self._set(EngineStatus("failed", message, starts=self.status.starts))
        self._fail(lambda: EngineFailed(f"{self.status.message}; {AGAIN}"))
        if (self._broken or not self._served) and not self._over.done():
            self._over.set_exception(self._given_up())
            self._over.exception()  # marks it as retrieved: perhaps nothing awaits it

    def _given_up(self) -> ForesayError:
        """Why there is no engine."""
        usage = not self._broken and self._failure is not None and self._failure.usage
        return (ConfigurationError if usage else ForesayError)(self.status.message)

    def _set(self, status: EngineStatus) -> None:
        self.status, self._served = status, self._served or status.state == "ready"
        for observe in self.observe_status:
            self._notify(observe, status)
        self._changed.set()

    def _notify(self, observe: Callable[[T], None], what: T) -> None:
        try:
            observe(what)
        except Exception:
            if observe not in self._failed:
                self._failed.add(observe)
                name = getattr(observe, "__qualname__", type(observe).__name__)
                log.exception("%s failed; everything else goes on, and further failures are not logged", name)
