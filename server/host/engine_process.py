"""The server's view of one engine process: started, ready, sending frames, ended.

::

    open ──Loading .. Ready | Failed──> until_over ──gone, or hung──> ended: why, and of which requests ──> end
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from foresay.server.engine.costs import Costs
from foresay.server.engine.generation import Cause
from foresay.server.host import child, frames
from foresay.server.host.frames import Channel
from foresay.server.settings.config import ServeConfig

#: How long a process may take to exit after its socket closes before waiting requests are notified; looks meanwhile.
DYING_SECONDS, DYING_LOOKS = 1.0, 50


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
        """Make it build its engine (see :class:`~foresay.server.host.frames.Start`); returns the channel to it."""
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
            loading, state = self.ready is None, child.state_of(self.id)
            progress = child.progress_in(self.ready.progress) if self.ready is not None and state != "t" else None
            wrong = watchdog.look(channel.received(), child.cpu_ticks(self.id), loading, state == "T", progress)
            if wrong is not None:
                return wrong
            if not loading:
                channel.send(frames.Ping())

    async def ended(self, hung: str | None, notify: Callable[[str, Collection[str] | None], None]) -> Ended:
        """Why it ended. hung: what is wrong with it, if it has not exited. notify: called early, with what is known so
        far, if exiting takes long."""
        if hung is not None:
            among = () if child.stopped(self.id) else None
            self._process.kill()
            notify(hung, among)
            return Ended(hung, "hung", among)
        status = await self._buried(lambda: notify("the engine process is about to end", ()))
        return Ended(self._cause(status), "died", self._among(status))

    async def _buried(self, late: Callable[[], None]) -> int:
        """Wait for the exit status, usually available at once. late: called if exiting takes long."""
        for _ in range(DYING_LOOKS):
            if (status := self._process.poll()) is not None:
                return status
            await asyncio.sleep(DYING_SECONDS / DYING_LOOKS)
        late()
        return await asyncio.to_thread(child.reap, self._process)

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
