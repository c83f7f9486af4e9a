"""One engine process as the server sees it: it is started, gets ready, sends frames, and is over.

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

#: How long an engine whose socket is closed may take to end before those who wait are told, and how often to look.
DYING_SECONDS, DYING_LOOKS = 1.0, 50


class Ended(NamedTuple):
    """Why an engine process is no more: for people, and in one word. among: the requests that it may have died of; None
    if that may be any that it had."""

    reason: str
    cause: Cause
    among: Collection[str] | None = None


class EngineProcess:
    """config: what it runs with. receive: gets its frames. ready, failed: what it has said of itself; None until it
    has."""

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
        """The operating system's."""
        return self._process.pid

    async def open(self, beside: dict[str, int], steps: int, costs: Costs) -> Channel:
        """Have it build its engine (see :class:`~foresay.server.host.frames.Start`); returns the channel to it."""
        loop = asyncio.get_running_loop()
        _, self._channel = await loop.create_unix_connection(lambda: Channel(self._heard), sock=self._connection)
        self._channel.send(frames.Start(self.config, beside, steps, costs))
        return self._channel

    def _heard(self, frame: frames.DownFrame) -> None:
        match frame:
            case frames.Ready():
                self.ready = frame
            case frames.Failed():
                self.failed = frame
        self._receive(frame)

    async def until_over(self) -> str | None:
        """Wait until it is gone, which is None, or hangs: then what is wrong with it."""
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
            wrong = watchdog.look(channel.heard(), child.cpu_ticks(self.id), loading, state == "T", progress)
            if wrong is not None:
                return wrong
            if not loading:
                channel.send(frames.Ping())

    async def ended(self, hung: str | None, tell: Callable[[str, Collection[str] | None], None]) -> Ended:
        """Why it is over. hung: what is wrong with it, if it is not gone. tell: told of that before all is known, if
        that takes long."""
        if hung is not None:
            among = () if child.stopped(self.id) else None
            self._process.kill()
            tell(hung, among)
            return Ended(hung, "hung", among)
        status = await self._buried(lambda: tell("the engine process is about to end", ()))
        return Ended(self._cause(status), "died", self._among(status))

    async def _buried(self, late: Callable[[], None]) -> int:
        """The exit status, which is there at once as a rule. late: called if it is long in dying."""
        for _ in range(DYING_LOOKS):
            if (status := self._process.poll()) is not None:
                return status
            await asyncio.sleep(DYING_SECONDS / DYING_LOOKS)
        late()
        return await asyncio.to_thread(child.reap, self._process)

    def _among(self, status: int) -> Collection[str] | None:
        """The requests that it may have died of: of none if somebody killed it, and not for want of memory."""
        if self.failed is not None:
            return self.failed.running
        return () if status == -signal.SIGKILL and self._oom_kills == child.oom_kills() is not None else None

    def _cause(self, status: int) -> str:
        """Why it ended: in its own words, or by its exit status."""
        if self.failed is not None:
            return self.failed.message
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the engine process died ({how})"

    async def end(self, politely: bool) -> None:
        """Make sure that it is gone. politely: it is idle or stepping; one that loads looks at its socket when that is
        done."""
        if self._channel is not None:
            self._channel.send(frames.Stop())
            self._channel.close()
        if not politely or child.stopped(self.id):
            self._process.kill()
        await asyncio.to_thread(child.reap, self._process)
