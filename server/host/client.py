"""The server's end of the engine process: starts it, talks to it, and starts it again when it dies.

::

    loading --Ready--> ready --socket closed, or hung--> down --back-off--> loading ...
       └--Failed before the first Ready--> failed (for good: the settings are wrong)

    unload() leads from each of them to unloaded, start() back to loading. replace() has another engine get ready beside
    the one that serves, or after it, and goes on in that one.

What runs when it dies goes on in the next one (:mod:`foresay.server.host.resumption`).
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from foresay.server.engine.costs import Costs
from foresay.server.engine.generation import Cause, EngineStatus
from foresay.server.host import frames
from foresay.server.host.asked import Asked, Supervised, log
from foresay.server.host.child import STARTING, Process, Spawned, oom_kills, reap, spawn, stopped
from foresay.server.host.frames import Channel
from foresay.server.host.models.resident import NoPlace
from foresay.server.host.replacement import Progress, Standby, make_ready, refusal, until_hung, writes_alone
from foresay.server.host.resumption import AGAIN
from foresay.server.schemas.errors import EngineFailed
from foresay.server.settings.config import ServeConfig
from foresay.spec.errors import ForesayError

FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 30.0
#: One that has written anything, or lived this long, is followed by the next at once.
HEALTHY_SECONDS = 60.0
#: How long an engine whose socket is closed may take to end before those who wait are told, and how often to look.
DYING_SECONDS, DYING_LOOKS = 1.0, 50


class Ended(NamedTuple):
    """Why an engine process is no more: for people, and in one word. among: the requests that it may have died of; None
    if that may be any that it had."""

    reason: str
    cause: Cause
    among: Collection[str] | None = None


class Trial(NamedTuple):
    """Other settings that were never run yet: those before, and whether an engine gets ready with the new ones."""

    before: ServeConfig
    ready: asyncio.Future[None]


class EngineClient(Supervised, Asked):
    """A :class:`~foresay.server.engine.generation.TokenEngine` that runs in a process of its own. spawn: starts one."""

    def __init__(self, config: ServeConfig, spawn: Callable[[], Spawned] = spawn) -> None:
        Supervised.__init__(self)
        Asked.__init__(self, config.max_resumes)
        self.process_id: int | None = None
        self._config = config
        self._spawn = spawn
        self._beside: dict[str, int] = {}
        self._costs = Costs()  # as measured by the engine that was ready last
        self._was_ready = False  # since it was started
        self._lost_at = 0.0  # when the last one that was ready ended
        self._standby: Standby | None = None  # goes on at once
        self._trial: Trial | None = None
        self._replaced = False  # on purpose, and the next is not ready yet
        self._ending: asyncio.Task[None] | None = None  # of the engine process before
        self._oom_kills: int | None = None  # of this machine, when the engine process was started

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self, beside: Mapping[str, int] | None = None) -> None:
        """Start the engine process; returns at once, ``status`` and ``until_ready`` tell how it goes.

        beside: bytes that other engines hold, by device; if there is no room beside them it fails.
        """
        self._beside, self._was_ready = dict(beside or {}), False
        self._begin(STARTING)

    async def stop(self) -> None:
        """End the engine process; requests still running fail."""
        await self._cease()
        self._fall_back("the model was unloaded meanwhile")
        if self._standby is not None:
            await self._standby.end()
            self._standby = None
        if self._ending is not None:
            await self._ending
        self._fail(lambda: EngineFailed(f"the engine process was stopped; {AGAIN}"))

    def _fail(self, error: Callable[[], Exception]) -> None:
        self._in_flight.fail(error)

    def configure(self, config: ServeConfig) -> None:
        """Start the next engine process with these settings."""
        self._config = config

    # -- replaced on purpose -------------------------------------------------------------------------------------

    async def replace(self, config: ServeConfig, tell: Progress, changed: bool) -> int:
        """Go on in an engine of these settings, started beside the one that serves if there is room, else after it.

        tell: what goes on meanwhile. changed: it may write other texts. Returns how many requests go on in it; raises a
        :class:`ForesayError` if it does not get ready: then the one before serves on.
        """
        self._ready_channel()
        held = {} if self.footprint is None else {self.footprint.device: self.footprint.held}
        others = {device: self._beside.get(device, 0) + held.get(device, 0) for device in {**self._beside, **held}}
        if writes_alone(config):
            return await self._after(config, tell, changed)
        start = frames.Start(config, others, self._steps, self._costs)
        try:
            standby = await make_ready(self._spawn(), start, config.engine_timeout, tell)
        except NoPlace:
            return await self._after(config, tell, changed)
        if self._supervisor is None or self._supervisor.done():
            await standby.end()
            raise ForesayError("the model was unloaded meanwhile")
        self._standby = standby
        return await self._tried(config, changed)

    async def _after(self, config: ServeConfig, tell: Progress, changed: bool) -> int:
        """As :meth:`replace`, where two have no room beside each other: meanwhile all wait."""

        def told(status: EngineStatus) -> None:
            tell(status.message, status.share)

        self.observe_status.append(told)
        try:
            return await self._tried(config, changed)
        finally:
            self.observe_status.remove(told)

    async def _tried(self, config: ServeConfig, changed: bool) -> int:
        """Have the next engine go on, and wait until it does."""
        self._trial = trial = Trial(self._config, asyncio.get_running_loop().create_future())
        self._config = config
        count = self._leave(changed)
        if self._standby is None:
            self._set(EngineStatus("loading", STARTING, starts=self.status.starts))
        await trial.ready
        return count

    def _leave(self, changed: bool) -> int:
        """Ask the engine nothing more: whatever runs goes on in the next. Returns how many do."""
        self._lost_at, self._replaced = time.monotonic(), True
        if self._channel is not None:
            self._channel.retire()
        return self._in_flight.move(changed)

    def _fall_back(self, reason: str) -> None:
        """The engine has ended: if it was one of other settings that was not ready yet, those before are right."""
        if self._trial is None:
            return
        (self._config, ready), self._trial = self._trial, None
        if not ready.done():
            building = self._failure is not None and self._failure.building
            ready.set_exception(refusal(self._failure) if building and self._failure else EngineFailed(reason))

    # -- the process ---------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            began, steps = time.monotonic(), self._steps
            reason, cause, among = await self._run_guarded()
            if cause == "replaced":
                continue
            self._lose(self.status.starts, reason, among)
            self._fall_back(reason)
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
        """As :meth:`_run_once`, but an error of ours or of the system's is one more reason."""
        try:
            return await self._run_once()
        except Exception as error:
            if not isinstance(error, OSError):  # a bug: its place is wanted
                log.exception("the engine process was lost")
            return Ended(f"the engine process could not be started ({error})", "not_started")

    async def _run_once(self) -> Ended:
        """Run one engine process to its end; what ran in it waits for the next."""
        self._failure = None
        standby, self._standby = self._standby, None
        if standby is None:
            self._set(EngineStatus("loading", STARTING, starts=self.status.starts + 1))
        process, ours = self._spawn() if standby is None else (standby.process, None)
        self.process_id, self._oom_kills = process.pid, oom_kills()
        try:
            self._channel = await self._opened(ours) if ours is not None else self._adopted(standby)
            return await self._until_over(process, self._channel)
        finally:
            channel, self._channel, self.process_id = self._channel, None, None
            self._ending = asyncio.create_task(self._end(process, channel))
            if self._standby is None:  # else that one goes on at once
                await asyncio.shield(self._ending)

    async def _opened(self, ours: socket.socket) -> Channel:
        """The channel to an engine process that was started; it is told which engine to build."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: Channel(self._received), sock=ours)
        channel.send(frames.Start(self._config, self._beside, self._steps, self._costs))
        return channel

    def _adopted(self, standby: Standby | None) -> Channel:
        """The channel to one that is ready; all go on in it."""
        assert standby is not None, "an engine is started or stands by"
        standby.channel.hand_to(self._received)
        self._channel = standby.channel  # for those who go on
        self._channel.send(frames.Number(self._steps))
        self.status = EngineStatus("ready", starts=self.status.starts + 1)
        self._is_ready(standby.ready)
        return standby.channel

    async def _until_over(self, process: Process, channel: Channel) -> Ended:
        """Wait until the process is gone or hangs; then nobody waits any longer for this one."""
        timeout, loading = self._config.engine_timeout, lambda: self.status.state == "loading"
        watching = asyncio.create_task(until_hung(process.pid, channel, timeout, loading))
        try:
            either: set[asyncio.Future[Any]] = {channel.closed, watching}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hung = watching.result() if watching.done() else None
        finally:
            watching.cancel()
        if channel.retired:
            return Ended("the engine was replaced", "replaced")
        if self.status.state == "ready":
            self._lost_at = time.monotonic()
        self._in_flight.hold()
        self._set(EngineStatus("down", hung or "the engine process died", starts=self.status.starts))
        if hung is None:
            status = await self._buried(process)
            return Ended(self._cause(status), "died", self._among(status))
        among = () if stopped(process.pid) else None
        process.kill()
        self._lose(self.status.starts, hung, among)
        return Ended(hung, "hung", among)

    async def _buried(self, process: Process) -> int:
        """The exit status, which is there at once as a rule; if it is long in dying, those who wait are told before."""
        for _ in range(DYING_LOOKS):
            if (status := process.poll()) is not None:
                return status
            await asyncio.sleep(DYING_SECONDS / DYING_LOOKS)
        self._lose(self.status.starts, "the engine process is about to end")
        return await asyncio.to_thread(reap, process)

    def _among(self, status: int) -> Collection[str] | None:
        """The requests that it may have died of: of none if somebody killed it, and not for want of memory."""
        if self._failure is not None:
            return self._failure.running
        return () if status == -signal.SIGKILL and self._oom_kills == oom_kills() is not None else None

    def _cause(self, status: int) -> str:
        """Why the process ended: in its own words, or by its exit status."""
        if self._failure is not None:
            return self._failure.message
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the engine process died ({how})"

    async def _end(self, process: Process, channel: Channel | None) -> None:
        """Make sure the process is gone, politely if it is idle or stepping."""
        if channel is not None:
            channel.send(frames.Stop())
            channel.close()
        if self.status.state != "ready":
            process.kill()  # it would only look at its socket when loading is done
        await asyncio.to_thread(reap, process)

    def _received(self, frame: frames.DownFrame) -> None:
        match frame:
            case frames.Loading(phase, share):
                self._set(EngineStatus("loading", phase, share, starts=self.status.starts))
            case frames.Ready():
                self._is_ready(frame)
            case frames.Failed():
                self._failure, self.footprint = frame, frame.footprint or self.footprint
            case _:
                super()._received(frame)

    def _is_ready(self, ready: frames.Ready) -> None:
        info, self._costs, self._was_ready = ready.info, ready.costs, True
        self.info, self.footprint = info, info.footprint
        replaced, self._replaced = self._replaced, False
        trial, self._trial = self._trial, None
        if trial is not None and not trial.ready.done():
            trial.ready.set_result(None)
        resumed = self._in_flight.ready(len(info.draft_shape))
        cause: Cause | None = "replaced" if replaced else None
        self._set(EngineStatus("ready", starts=self.status.starts, cause=cause, resumed=resumed))
        if resumed or replaced:
            log.warning("engine replaced after %.1f s; %d streams go on", time.monotonic() - self._lost_at, resumed)
