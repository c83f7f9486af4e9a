"""What one engine and several that are one have in common for the server: how they are started, waited for, watched and
ended; what is asked of an engine at the other end of a channel, and what comes of it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import NoReturn, TypeVar

from foresay.server.engine.generation import EngineStatus, Sink, check_comes
from foresay.server.host import frames
from foresay.server.host.frames import Channel
from foresay.server.host.resumption import AGAIN, InFlights
from foresay.server.schemas.errors import EngineFailed
from foresay.spec.errors import ConfigurationError, ForesayError
from foresay.spec.request import EngineInfo, Footprint, Request
from foresay.spec.trace import ShadowReport, StepTrace

log = logging.getLogger("foresay.server")
#: Told of what is going on, and how much of it is done where that is known.
Progress = Callable[[str, float | None], None]
T = TypeVar("T")


class Observed:
    """What others look on at. What an observer raises is logged, the first time, and is nobody else's."""

    def __init__(self) -> None:
        self._failed: set[object] = set()

    def _tell(self, observe: Callable[[T], None] | None, what: T) -> None:
        try:
            if observe is not None:
                observe(what)
        except Exception:
            if observe not in self._failed:
                self._failed.add(observe)
                name = getattr(observe, "__qualname__", type(observe).__name__)
                log.exception("%s failed; everything else goes on, and further failures are not logged", name)


class Supervised(Observed, ABC):
    """One task, the supervisor, has it run; what that finds out is the status.

    info: of the engine that was ready last. footprint: of the one that was planned last. observe_status: told of every
    change; must not block.
    """

    def __init__(self) -> None:
        Observed.__init__(self)
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
            log.critical("the engine is no longer supervised", exc_info=error)
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
            self._tell(observe, status)
        self._changed.set()


class Asked(Observed):
    """A :class:`~foresay.server.engine.generation.TokenEngine` while there is a channel, and it is ready.

    observe, observe_shadow: told of every step of the engine, and of what its shadow drafter would have done; must not
    block. most_losses: engines that may end under a request. Requests that went on in another engine are that one's,
    and are ended there too.
    """

    status: EngineStatus

    def __init__(self, most_losses: int) -> None:
        Observed.__init__(self)
        self.observe: Callable[[StepTrace], None] | None = None
        self.observe_shadow: Callable[[ShadowReport], None] | None = None
        self._in_flight = self._requests = InFlights(self._send, most_losses)
        self._channel: Channel | None = None
        self._steps = 0  # the number of the latest

    def add(self, request: Request, sink: Sink) -> None:
        """Begin a request, in the next engine if there is none just now; its results go to ``sink``."""
        check_comes(self.status)
        self._requests.add(request, sink)

    def cancel(self, id: str) -> None:
        """Drop a request and free what it holds; its sink hears no more."""
        self._requests.cancel(id)

    def finish(self, id: str, at_token: int) -> None:
        """End a request after its output token number ``at_token``; the last delta still comes."""
        self._requests.finish(id, at_token)

    def keep_warm(self, tokens: list[int], salt: str) -> None:
        """Let the KV of this text be the last to make room; no harm done if it is not there."""
        if self.status.state == "ready":
            self._send(frames.KeepWarm(tokens, salt))

    def _send(self, frame: frames.UpFrame) -> None:
        if self._channel is not None:
            self._channel.send(frame)

    def _received(self, frame: frames.DownFrame) -> None:
        """What an engine says while it runs."""
        match frame:
            case frames.Deltas(deltas, trace):
                if trace is not None:
                    self._stepped(trace)
                for delta in deltas:
                    self._in_flight.take(delta)
            case frames.Rejected(id):
                self._in_flight.reject(id, frame.error)
            case frames.Shadowed(report):
                self._tell(self.observe_shadow, report)

    def _stepped(self, trace: StepTrace) -> None:
        self._steps = trace.number
        self._in_flight.stepped(trace.waiting)
        self._tell(self.observe, trace)

    def _lose(self, number: int, reason: str, among: Collection[str] | None = ()) -> None:
        """Engine process ``number`` has ended, or is about to. May be said again of one, when more is known."""
        self._in_flight.lost(number, reason, among)
