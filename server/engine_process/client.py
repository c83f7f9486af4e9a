"""The server's end of the engine process: starts it, talks to it, and starts it again when it dies.

::

    loading --Ready--> ready --socket closed, or hung--> down --back-off--> loading ...
       └--Failed before the first Ready--> failed (for good: the settings are wrong)

    unload() leads from any state to unloaded, start() back to loading.

Requests that run when it dies continue in the next one (:mod:`foresay.server.engine_process.resumption`), and so they
do when reload() stops the engine and starts one with other settings, or the same again if that does not get ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from foresay.server.engine.costs import Costs
from foresay.server.engine.generation import Cause, EngineStatus
from foresay.server.engine_process import child, frames
from foresay.server.engine_process.child import STARTING, Spawned, spawn
from foresay.server.engine_process.client_base import Resumed, Supervised, log
from foresay.server.engine_process.frames import Channel
from foresay.server.engine_process.resumption import AGAIN, ChannelClient
from foresay.server.schemas.errors import EngineFailed
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ForesayError
from foresay.spec.request import EngineInfo
from foresay.spec.trace import StepTrace


class Ended(NamedTuple):
    """Why an engine process ended: for people, and in one word. among: the requests that may have caused it; None if
    any of its requests may have."""

    reason: str
    cause: Cause
    among: Collection[str] | None = None


class EngineProcess:
    """config: what it runs with. receive: called with its frames. ready, failed: the frames of these names; None until
    received."""

    def __init__(
        self, spawned: child.Spawned, config: ServeConfig, receive: Callable[[frames.DownFrame], None]
    ) -> None:
        self.config = config
        self.ready: frames.Ready | None = None
        self.failed: frames.Failed | None = None
        self._process, self._connection = spawned
        self._receive = receive
        self._channel: Channel | None = None
        self._oom_kills = child.oom_kills()  # of this machine, when it was started

    @property
    def id(self) -> int:
        """The operating system's process id."""
        return self._process.pid

    async def open(self, reserved: dict[str, int], steps: int, costs: Costs) -> Channel:
        """Make it build its engine; returns the channel to it."""
        loop = asyncio.get_running_loop()
        _, self._channel = await loop.create_unix_connection(lambda: Channel(self._take), sock=self._connection)
        self._channel.send(frames.Start(self.config, reserved, steps, costs))
        return self._channel

    def _take(self, frame: frames.DownFrame) -> None:
        match frame:
            case frames.Ready():
                self.ready = frame
            case frames.Failed():
                self.failed = frame
        self._receive(frame)

    async def until_over(self) -> str | None:
        """Wait until it has exited (returns None) or hangs (returns what is wrong)."""
        assert self._channel is not None, "it was opened"
        watching = asyncio.create_task(self._until_hung(self._channel))
        try:
            either: set[asyncio.Future[Any]] = {self._channel.closed, watching}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return watching.result() if watching.done() else None
        finally:
            watching.cancel()

    async def _until_hung(self, channel: Channel) -> str:
        watchdog = child.Watchdog(self.config.engine_timeout)
        while True:
            await asyncio.sleep(watchdog.interval)
            loading, stopped = self.ready is None, child.state_of(self.id) == "T"
            wrong = watchdog.look(channel.received(), child.cpu_ticks(self.id), loading, stopped)
            if wrong is not None:
                return wrong
            if not loading:
                channel.send(frames.Ping())

    async def ended(self, hung: str | None) -> Ended:
        """Why it ended. hung: what is wrong with it, if it has not exited."""
        if hung is not None:
            among = () if child.stopped(self.id) else None
            self._process.kill()
            return Ended(hung, "hung", among)
        status = await asyncio.to_thread(child.reap, self._process)
        return Ended(self._cause(status), "died", self._among(status))

    def _among(self, status: int) -> Collection[str] | None:
        """The requests that may have caused its end: none if it was killed, but not by the kernel for lack of
        memory."""
        if self.failed is not None:
            return self.failed.running
        return () if status == -signal.SIGKILL and self._oom_kills == child.oom_kills() is not None else None

    def _cause(self, status: int) -> str:
        """Why it ended: its own message, or its exit status."""
        if self.failed is not None:
            return self.failed.message
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the engine process died ({how})"

    async def end(self, politely: bool) -> None:
        """Make sure that it has exited. politely: it is idle or stepping; a loading engine reads its socket only when
        done."""
        if self._channel is not None:
            self._channel.send(frames.Stop())
            self._channel.close()
        if not politely or child.stopped(self.id):
            self._process.kill()
        await asyncio.to_thread(child.reap, self._process)


FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 30.0
#: An engine that has emitted anything, or lived this long, is restarted at once.
HEALTHY_SECONDS = 60.0
#: How long the next process of a reload may import while the engine still runs.
IMPORT_SECONDS = 30.0
#: How many engine processes may end while a model loads before the waiting requests fail.
MOST_STARTS = 3


class EngineClient(Supervised, ChannelClient):
    """A :class:`~foresay.server.engine.generation.TokenEngine` that runs in a process of its own. spawn: starts one."""

    def __init__(self, config: ServeConfig, spawn: Callable[[], Spawned] = spawn) -> None:
        Supervised.__init__(self)
        ChannelClient.__init__(self, config.max_resumes)
        self._config = config
        self._spawn = spawn
        self._process: EngineProcess | None = None
        self._reserved: dict[str, int] = {}
        self._costs = Costs()  # as measured by the engine that was ready last
        self._was_ready = False  # since it was started
        self._lost_at = 0.0  # when the last one that was ready ended
        self._replaced = False  # deliberately, and the next is not ready yet
        self._earlier: ServeConfig | None = None  # in force again if the engine does not get ready
        self._refused: ForesayError | None = None  # why the engine of the last reload did not
        self._ahead: Spawned | None = None  # imports, to become the next engine
        self._ending: asyncio.Task[None] | None = None  # of the previous engine process

    @property
    def process_id(self) -> int | None:
        """The id of the engine process; None while there is none."""
        return None if self._process is None else self._process.id

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self, reserved: Mapping[str, int] | None = None) -> None:
        """Start the engine process; returns at once, ``status`` and ``until_ready`` show its progress.

        reserved: bytes that other engines hold, by device; it fails if the rest is too little.
        """
        self._reserved, self._was_ready = dict(reserved or {}), False
        self._begin(STARTING)

    async def stop(self) -> None:
        await self._cease()
        if self._ahead is not None:
            self._ahead.discard()
            self._ahead = None
        self._fail(lambda: EngineFailed(f"the engine process was stopped; {AGAIN}"))

    async def _cease(self) -> None:
        await super()._cease()
        if self._ending is not None:
            await self._ending

    def _fail(self, error: Callable[[], Exception]) -> None:
        self._in_flight.fail(error)

    async def reload(self, config: ServeConfig, reserved: Mapping[str, int] | None = None) -> Resumed:
        """Stop the engine, start it with other settings, and resume what ran. If it does not get ready, the earlier
        settings are in force again, and what was wrong is raised. The next process imports before the engine stops."""
        if self.status.state == "unloaded":
            self._config, self.info, self.footprint = config, None, None
            return Resumed(0, 0.0)
        with contextlib.suppress(OSError, TimeoutError):
            ahead = self._ahead = self._spawn()  # a crash meanwhile takes it
            async with asyncio.timeout(IMPORT_SECONDS):
                while self._ahead is ahead and not child.has_imported(ahead.process):
                    await asyncio.sleep(0.01)
        self._earlier, self._config, self._refused = self._config, config, None
        if self.status.state == "ready":
            self._lost_at = time.monotonic()
        self._replaced = True
        self._in_flight.move()
        await self._cease()
        await self.start(reserved)
        await self.until_ready(1 + MOST_STARTS)
        if self._refused is not None:
            raise self._refused
        return Resumed(self.status.resumed, time.monotonic() - self._lost_at)

    def _lose(self, reason: str, among: Collection[str] | None = ()) -> None:
        if self._earlier is None:  # else it had no request yet, and what runs goes back
            super()._lose(reason, among)

    def _goes_back(self, reason: str) -> bool:
        """Whether the engine of a reload ended before it was ready: then the earlier settings are in force again."""
        if self._earlier is None:
            return False
        self._refused = ForesayError(reason) if self._failure is None else self._failure.error
        self._config, self._earlier = self._earlier, None
        log.error("%s; the engine is started again with its earlier settings", reason)
        return True

    # -- the process ---------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            began, steps = time.monotonic(), self._steps
            reason, cause, among = await self._run_guarded()
            if self._goes_back(reason):
                continue
            self._lose(reason, among)
            if self._failure is not None and self._failure.building and not self._was_ready:
                self._set(EngineStatus("failed", reason, starts=self.status.starts))
                return
            if self._steps > steps or time.monotonic() - began > HEALTHY_SECONDS:
                backoff = 0.0
            log.error("%s; starting it again%s", reason, f" in {backoff:.1f} s" if backoff else "")
            message = f"{reason}; it is being started again"
            self._set(EngineStatus("down", message, starts=self.status.starts, cause=cause))
            await asyncio.sleep(backoff)
            backoff = min(max(2 * backoff, FIRST_BACKOFF), LONGEST_BACKOFF)

    async def _run_guarded(self) -> Ended:
        """As :meth:`_run_once`, but an exception becomes the reason why it ended."""
        try:
            return await self._run_once()
        except Exception as error:
            if not isinstance(error, OSError):  # a bug: log the traceback
                log.exception("the engine process was lost")
            return Ended(f"the engine process could not be started ({error})", "not_started")

    async def _run_once(self) -> Ended:
        """Run one engine process until it ends; its requests wait for the next."""
        self._failure = None
        self._set(EngineStatus("loading", STARTING, starts=self.status.starts + 1))
        spawned, self._ahead = self._ahead or self._spawn(), None
        self._process = process = EngineProcess(spawned, self._config, self._received)
        try:
            self._channel = await process.open(self._reserved, self._steps, self._costs)
            hung = await process.until_over()
            if self.status.state == "ready":
                self._lost_at = time.monotonic()
            self._in_flight.hold()
            self._set(EngineStatus("down", hung or "the engine process died", starts=self.status.starts))
            return await process.ended(hung)
        finally:
            self._process = self._channel = None
            self._ending = asyncio.create_task(process.end(politely=self.status.state == "ready"))
            await asyncio.shield(self._ending)

    def _received(self, frame: frames.DownFrame) -> None:
        match frame:
            case frames.Loading(phase, share):
                self._set(EngineStatus("loading", phase, share, starts=self.status.starts))
            case frames.Ready(info, costs):
                self._costs, self._was_ready, self._earlier = costs, True, None
                self.info, self.footprint = info, info.footprint
                self._go_on(info)
            case frames.Failed():
                self._failure, self.footprint = frame, frame.footprint or self.footprint
            case _:
                super()._received(frame)

    def _stepped(self, trace: StepTrace) -> None:
        super()._stepped(trace)
        if self.observe is not None:
            self._notify(self.observe, trace)

    def _go_on(self, info: EngineInfo) -> None:
        """The engine is ready: resume the requests that wait for it."""
        resumed = self._in_flight.ready(len(info.draft_shape), info.fingerprint)
        replaced, self._replaced = self._replaced, False
        cause: Cause | None = "replaced" if replaced else None
        self._set(EngineStatus("ready", starts=self.status.starts, cause=cause, resumed=resumed))
        if resumed or replaced:
            log.warning("engine replaced after %.1f s; %d streams go on", time.monotonic() - self._lost_at, resumed)
