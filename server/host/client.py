"""The server's end of the engine process: starts it, talks to it, and starts it again when it dies.

::

    loading --Ready--> ready --socket closed, or hung--> down --back-off--> loading ...
       └--Failed before the first Ready--> failed (for good: the settings are wrong)

    unload() leads from any state to unloaded, start() back to loading.

Requests that run when it dies continue in the next one (:mod:`foresay.server.host.resumption`). An engine with other
settings is another client, which takes over once it is ready (:meth:`foresay.server.host.models.models.Models.renew`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from foresay.server.engine.costs import Costs
from foresay.server.engine.generation import Cause, EngineStatus
from foresay.server.host import frames
from foresay.server.host.child import STARTING, Spawned, spawn
from foresay.server.host.client_base import ChannelClient, Supervised, log
from foresay.server.host.engine_process import Ended, EngineProcess
from foresay.server.host.resumption import AGAIN
from foresay.server.schemas.errors import EngineFailed
from foresay.server.settings.config import ServeConfig

FIRST_BACKOFF = 0.5
LONGEST_BACKOFF = 30.0
#: An engine that has emitted anything, or lived this long, is restarted at once.
HEALTHY_SECONDS = 60.0


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
        self._fail(lambda: EngineFailed(f"the engine process was stopped; {AGAIN}"))

    async def _cease(self) -> None:
        await super()._cease()
        if self._ending is not None:
            await self._ending

    def _fail(self, error: Callable[[], Exception]) -> None:
        self._in_flight.fail(error)

    # -- replacement ------------------------------------------------------------------------------------

    def successor(self, config: ServeConfig) -> EngineClient:
        """A client with other settings that can take over when it is ready."""
        other = EngineClient(config, self._spawn)
        other.status = EngineStatus("unloaded", starts=self.status.starts)
        other._costs, other._steps = self._costs, self._steps
        return other

    async def pause(self) -> None:
        """End the engine process; running requests wait for the next one, with these or other settings."""
        self._leave(changed=False)
        self._set(EngineStatus("loading", STARTING, starts=self.status.starts))
        await self._cease()

    def show(self, status: EngineStatus) -> None:
        """Show the status of the engine being loaded, if this client waits to be replaced by it."""
        if self._replaced:
            self._set(status)

    def take_over(self, before: EngineClient, changed: bool | None) -> int:
        """Take requests and supervision over from the client ``before``; this engine is ready.

        changed: running requests continue here at once; true if this engine may write a different text. None: they
        finish where they are. Returns how many requests continue.
        """
        self._over, before._over = before._over, self._over
        if changed is None:
            self._set(self.status)
            return 0
        self._replaced = before.status.state != "unloaded"
        before._leave(changed)
        self._in_flight, before._in_flight = before._in_flight, self._in_flight
        self._requests, self._lost_at = self._in_flight, before._lost_at
        self._in_flight.send = self._send
        self._send(frames.Number(before._steps))
        return self._go_on() if self.status.state == "ready" else len(self._in_flight)

    def _leave(self, changed: bool) -> None:
        """Send the engine nothing more: running requests wait for the next, which if ``changed`` may write a different
        text."""
        if not self._replaced:
            self._replaced, self._lost_at = True, time.monotonic()
        self._in_flight.move(changed)

    # -- the process ---------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            began, steps = time.monotonic(), self._steps
            reason, cause, among = await self._run_guarded()
            self._lose(self.status.starts, reason, among)
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
        self._process = process = EngineProcess(self._spawn(), self._config, self._received)
        try:
            self._channel = await process.open(self._reserved, self._steps, self._costs)
            hung = await process.until_over()
            if self.status.state == "ready":
                self._lost_at = time.monotonic()
            self._in_flight.hold()
            self._set(EngineStatus("down", hung or "the engine process died", starts=self.status.starts))
            return await process.ended(hung, partial(self._lose, self.status.starts))
        finally:
            self._process = self._channel = None
            self._ending = asyncio.create_task(process.end(politely=self.status.state == "ready"))
            await asyncio.shield(self._ending)

    def _received(self, frame: frames.DownFrame) -> None:
        match frame:
            case frames.Loading(phase, share):
                self._set(EngineStatus("loading", phase, share, starts=self.status.starts))
            case frames.Ready(info, costs):
                self._costs, self._was_ready = costs, True
                self.info, self.footprint = info, info.footprint
                self._go_on()
            case frames.Failed():
                self._failure, self.footprint = frame, frame.footprint or self.footprint
            case _:
                super()._received(frame)

    def _go_on(self) -> int:
        """The engine is ready: resume the requests that wait for it. Returns how many."""
        assert self.info is not None, "it is ready"
        resumed = self._in_flight.ready(len(self.info.draft_shape))
        replaced, self._replaced = self._replaced, False
        cause: Cause | None = "replaced" if replaced else None
        self._set(EngineStatus("ready", starts=self.status.starts, cause=cause, resumed=resumed))
        if resumed or replaced:
            log.warning("engine replaced after %.1f s; %d streams go on", time.monotonic() - self._lost_at, resumed)
        return resumed
